"""Batches that cannot be cut: checks that need parts are left out, and the verdict says which sizes were compared."""

from pathlib import Path

import pytest

from runner.plugin.registry import Registry
from runner.proof import Outcome
from runner.recipe.loader import load
from runner.system.errors import IndivisibleBatchError, UsageError
from runner.training.pipeline import assemble
from runner.training.step import Step
from runner.verify.explanation import explain
from runner.verify.gate import Gate, verify_recipe
from runner.verify.options import Options

HERE = Path(__file__).parent
REGISTRY = Registry([HERE / "ragged.py"])
OPTIONS = Options(updates=3, horizon=0, budget=0.0, names_operators=False)


def recipe_of(tmp_path, *sets):
    path = tmp_path / "ragged.yaml"
    path.write_text(
        "{name: ragged, model: {kind: ragged_bag}, data: {kind: ragged_texts}, train: {updates: 8, batch_size: 8}}"
    )
    return load(path, ["device=cpu", *sets], REGISTRY)


@pytest.mark.parametrize("stage", ["sample_cache", "fused_optimizer"])
def test_a_stage_that_cuts_no_batch_has_a_verdict(tmp_path, stage):
    gate = Gate(recipe_of(tmp_path, f"optimization.{stage}=on"), REGISTRY, OPTIONS, lambda _: None)
    verdict = gate((stage,))
    assert verdict.outcome == Outcome.PASS, verdict
    assert gate.baseline.input_sizes == (8,)
    assert "inputs of other sizes than 8" in str(verdict)


def test_slow_predictions_of_such_batches_are_those_of_a_batch(tmp_path, monkeypatch):
    recipe = recipe_of(tmp_path, "optimization.fused_optimizer=on")
    monkeypatch.setattr(type(recipe.model), "prediction_batch", 2)
    verdict = Gate(recipe, REGISTRY, OPTIONS, lambda _: None)(("fused_optimizer",))
    assert verdict.outcome == Outcome.PASS, verdict


def test_a_stage_that_cuts_them_is_refused_with_both_ways_out(tmp_path):
    step = Step(assemble(recipe_of(tmp_path, "optimization.gradient_accumulation.micro_batch=2")))
    hint = r"'starts' may not have one row.*shared=.*or write Texts\.split|'words' may not.*or write Texts\.split"
    with pytest.raises(IndivisibleBatchError, match=hint):
        step(step.next())


@pytest.mark.parametrize("ask", [verify_recipe, explain])
def test_a_recipe_without_an_active_stage_is_told_why(tmp_path, ask):
    arguments = (OPTIONS, lambda _: None) if ask is verify_recipe else (OPTIONS,)
    recipe = recipe_of(tmp_path, "optimization.cuda_graph=on")
    with pytest.raises(UsageError, match=r"does anything here \(cuda_graph: .*CUDA"):
        ask(recipe, REGISTRY, *arguments)
    with pytest.raises(UsageError, match="has no stage to verify; switch one on"):
        ask(recipe_of(tmp_path), REGISTRY, *arguments)
