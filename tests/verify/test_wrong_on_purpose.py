"""The gate fails every stage that is wrong on purpose, for the right reason, and passes every honest one."""

import re
from pathlib import Path

import pytest
import wrong_stages
from running import tiny
from wrong_base import MARL

from runner.api import Close, Exact
from runner.plugin.configs import GradientLearnerConfig
from runner.plugin.registry import Registry
from runner.proof import Outcome, close, exact, fresh, health, verify
from runner.training.pipeline import resolve_device, setting_of
from runner.verify.subjects import recipe_with, recorded, subject

REGISTRY = Registry([Path(wrong_stages.__file__)])
UPDATES = 6
CRITIC = r"critics\.0\.q1\.trunk\.0\.weight"
WRONG = {
    "stale_cache": (2, "targets", "output"),
    "delayed_targets": (2, "targets", "output"),
    "clip_before_unscale": (1, "critic_step", rf"{CRITIC}\.grad"),
    "scaler_updated_between": (1, "temperature_step", r"log_temperatures\.0\.grad"),
    "leaky_actor_loss": (1, "actor_step", rf"{CRITIC}\.grad"),
    "scaled_loss": (1, "critic_step", "loss"),
    "scaled_backward": (1, "actor_step", r"actors\.0\.trunk\.0\.weight\.grad"),
    "detached_trunk": (1, "actor_step", r"actors\.0\.trunk\.0\.weight\.grad"),
    "accumulated_gradients": (2, "critic_step", rf"{CRITIC}\.grad"),
    "mean_over_agents": (1, "critic_step", r"critics\.\d\.\S+\.grad"),
    "forgetful_optimizer": (1, "step", r"learner\.roles\.actor\.optimizers\.0\.state\.0\.step"),
    "noise_drawn_twice": (1, "targets", "output"),
    "early_target_step": (1, "target_step", r"learner\.target_critics\.0\.q1\.trunk\.0\.weight"),
    "swapped_polyak": (1, "target_step", r"learner\.target_critics\.0\.q1\.trunk\.0\.weight"),
    "ignored_weight": (2, "critic_step", "loss"),
    "ignored_end": (2, "targets", "output"),
    "lost_priorities": (1, "step", "td_error"),
    "repeated_batch": (2, "next_batch", "observation"),
    "mixed_up_agents": (1, "step", "predict"),
    "narrowed": (1, "critic_step", r"critics\.0\.q\d\.\S+\.grad"),
}
"""In which update, slot and tensor each is found out."""


@pytest.fixture(scope="module")
def recipe():
    return tiny("marl_baseline", *MARL, registry=REGISTRY)


@pytest.fixture(scope="module")
def batches(recipe):
    return recorded(recipe, REGISTRY, UPDATES)


def build(recipe, *stages):
    return subject(recipe, REGISTRY, stages)


def promise(recipe, kind, registry=REGISTRY):
    """What a stage promises on its own."""
    chosen = recipe_with(recipe, registry, [kind])
    return chosen.stages[kind].contract(setting_of(chosen, resolve_device("cpu")))


def judged(recipe, kind, batches):
    """The verdict on a stage by its contract, with batches drawn by itself where it promises the same bits."""
    contract = promise(recipe, kind)
    baseline, changed = build(recipe), build(recipe, kind)
    if isinstance(contract, Exact):
        return exact(baseline, changed, range(len(batches)))
    return close(baseline, changed, batches)


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_stage_fails_where_it_is_wrong(kind, recipe, batches):
    update, slot, tensor = WRONG[kind]
    verdict = judged(recipe, kind, batches[: update + 1])
    assert verdict.outcome is Outcome.FAIL, verdict
    assert re.search(rf"update {update}, slot '{slot}': '{tensor}'", str(verdict)), verdict
    difference = verdict.evidence["difference"]
    assert (difference["update"], difference["slot"]) == (update, slot)


def test_a_stage_that_rounds_more_than_the_baseline_is_not_close(recipe, batches):
    verdict = judged(recipe, "secret_bf16", batches[:3])
    assert verdict.outcome is Outcome.FAIL
    assert re.search(r"rounds [\d.e+]+ times as much as the baseline .* slot '\w+': '\S+' differs by", str(verdict))


def test_a_stage_that_raises_fails_with_what_it_raises(recipe):
    verdict = exact(build(recipe), build(recipe, "scaler_updated_twice"), range(2))
    assert verdict.outcome is Outcome.FAIL
    assert re.search(r"update 1: the changed step raises AssertionError: No inf checks .*grad_scaler.py", str(verdict))


@pytest.mark.parametrize("contract", [Exact(), Close()])
@pytest.mark.parametrize(
    ("kind", "update", "slot", "tensor"),
    [("cache_by_batch", 2, "targets", "output"), ("private_copy", 3, "targets", "output")],
)
def test_what_only_another_state_shows_is_found(kind, update, slot, tensor, contract, recipe, batches):
    baseline, changed = build(recipe), build(recipe, kind)
    assert exact(baseline, changed, range(3))  # as long as batches are new and no state is loaded, all is well
    verdict = fresh(baseline, changed, batches, contract)
    assert verdict.outcome is Outcome.FAIL
    assert f"update {update}, slot '{slot}': '{tensor}'" in str(verdict)


def test_parameters_without_a_gradient_are_named(recipe, batches):
    verdict = health(build(recipe, "detached_trunk"), batches)
    assert verdict.outcome is Outcome.FAIL
    assert "'actors.0.trunk.0.weight' receives no gradient" in str(verdict)
    assert all(name.startswith("actors.") and ".trunk." in name for name in verdict.evidence["without_gradient"])
    assert len(verdict.evidence["without_gradient"]) == 2 * 4


def test_what_is_odd_but_right_passes(recipe, batches):
    verdict = verify(build(recipe), build(recipe, "honest_reorder"), batches[:3], promise(recipe, "honest_reorder"))
    assert verdict.outcome is Outcome.PASS, verdict


def test_who_skips_what_diverges_is_told_so_and_nothing_else(recipe, batches):
    verdict = verify(build(recipe), build(recipe, "honest_scaler"), batches, promise(recipe, "honest_scaler"))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.summary.startswith("with NaN in the batch, update 1, slot 'step': 'state' stays finite")


FACES = {kind: Registry().get("optimization", kind) for kind in Registry().kinds("optimization")}
OWN = Registry().get("model", "masac").slots - GradientLearnerConfig.slots
"""Slots that this learner alone has; stages that hold them are asked nowhere else."""


@pytest.mark.parametrize("kind", [kind for kind, face in FACES.items() if (face.claims | face.wraps) & OWN])
def test_every_stage_of_its_own_keeps_its_promise(kind, recipe, batches):
    verdict = verify(build(recipe), build(recipe, kind), batches[:3], promise(recipe, kind))
    assert verdict.outcome is Outcome.PASS, verdict
