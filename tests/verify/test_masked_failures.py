"""Stages that hide failures of numbers, and that seed global random generators."""

import random

import numpy as np
import pytest
import torch
from judging import HERE, judge, pair_of
from running import tiny

from runner.plugin.implementation import implementation_of
from runner.plugin.registry import Registry
from runner.proof.subject import Subject
from runner.proof.verdict import Outcome
from runner.verify.checks.masked_failures import MaskedFailuresCheck
from runner.verify.checks.random_seeds import RandomSeedsCheck
from runner.verify.gate import Gate
from runner.verify.options import Options
from runner.verify.seeding import ASSEMBLY, EVALUATION, PREDICTION, UPDATE, find_seeds

pytestmark = pytest.mark.usefixtures("short_texts")
REGISTRY = Registry([HERE / "wrong_masked.py"])
MASKED = {
    "logits_without_nan": ("NaN in", "exact close"),
    "quiet_loss": ("NaN in", "close"),
    "repaired_parameters": ("NaN in", "exact close"),
    "loss_without_nan": ("NaN in", "exact"),
    "no_small_gradients": ("times as large, not the same", "exact close"),
    "no_small_pixels": ("a batch 1e-12 times as large, not the same", "close"),
    "flushed_inside": ("a state 1e-39 times as large, not the same", "exact"),
    "no_subnormal_gradients": ("a state 1e-39 times as large, not the same", "exact"),
    "small_part_in_bf16": ("a tensor has fewer digits", "close"),
    "norms_in_fp16": ("not the same", "close"),
    "branch_in_bf16": ("update 1, slot 'step'", "close"),
}
"""The message for each stage, and what it promises."""
SEEDED = {
    "seeded_when_attached": ("NumPy", ASSEMBLY),
    "seeded_in_updates": ("Python", UPDATE),
    "seeded_backward": ("torch", UPDATE),
}


@pytest.mark.parametrize(
    ("kind", "message", "promise"),
    [(kind, message, promise) for kind, (message, promises) in MASKED.items() for promise in promises.split()],
)
def test_a_stage_that_hides_a_failure_fails(kind, message, promise):
    verdict = judge(MaskedFailuresCheck(), kind, REGISTRY, promise)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert message in verdict.summary


@pytest.mark.parametrize("kind", SEEDED)
def test_a_stage_that_seeds_a_global_generator_fails(kind):
    name, moment = SEEDED[kind]
    verdict = judge(RandomSeedsCheck(), kind, REGISTRY)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert f"{moment} seeds the global random generator of {name}" in verdict.summary


def test_an_error_of_the_baseline_is_none_of_the_stage(monkeypatch):
    registry = Registry()
    recipe = tiny("digits_classifier", "optimization.fused_optimizer=on")
    monkeypatch.setattr(implementation_of(type(recipe.data)), "evaluate", lambda *_: {}["nothing"])
    gate = Gate(recipe, registry, Options(updates=3, budget=0.0), lambda _: None)
    gate.checks = [RandomSeedsCheck()]
    verdict = gate(("fused_optimizer",))
    assert verdict.outcome is Outcome.INCONCLUSIVE, verdict
    assert "cannot be compared: the baseline raises KeyError: 'nothing' (test_masked_failures.py:" in verdict.summary


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("digits_classifier", "fused_optimizer"),
        ("shakespeare_gpt", "activation_checkpointing"),
        ("marl_baseline", "forward_cache"),
    ],
)
def test_correct_stages_pass(name, kind):
    registry = Registry()
    pair, budget = pair_of(tiny(name, f"optimization.{kind}=on"), kind, registry)
    for check in (MaskedFailuresCheck(), RandomSeedsCheck()):
        verdict = check.run(pair, budget)
        assert verdict, (check.name, verdict.summary)


SEEDING = {
    "Python": lambda seed: random.seed(seed),
    "NumPy": lambda seed: np.random.seed(seed),
}
DRAWING = (random.random, np.random.rand, lambda: torch.rand(1))
"""Draws from global generators, which a change may do."""


@pytest.mark.parametrize("name", SEEDING)
@pytest.mark.parametrize("moment", [ASSEMBLY, UPDATE, PREDICTION, EVALUATION])
@pytest.mark.parametrize("seed", [0, 1, 7])
@pytest.mark.parametrize("draws", [0, 3])
def test_a_seed_is_found_at_its_moment_whatever_is_drawn(name, moment, seed, draws):
    def states():
        return {"Python": repr(random.getstate()), "NumPy": repr(np.random.get_state()), "torch": True}

    def build():
        if moment == ASSEMBLY:
            SEEDING[name](seed)
        assembled = states()

        def act(present):
            if present == ASSEMBLY:
                return assembled
            for draw in DRAWING:
                draw()
            if present == moment:
                SEEDING[name](seed)
            for _ in range(draws):
                for draw in DRAWING:
                    draw()
            return states()

        return Subject(act, {}, parameters=lambda: ())

    seeds = find_seeds(build)
    assert seeds[0] == (name, moment)
    assert {generator for generator, _ in seeds} == {name}


def test_draws_are_no_seeds():
    def build():
        def act(_):
            for draw in DRAWING:
                draw()
            return {"Python": repr(random.getstate()), "NumPy": repr(np.random.get_state()), "torch": True}

        return Subject(act, {}, parameters=lambda: ())

    assert find_seeds(build) == []
