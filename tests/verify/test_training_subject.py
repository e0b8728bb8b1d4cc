"""From a recipe to what the gate compares."""

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
import torch
from running import NoDisplay, tiny

from runner.compare.isolation import Isolation, Location
from runner.plugin.registry import GROUP, Registry
from runner.proof import Close, Exact, exact, verify
from runner.recipe import RecipeError, load
from runner.system import generators
from runner.system.errors import UsageError
from runner.train.assemble import assemble
from runner.train.loop import Loop
from runner.train.signals import Stop
from runner.verify.training_subject import recipe_with, recorded, subject

REGISTRY = Registry()
EXAMPLE = Path(__file__).parents[2] / "docs" / "example_plugin"


@pytest.fixture(scope="module")
def recipe():
    return tiny("marl_baseline", "data.followers=1", "model.hidden=[8]")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_stage_brings_what_it_requires_in_the_order_of_attaching(recipe):
    chosen = recipe_with(recipe, REGISTRY, ["stacked_agents"])
    assert list(chosen.stages) == ["forward_cache", "merged_critic_loss", "stacked_agents"]
    assert recipe_with(chosen, REGISTRY, ()).stages == {}
    assert set(recipe_with(chosen, REGISTRY, ["forward_cache"]).off) == {"merged_critic_loss", "stacked_agents"}


def test_settings_of_the_recipe_are_kept_and_others_are_the_defaults():
    recipe = tiny("marl_baseline", "optimization.amp={dtype: fp16}")
    assert recipe_with(recipe, REGISTRY, ["amp"]).stages["amp"].config.dtype == "fp16"
    assert recipe_with(tiny("marl_baseline"), REGISTRY, ["amp"]).stages["amp"].config.dtype == "bf16"


def test_no_two_subjects_share_a_stage(recipe):
    on = recipe_with(recipe, REGISTRY, ["forward_cache"])
    assert recipe_with(on, REGISTRY, ["forward_cache"]).stages["forward_cache"] is not on.stages["forward_cache"]


def test_what_does_not_exist_or_cannot_be_together_is_refused(recipe, tmp_path):
    with pytest.raises(UsageError, match="did you mean 'stacked_agents'"):
        recipe_with(recipe, REGISTRY, ["stacked_agent"])
    plugin = tmp_path / "rival.py"
    plugin.write_text(
        "from runner.api import Exact, Stage\n"
        "class Rival(Stage):\n    kind = 'rival'\n    phase = 1\n    contract = Exact()\n"
        "    claims = frozenset({'critic_step'})\n    def attach(self, pipeline): pass\n"
    )
    with pytest.raises(RecipeError, match="critic_step"):
        subject(recipe, Registry([plugin]), ["merged_critic_loss", "rival"])


class Unwritten:
    """A journal that keeps nothing."""

    def log(self, metrics, step):
        pass

    def mark(self):
        return 0

    def sync(self):
        pass


def test_recorded_batches_are_those_of_the_training(recipe, tmp_path):
    seen = []
    pipeline = assemble(recipe)
    loop = Loop(pipeline, tmp_path, Unwritten(), NoDisplay(), Stop())
    update = pipeline.slots.update
    pipeline.slots.wrap("update", lambda step: lambda batch, noise: seen.append((batch, noise)) or update(batch, noise))
    while len(seen) < 5:
        updates = loop.collect()
        for remaining in reversed(range(updates)):
            loop.update(remaining)
    found = recorded(recipe, REGISTRY, 5)
    for (batch, noise, _), (expected, expected_noise) in zip(found, seen, strict=False):
        assert same(batch, expected)
        assert same(noise, expected_noise)


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
    isolation = Isolation(subject(recipe, REGISTRY, ()), 0, watching=True)
    slots = list(dict.fromkeys(place.slot for place in isolation.step(0, watching=True)))
    assert slots == ["next_batch", "targets", "critic_step", "actor_step", "temperature_step", "target_step", "step"]


@pytest.mark.parametrize("name", ["marl_baseline", "marl_spread"])
def test_a_recipe_can_be_had_in_float64(name):
    small = tiny(name)
    isolation = Isolation(subject(small, REGISTRY, small.stages), 0, torch.float64)
    assert all(parameter.dtype == torch.float64 for _, parameter in isolation.subject.parameters())


@pytest.fixture
def digits(monkeypatch):
    """The recipe of the docs' example, and a registry that knows its plugins."""
    monkeypatch.syspath_prepend(EXAMPLE)
    faces = {
        "model.digits_mlp": "MlpConfig",
        "data.digits": "DigitsConfig",
        "optimization.recompute_activations": "RecomputeActivations",
    }
    mine = [EntryPoint(name, f"runner_digits:{face}", GROUP) for name, face in faces.items()]
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
    assert fused.subject.state["learner"].state_dict()["optimizer"]["param_groups"][0]["fused"] is True
