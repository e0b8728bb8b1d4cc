"""The first diverging operator of stages that are wrong on purpose."""

from functools import cache
from pathlib import Path

import pytest
import wrong_stages
from running import tiny
from wrong_base import MARL

from runner.plugin.registry import Registry
from runner.proof.difference import TOLERANCE
from runner.proof.first_operator import record
from runner.proof.operator_search import OperatorSearch
from runner.proof.operators import OperatorRecorder
from runner.proof.trajectory import Trajectory
from runner.proof.values import ValueTable
from runner.verify.subjects import recorded, subject

REGISTRY = Registry([Path(wrong_stages.__file__)])
OPERATORS = [
    ("scaled_loss", 1, "aten.mul", "which the baseline does not have"),
    ("scaled_backward", 1, "aten.mul", "which the baseline does not have"),
    ("swapped_polyak", 1, "aten.lerp_", ""),
    ("early_target_step", 1, "aten.lerp_", ""),
    ("mean_over_agents", 1, "aten.div", "which the baseline does not have"),
    ("leaky_actor_loss", 1, "aten.mm", "which the baseline does not have"),
    ("accumulated_gradients", 2, "aten.add_", "where the baseline has aten.view"),
    ("stale_cache", 2, "aten.transpose", "that existed before the update and is not the baseline's"),
]
"""Stages, the update in which each is wrong first, and the operator with what is remarked."""


@cache
def recipe():
    return tiny("marl_baseline", *MARL, "data.warmup=128", registry=REGISTRY)


@cache
def trajectory():
    return Trajectory(recorded(recipe(), REGISTRY, 2), 0, float64=True)


@cache
def reference(update):
    """The baseline's values and operators in an update; they serve for all stages."""
    table = ValueTable(TOLERANCE)
    return table, record(trajectory(), subject(recipe(), REGISTRY, ()), update, OperatorRecorder(table))


@pytest.mark.parametrize(("kind", "update", "name", "remark"), OPERATORS)
def test_the_operator_of_a_wrong_stage_is_named(kind, update, name, remark):
    table, expected = reference(update)
    build = subject(recipe(), REGISTRY, (kind,))
    candidate = record(trajectory(), build, update, OperatorRecorder(table, is_reference=False))
    operator = OperatorSearch(table, expected, candidate).first()
    assert operator.operator == name, operator
    assert operator.remark.endswith(remark), operator
