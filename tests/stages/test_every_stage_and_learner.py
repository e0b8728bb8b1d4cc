"""Every generic stage with learners of both storeys: it works, keeping its contract, or it refuses with a reason."""

import math
from pathlib import Path

import pytest
import tiny_learners
import torch
from running import NoDisplay

from runner.api import Close, Exact, RunnerError, UsageError
from runner.compare.verdict import Outcome
from runner.plugin.registry import Registry
from runner.recipe import load
from runner.tracking import workspace
from runner.train.assemble import setting_of
from runner.train.run import run
from runner.verify.gate import contract_of, quick

REGISTRY = Registry([Path(tiny_learners.__file__)])
GENERIC = [
    kind
    for kind in REGISTRY.kinds("optimization")
    if REGISTRY.get("optimization", kind).__module__.startswith("runner.plugins.stages.")
]
SETTINGS = {"gradient_accumulation": "{micro_batch: 4}", "batch_autotune": "{largest: 12}"}
REFUSED = {
    ("channels_last", "tokens"): "four dimensions",
    ("channels_last", "gan"): "four dimensions",
    ("activation_checkpointing", "gan"): "names no blocks",
    ("gradient_accumulation", "gan"): "no slot 'forward_backward'",
}
"""What cannot work, and a word of the reason."""


def recipe_of(learner: str, folder: Path, *sets: str):
    path = folder / f"{learner}.yaml"
    path.write_text(
        f"name: {learner}\nseed: 3\ndevice: cpu\ntracking: {{system_metrics: false}}\n{tiny_learners.RECIPES[learner]}"
    )
    return load(path, sets, REGISTRY)


def with_stage(kind: str) -> str:
    return f"optimization.{kind}={SETTINGS.get(kind, 'on')}"


def trained(recipe):
    return run(recipe, REGISTRY, workspace(), NoDisplay())


@pytest.mark.usefixtures("migrated_workspace")
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
    if report.active and isinstance(contract_of(recipe, kind), Exact | Close):
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
