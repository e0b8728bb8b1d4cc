"""From a recipe to what the gate compares."""

import re
import tomllib
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
import torch
from running import tiny

from runner.plugin.registry import GROUP, Registry
from runner.proof import Close, Exact, Outcome, exact, verify
from runner.proof.isolation import Isolation, Location
from runner.proof.subject_states import saved
from runner.proof.trajectory import Trajectory
from runner.proof.trees import clones
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.system import generators
from runner.system.errors import UsageError
from runner.training.loop import Loop
from runner.training.outputs import NoOutput
from runner.training.pipeline import assemble
from runner.training.signals import Stop
from runner.verify.subjects import recipe_with, recorded, subject

REGISTRY = Registry()
EXAMPLE = Path(__file__).parents[2] / "docs" / "example_plugin"


@pytest.fixture(scope="module")
def recipe():
    return tiny("marl_baseline", "data.followers=1", "model.hidden=[8]")


@pytest.fixture
def simulated(recipe):
    return recipe, REGISTRY


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_stage_brings_what_it_requires_in_the_order_of_attaching(recipe):
    chosen = recipe_with(recipe, REGISTRY, ["stacked_agents"])
    assert list(chosen.stages) == ["forward_cache", "merged_critic_loss", "stacked_agents"]
    assert recipe_with(chosen, REGISTRY, ()).stages == {}
    assert set(recipe_with(chosen, REGISTRY, ["forward_cache"]).off) == {"merged_critic_loss", "stacked_agents"}


def test_settings_of_the_recipe_are_kept_and_others_are_the_defaults():
    recipe = tiny("marl_baseline", "optimization.amp={dtype: fp16}")
    assert recipe_with(recipe, REGISTRY, ["amp"]).stages["amp"].dtype == "fp16"
    assert recipe_with(tiny("marl_baseline"), REGISTRY, ["amp"]).stages["amp"].dtype == "bf16"


def test_no_two_subjects_share_a_stage(recipe):
    on = recipe_with(recipe, REGISTRY, ["forward_cache"])
    one, other = (assemble(on).stages["forward_cache"] for _ in range(2))
    assert one is not other
    assert one.config is not other.config


def test_the_recipe_of_a_set_of_stages_is_read_once_for_a_registry(recipe):
    once = recipe_with(recipe, REGISTRY, ["forward_cache"])
    assert recipe_with(recipe, REGISTRY, ["forward_cache"]) is once
    assert recipe_with(recipe, REGISTRY, ()) is not once
    assert recipe_with(recipe, Registry(), ["forward_cache"]) is not once


def test_what_does_not_exist_or_cannot_be_together_is_refused(recipe, tmp_path):
    with pytest.raises(UsageError, match="did you mean 'stacked_agents'"):
        recipe_with(recipe, REGISTRY, ["stacked_agent"])
    plugin = tmp_path / "rival.py"
    plugin.write_text(
        "from runner.api import Exact, StageConfig\n"
        "class Rival(StageConfig):\n    kind = 'rival'\n    phase = 1\n"
        "    claims = frozenset({'critic_step'})\n"
        "    def contract(self, setting): return Exact()\n"
        "    implementation = 'Missing'\n"
    )
    with pytest.raises(RecipeError, match="critic_step"):
        subject(recipe, Registry([plugin]), ["merged_critic_loss", "rival"])


@pytest.mark.parametrize("name", ["marl_baseline", "digits"])
def test_recorded_batches_are_those_of_the_training(name, tmp_path, request):
    recipe, registry = request.getfixturevalue("digits" if name == "digits" else "simulated")
    seen = []
    pipeline = assemble(recipe, registry.files)
    pipeline.slots.wrap("update", lambda step: partial(kept, seen, step))
    loop = Loop(pipeline, tmp_path, NoOutput(), NoOutput(), Stop())
    while len(seen) < 5:
        loop.step()
    found = recorded(recipe, registry, 5)
    for given, (batch, noise, counts) in zip(found, seen, strict=False):
        assert same(given.batch, batch)
        assert same(given.noise, noise)
        assert given.progress == counts


def kept(seen, step, batch, noise, progress):
    seen.append((clones(batch), noise, progress.state_dict()))
    return step(batch, noise, progress)


def test_recording_leaves_the_global_generators_alone(recipe):
    generators.seed(3)
    expected = torch.rand(3)
    generators.seed(3)
    recorded(recipe, REGISTRY, 1)
    assert torch.equal(torch.rand(3), expected)


def test_a_subject_that_draws_shows_its_source_and_its_generators(recipe):
    build = subject(recipe, REGISTRY, ())
    drawn, given = Isolation(build, 0), Isolation(build, 0)
    (pair,) = recorded(recipe, REGISTRY, 1)
    first, again = drawn.step(0), given.step(pair)
    names = {place.name for place in first}
    assert {"source.replay.priorities", "source.replay.rows.rows", "source.generators.noise"} <= names
    assert not [place for place in again if place.name.startswith("source")]
    loss = Location("step", "output", "critic_loss")
    assert torch.equal(first[loss], again[loss])


def test_the_story_is_told_in_order(recipe):
    seen, parts = Trajectory([0], 0).watched(subject(recipe, REGISTRY, ()), 1)
    slots = list(dict.fromkeys(place.slot for place in seen))
    assert parts == ["learner", "source"]
    assert slots == ["next_batch", "targets", "critic_step", "actor_step", "temperature_step", "target_step", "step"]


@pytest.mark.parametrize("name", ["marl_baseline", "marl_spread"])
def test_a_recipe_can_be_had_in_float64(name):
    small = tiny(name)
    isolation = Isolation(subject(small, REGISTRY, small.stages), 0, float64=True)
    assert all(parameter.dtype == torch.float64 for _, parameter in isolation.subject.parameters())


@pytest.fixture
def digits(monkeypatch):
    """The recipe of the docs' example, and a registry that knows its plugins."""
    monkeypatch.syspath_prepend(EXAMPLE)
    text = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    mine = [EntryPoint(*pair, GROUP) for pair in text["project"]["entry-points"][GROUP].items()]
    registry = Registry((), [*entry_points(group=GROUP), *mine])
    return load(EXAMPLE / "digits.yaml", ["device=cpu"], registry), registry


def test_a_learner_on_a_dataset_that_knows_nothing_of_the_gate_is_judged(digits):
    recipe, registry = digits
    baseline = subject(recipe, registry, ())
    assert exact(baseline, subject(recipe, registry, ["recompute_activations"]), range(3))
    batches = recorded(recipe, registry, 4)
    assert verify(baseline, subject(recipe, registry, ["recompute_activations"]), batches, Exact())
    fused = Isolation(subject(recipe, registry, ["fused_optimizer"]), 0)
    verdict = verify(baseline, subject(recipe, registry, ["fused_optimizer"]), batches, Close())
    assert verdict, verdict
    fused.load({"learner": Isolation(baseline, 0).subject.state["learner"].state_dict()})
    assert fused.subject.state["learner"].state_dict()["optimizers"]["model"]["param_groups"][0]["fused"] is True


# --- learners of the first storey ------------------------------------------------------------------------------------

SUPERVISED = Path(__file__).parent / "supervised.py"


def supervised(*sets):
    """A classifier of words, and a registry that knows it and its stages."""
    registry = Registry([SUPERVISED])
    return load(SUPERVISED.with_suffix(".yaml"), ["device=cpu", *sets], registry), registry


def verdict_on(stage, contract, *sets):
    recipe, registry = supervised(*sets)
    batches = recorded(recipe, registry, 4)
    return verify(subject(recipe, registry, ()), subject(recipe, registry, [stage]), batches, contract)


@pytest.mark.parametrize("contract", [Exact(), Close()])
def test_a_stage_that_breaks_inference_alone_is_found(contract):
    verdict = verdict_on("wrong_without_gradient", contract)
    assert verdict.outcome is Outcome.FAIL
    assert "update 1, slot 'step': 'predict' differs" in str(verdict)


@pytest.mark.usefixtures("traced_only")
def test_compiled_dropout_is_close_to_eager_dropout():
    verdict = verdict_on("compile", Close(), "model.dropout=0.3")
    assert verdict.outcome is Outcome.PASS, verdict


@pytest.mark.parametrize("kind", ["sparseadam", "sgd"])
def test_sparse_embeddings_are_compared(kind):
    sets = ("model.sparse=true", f"optimizer={{kind: {kind}, lr: 0.1}}")
    assert verdict_on("same_loss", Exact(), *sets)
    assert verdict_on("same_loss", Close(), *sets)
    assert verdict_on("wrong_loss", Close(), *sets).outcome is Outcome.FAIL


def test_a_loss_in_float32_makes_float64_no_measure():
    assert verdict_on("round_about", Close())
    verdict = verdict_on("round_about", Close(), "model.narrow=true")
    assert verdict.outcome is Outcome.INCONCLUSIVE, verdict
    assert re.search(r"itself rounds to torch.float32 \(supervised.py:\d+, in loss\)", str(verdict))
    assert verdict_on("wrong_loss", Close(), "model.narrow=true").outcome is Outcome.FAIL


def test_learning_rates_follow_the_schedule_whatever_state_was_loaded():
    recipe, registry = supervised("lr_scheduler={kind: linear}")
    isolation = Isolation(subject(recipe, registry, ()), 0)
    first, *_, last = recorded(recipe, registry, 8)

    def rate(given):
        isolation.step(given)
        return isolation.subject.state["learner"].state_dict()["optimizers"]["model"]["param_groups"][0]["lr"]

    begin, state = rate(first), saved(isolation.subject)
    assert rate(last) < begin
    isolation.load(state)
    assert rate(last) < begin
