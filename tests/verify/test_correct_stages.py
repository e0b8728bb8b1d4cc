"""Shipped stages with learners of less usual kinds: what is correct passes, and a message names what differs."""

from pathlib import Path

import pytest
from judging import SHORT, pair_of

from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome
from runner.recipe.loader import load
from runner.verify.checks.updates import UpdatesCheck
from runner.verify.timed_gate import quick

HERE = Path(__file__).parent
REGISTRY = Registry([HERE / "supervised.py", HERE / "correct.py"])


def recipe_of(*sets):
    return load(HERE / "supervised.yaml", ["device=cpu", *sets], REGISTRY)


def judge(stage, *sets):
    """Returns the verdict of the check of updates."""
    return UpdatesCheck().run(*pair_of(recipe_of(*sets), stage, REGISTRY, SHORT))


@pytest.mark.parametrize("logs", ["a constant", "a number", "samples", "right answers", "a flag", "an integer"])
def test_micro_batches_may_count_what_they_log_otherwise(logs):
    verdict = judge(
        "gradient_accumulation", "model.kind=rotated", f"model.logs={logs}",
        "optimization.gradient_accumulation.micro_batch=5",
    )  # fmt: skip
    assert verdict, verdict


def test_a_logged_number_that_parts_of_a_batch_do_not_add_up_to_is_named():
    verdict = judge(
        "gradient_accumulation", "model.kind=rotated", "model.logs=the largest",
        "optimization.gradient_accumulation.micro_batch=4",
    )  # fmt: skip
    assert verdict.outcome is Outcome.FAIL
    assert "'logged.mean' differs" in verdict.summary
    assert "forward" not in verdict.summary


COMPLEX = ("model.kind=rotated", "model.complex=true")


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
def test_complex_parameters_keep_an_optimizer_without_a_fused_kernel(kind):
    sets = f"optimizer.kind={kind}", "optimizer.lr=0.01", "optimization.fused_optimizer=on"
    verdict = judge("fused_optimizer", *COMPLEX, *sets)
    assert verdict, verdict


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    "optimizer",
    [("kind=sgd", "lr=0.1"), ("kind=sgd", "lr=0.1", "momentum=0.9"), ("kind=adagrad", "lr=0.1"), ("kind=sparseadam",)],
)
def test_sparse_gradients_and_moments_are_kept_and_compared(optimizer):
    sets = [f"optimizer.{each}" for each in optimizer]
    verdict = judge("heap_retention", "model.sparse=true", *sets, "optimization.heap_retention=on")
    assert verdict, verdict


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("stage", "sets"),
    [
        ("fused_optimizer", (*COMPLEX, "optimizer.kind=adam", "optimizer.lr=0.01")),
        ("heap_retention", ("model.sparse=true", "optimizer.kind=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9")),
    ],
)
def test_complex_and_sparse_states_pass_all_checks(stage, sets):
    verdict = quick(recipe_of(*sets, f"optimization.{stage}=on"), REGISTRY, (stage,))
    assert verdict, verdict
