"""The gate fails every stage for grasps that is wrong on purpose, and passes those that are right."""

import re
from pathlib import Path

import mutants
import pytest
from running import tiny

from runner.plugin.registry import Registry
from runner.verify.gate import verify_recipe
from runner.verify.options import Options

REGISTRY = Registry([Path(mutants.__file__)])
KEPT = "data.clouds=3"
SHORT = ("model.steps=2", "model.sampling_steps=2")
WRONG = [
    ("stale_condition_cache", (), r"'predict\.\w+'"),
    ("grouping_cache_with_jitter", (KEPT, "data.augment={jitter_mm: 5.0}"), r"slot '\w+'"),
    ("double_scaler", (), r"slot 'backward'|slot 'step'|\.grad"),
    ("turned_without_its_label", (), "slot 'next_batch': 'cloud'"),
]
"""Stages, on which data, and what is named."""


def verdict(kind, *sets, name="grasp_diffusion"):
    off = [
        f"optimization.{each}=off" for each in ("condition_cache", "fused_optimizer", "heap_retention") if each != kind
    ]
    recipe = tiny(name, "data.scenes=1", "model.layers=1", *off, *sets, f"optimization.{kind}=on", registry=REGISTRY)
    options = Options(2, budget=0.0, stages=(kind,), horizon=0, names_operators=False)
    (row,) = verify_recipe(recipe, REGISTRY, options, lambda _: None).rows
    return row


@pytest.mark.parametrize(("kind", "sets", "named"), WRONG)
def test_a_wrong_stage_fails_where_it_is_wrong(kind, sets, named):
    row = verdict(kind, *sets)
    assert row.verdict == "FAIL", row.summary
    assert re.search(named, row.summary), row.summary


@pytest.mark.parametrize(("name", "kind"), [("grasp_diffusion", "grouping_cache"), ("grasp_latent", "condition_cache")])
def test_a_right_one_passes(name, kind):
    row = verdict(kind, KEPT, *SHORT, name=name)
    assert row.verdict == "PASS", row.summary
