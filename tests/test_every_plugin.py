"""What every registered plugin must keep; a new one is tested by being registered."""

import inspect

import pytest
import torch
from running import tiny, train_here, with_requirements

from runner.api import Close, Exact, Learner, Source, Stage, Statistical
from runner.plugin.registry import Registry
from runner.recipe import RecipeError
from runner.recipe.constraints import PIPELINE_SLOTS
from runner.train.assemble import assemble

REGISTRY = Registry()
STAGES = REGISTRY.kinds("optimization")
MODELS, SOURCES = REGISTRY.kinds("model"), REGISTRY.kinds("data")


def learnt(result):
    return {name: value for name, value in result.metrics.items() if name.startswith(("train/", "eval/"))}


@pytest.mark.parametrize("kind", STAGES)
def test_a_stage_declares_what_it_is_and_has_a_card(kind):
    face = REGISTRY.get("optimization", kind)
    assert issubclass(face, Stage)
    assert face.phase in (1, 2, 3)
    assert isinstance(face.contract, Exact | Close | Statistical)
    card = inspect.getdoc(face)
    assert "When it helps:" in card
    assert "When it hurts:" in card
    assert all(field.description for field in face.Config.model_fields.values())


@pytest.mark.parametrize("kind", STAGES)
def test_a_stage_holds_slots_that_the_flagship_offers(kind):
    face = REGISTRY.get("optimization", kind)
    assert face.claims | face.wraps <= tiny("marl_baseline").model.slots() | PIPELINE_SLOTS


@pytest.mark.usefixtures("migrated_workspace")
@pytest.mark.parametrize("kind", STAGES)
def test_a_stage_trains_or_says_why_not_and_keeps_its_contract(kind):
    """With what it requires: active, or inactive with a reason; exact ones give the baseline's digits."""
    staged = train_here("marl_baseline", "train.env_steps=96", *with_requirements(kind))
    report = next(report for report in staged.stages if report.kind == kind)
    assert report.active or report.reason
    assert all(torch.isfinite(torch.tensor(value)) for value in learnt(staged).values())
    if not report.active or isinstance(REGISTRY.get("optimization", kind).contract, Exact):
        assert learnt(staged) == learnt(train_here("marl_baseline", "train.env_steps=96"))


@pytest.mark.parametrize(("section", "kind"), [("model", k) for k in MODELS] + [("data", k) for k in SOURCES])
def test_a_learner_or_source_has_a_card_and_documented_settings(section, kind):
    face = REGISTRY.get(section, kind)
    assert inspect.getdoc(face)
    assert all(field.description for field in face.model_fields.values())


@pytest.mark.parametrize("name", ["marl_phase2", "marl_spread"])
def test_every_setting_of_a_plugin_is_read(name):
    """Nothing that can be written in a recipe is ignored, whether or not somebody wrote it."""
    recipe = tiny(name)
    pipeline = assemble(recipe)
    unread = recipe.model.unread("model.") + recipe.data.unread("data.")
    for stage in pipeline.stages:
        unread += stage.config.unread(f"optimization.{stage.kind}.")
    assert unread == []


@pytest.mark.parametrize("name", ["marl_phase2", "marl_spread"])
def test_learner_and_source_restore_what_they_save(name):
    first, second = assemble(tiny(name)), assemble(tiny(name, "seed=77"))
    assert isinstance(first.learner, Learner)
    assert isinstance(first.source, Source)
    while not first.source.ready(16):
        first.source.collect(None)
    noise = first.learner.noise(16, torch.Generator().manual_seed(0))
    first.slots.update(first.slots.next_batch(16, 0.0, 0), noise)
    second.load_state_dict(first.state_dict())
    one, other = (p.slots.update(p.slots.next_batch(16, 0.0, 0), noise) for p in (first, second))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_two_stages_that_claim_one_slot_are_refused(tmp_path):
    plugin = tmp_path / "rival.py"
    plugin.write_text(
        "from runner.api import Exact, Stage\n"
        "class Rival(Stage):\n    kind = 'rival'\n    phase = 1\n    contract = Exact()\n"
        "    claims = frozenset({'critic_step'})\n    def attach(self, pipeline): pass\n"
    )
    with pytest.raises(RecipeError, match="critic_step"):
        tiny("marl_phase1", "optimization.rival=on", registry=Registry([plugin]))
