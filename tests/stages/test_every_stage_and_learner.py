"""Every generic stage with learners of both storeys: it works, keeping its contract, or it refuses with a reason."""

import math
from pathlib import Path

import pytest
import tiny_learners
import torch
from running import NoDisplay

from runner.api import Close, Exact, RunnerError, UsageError
from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome
from runner.recipe.loader import load
from runner.tracking import Workspace
from runner.training.pipeline import assemble, setting_of
from runner.training.run import run
from runner.training.stage_watch import StageReport, Watch
from runner.training.step import Step
from runner.verify.gate import Gate, verify_recipe
from runner.verify.options import Options
from runner.verify.timed_gate import quick
from runner.verify.variants import contract_of

REGISTRY = Registry([Path(tiny_learners.__file__)])
GENERIC = [
    kind
    for kind in REGISTRY.kinds("optimization")
    if REGISTRY.get("optimization", kind).__module__.startswith("runner.plugins.stages.")
]
SETTINGS = {
    "gradient_accumulation": "{micro_batch: 4}",
    "batch_autotune": "{largest: 12}",
    # Each collection looks at all that the tests have imported; a training has four updates.
    "delete_tensors": "{every: 4}",
}
REFUSED = {
    ("channels_last", "tokens"): "four dimensions",
    ("channels_last", "gan"): "four dimensions",
    ("activation_checkpointing", "gan"): "names no blocks",
    ("gradient_accumulation", "gan"): "no slot 'forward_backward'",
    ("preprocess_once", "images"): "needs samples by number",
    ("preprocess_once", "gan"): "needs samples by number",
    ("prefetch", "images"): "in memory",
    ("prefetch", "gan"): "in memory",
    ("bucketing", "gan"): "no slot 'loss'",
    ("bucketing", "tokens"): "switch the model's dropout off",
}
"""What cannot work, and a word of the reason."""


def recipe_of(learner: str, folder: Path, *sets: str, registry: Registry = REGISTRY):
    path = folder / f"{learner}.yaml"
    path.write_text(
        f"name: {learner}\nseed: 3\ndevice: cpu\ntracking: {{system_metrics: false}}\n{tiny_learners.RECIPES[learner]}"
    )
    return load(path, sets, registry)


def with_stage(kind: str) -> str:
    return f"optimization.{kind}={SETTINGS.get(kind, 'on')}"


def trained(recipe):
    return run(recipe, REGISTRY, Workspace(), NoDisplay())


TRACED_FOR_LONG = {("compile", "tokens"), ("compile", "images")}
"""Learners that are traced anew for a minute by a gate; the GAN has more functions to trace, and smaller ones."""


@pytest.mark.sampled(12)
@pytest.mark.usefixtures("migrated_workspace", "traced_only", "copied_children")
@pytest.mark.parametrize("learner", tiny_learners.RECIPES)
@pytest.mark.parametrize("kind", GENERIC)
def test_a_stage_works_with_a_learner_or_says_why_not(kind, learner, tmp_path):
    reason = REFUSED.get((kind, learner))
    if reason is not None:
        with pytest.raises(RunnerError, match=reason):
            trained(recipe_of(learner, tmp_path, with_stage(kind)))
        return
    recipe = recipe_of(learner, tmp_path, with_stage(kind))
    result = trained(recipe)
    assert result.status == "FINISHED"
    assert all(math.isfinite(value) for value in result.metrics.values())
    (report,) = result.stages
    assert report.active or report.reason
    if (kind, learner) in TRACED_FOR_LONG:
        return
    if report.active and isinstance(contract_of(recipe, kind), Exact | Close):
        torch._dynamo.reset()  # what was compiled to train fast draws in another way than what is compared
        verdict = quick(recipe, REGISTRY, [kind])
        assert verdict.outcome is Outcome.PASS, verdict.summary


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("learner", tiny_learners.RECIPES)
def test_stages_can_be_asked_on_any_machine(learner, device, tmp_path, monkeypatch):
    """What they promise and whether they have something to do; a batch of varying shape is no graph."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    setting = setting_of(recipe_of(learner, tmp_path), torch.device(device))
    for kind in GENERIC:
        stage = REGISTRY.get("optimization", kind)()
        assert stage.contract(setting) == stage.contract(setting)
        if (kind, learner, device) == ("cuda_graph", "tokens", "cuda"):
            with pytest.raises(UsageError, match="batches of one shape"):
                stage.inactive(setting)
        else:
            assert stage.inactive(setting) is None or stage.inactive(setting).strip()


@pytest.mark.usefixtures("migrated_workspace", "traced_only")
def test_stages_whose_slots_are_never_called_are_inactive_and_do_not_pass(tmp_path, monkeypatch):
    """A learner with an Adam of its own, whose update calls no slot."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    silent = ("model.kind=tiny_silent", "train.updates=4")
    kinds = {
        "amp": "its slot 'precision'",
        "compile": "any of its slots",
        "fused_optimizer": "its slot 'make_optimizer'",
    }
    recipe = recipe_of("gan", tmp_path, *silent, *map(with_stage, kinds), with_stage("float32_matmul"))
    reports = {report.kind: report for report in trained(recipe).stages}
    assert reports["float32_matmul"].active
    options = Options(updates=2, budget=0.0, horizon=0, names_operators=False)
    for kind, slots in kinds.items():
        assert not reports[kind].active
        assert reports[kind].reason.startswith(f"the learner never calls {slots}")
    verdict = Gate(recipe, REGISTRY, options, lambda _: None)(["compile"])
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "compile is inactive" in verdict.summary
    found = verify_recipe(recipe, REGISTRY, options, lambda _: None)
    assert found.inactive.keys() == kinds.keys()
    assert {row.name for row in found.rows} == {"float32_matmul", "all"}


@pytest.mark.usefixtures("migrated_workspace")
def test_every_other_update_is_waited_for_before_a_slot_counts_as_never_called(tmp_path):
    """The generator of a GAN steps in every second update."""
    pipeline = assemble(recipe_of("gan", tmp_path), REGISTRY.files)
    watch = Watch(pipeline.slots, frozenset())
    watch.slots_by_stage = {"late": frozenset({"generator_loss"})}
    pipeline.watch, pipeline.reports["late"] = watch, StageReport("late", active=True)
    step = Step(pipeline)
    before = dict(vars(pipeline.slots))
    for _ in range(2):
        step()
    assert pipeline.watch is None
    assert pipeline.reports["late"].active
    assert dict(vars(pipeline.slots)) == before
