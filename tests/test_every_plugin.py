"""What every registered plugin must keep; a new one is tested by being registered."""

import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from interrupted import flat
from running import BESIDE, TRAINED, shipped, tiny, train_here, with_requirements

from runner.api import Close, Exact, Learner, Source, Stage, StageConfig, Statistical
from runner.plugin.descriptions import setting_descriptions
from runner.plugin.implementation import implementation_of
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.rendering import render
from runner.recipe.yaml_nodes import RecipeError
from runner.system.errors import UsageError
from runner.training.pipeline import assemble, resolve_device, setting_of
from runner.training.step import Step

ROOT = Path(__file__).parents[1]
REGISTRY = Registry()
STAGES = REGISTRY.kinds("optimization")
MODELS, SOURCES = REGISTRY.kinds("model"), REGISTRY.kinds("data")
SHIPPED = {name: shipped(name) for name in TRAINED}
LEARNERS = {recipe.model.kind: name for name, recipe in reversed(SHIPPED.items())}
"""A recipe that ships for every learner: the first by name, which has the fewest stages."""
PLAINEST = {(recipe.model.kind, recipe.data.kind): name for name, recipe in reversed(SHIPPED.items())}
"""One for every learner on every source."""


def fits(kind, name):
    """Whether the learner of a recipe offers what the stage and those that it requires hold."""
    face = REGISTRY.get("optimization", kind)
    model = SHIPPED[name].model
    here = all(model.lacks(slot) is None for slot in face.claims | face.wraps)
    return here and all(fits(other, name) for other in face.requires)


HELD = [(kind, name) for kind in STAGES for name in LEARNERS.values() if fits(kind, name)]
CHOOSING = {kind: name for kind, name in HELD if REGISTRY.get("optimization", kind).prepares}
"""One recipe for a stage that looks at no learner, and trains in child processes."""
TRACED_ELSEWHERE = {
    ("compile", name)
    for name in ("gcn_cora", "graphgpt_esol", "pgt_cora", "grasp_cvae", "grasp_latent", "cloud_contrastive")
}
"""Tracing takes seconds: their layers are traced with ``emma_cora``, ``shakespeare_gpt``, ``gps_esol`` and
``grasp_diffusion``."""
ON_IN_THE_RECIPE = {(kind, name) for kind, name in HELD if kind in SHIPPED[name].stages}
"""``training/test_run.py`` trains every recipe with the stages that it switches on."""
TRAINED = [pair for pair in HELD if CHOOSING.get(*pair) == pair[1] and pair not in TRACED_ELSEWHERE | ON_IN_THE_RECIPE]


@cache
def attached(kind, name):
    """What a stage that will not work with a learner says, or else what became of it."""
    try:
        made = assemble(tiny(name, *with_requirements(kind, name), *CHEAP.get(kind, ())))
    except UsageError as error:
        return str(error), None
    return "", made.reports.get(kind)


CHEAP = {"batch_autotune": ("optimization.batch_autotune=off",)}
"""What need not be tried to know that a stage can be attached."""
SHORT = {
    "marl": "train.env_steps=96", "digits": "train.epochs=1", "mlp": "train.epochs=1",
    "shakespeare": "train.tokens=1280", "gpt2": "train.tokens=1280", "mamba2": "train.tokens=1280",
    "recall": "train.updates=3",
    "gcn": "train.epochs=3", "emma": "train.epochs=3",
    "conv": "train.updates=3", "pgt": "train.updates=3", "gps": "train.updates=3", "graphgpt": "train.updates=3",
    "grasp": "train.updates=3", "graf": "train.updates=3", "cloud": "train.updates=3",
}  # fmt: skip
"""By the first word of a recipe's name."""


@pytest.mark.parametrize("kind", STAGES)
def test_a_stage_works_with_a_learner_that_ships(kind):
    assert not all(attached(kind, name)[0] for held, name in HELD if held == kind)


@cache
def with_stage(kind, name):
    """A recipe with a stage and what it requires; nothing may change it."""
    return tiny(name, *with_requirements(kind, name))


@cache
def baseline(name, *sets):
    return learnt(train_shortly(name, sets))


def learnt(result):
    return {name: value for name, value in result.metrics.items() if name.startswith(("train/", "eval/"))}


def test_every_plugin_has_a_recipe():
    assert {kind for kind, _ in HELD} == set(STAGES)
    assert set(LEARNERS) == set(MODELS)
    faces = {kind: REGISTRY.get("data", kind) for kind in SOURCES}
    own = {kind for kind, face in faces.items() if not any(f.is_required() for f in face.model_fields.values())}
    # What no recipe has is trained by a command of a page, which ``test_commands.py`` runs; others need a user's files.
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    on_pages = {*re.findall(r"^\$ runner run \S+ data\.kind=(\w+)$", pages, re.MULTILINE)}
    assert {recipe.data.kind for recipe in SHIPPED.values()} | on_pages >= own


@pytest.mark.parametrize("kind", STAGES)
def test_a_stage_declares_what_it_is_and_has_a_card(kind):
    face = REGISTRY.get("optimization", kind)
    assert issubclass(face, StageConfig)
    assert face.phase in (1, 2, 3)
    card = inspect.getdoc(face)
    assert "When it helps:" in card
    assert "When it hurts:" in card
    assert setting_descriptions(face).keys() == face.model_fields.keys()
    assert issubclass(implementation_of(face), Stage)


@pytest.mark.sampled(140)
@pytest.mark.parametrize(("kind", "name"), HELD)
def test_asking_a_stage_changes_nothing(kind, name):
    """Neither what it promises nor whether it works depends on who asked before."""
    recipe = with_stage(kind, name)
    setting = setting_of(recipe, resolve_device("cpu"))
    stage = recipe.stages[kind]
    answers = [(stage.contract(setting), stage.inactive(setting), stage.model_dump()) for _ in range(2)]
    answers.append((stage.contract(setting), *reversed([stage.model_dump(), stage.inactive(setting)])))
    assert answers[0] == answers[1] == answers[2]
    assert isinstance(answers[0][0], Exact | Close | Statistical)


@cache
def is_exact(kind, name):
    recipe = with_stage(kind, name)
    contract = recipe.stages[kind].contract(setting_of(recipe, resolve_device("cpu")))
    return isinstance(contract, Exact)


def is_active(kind, name):
    problem, report = attached(kind, name)
    return not problem and (report is None or report.active)


def baseline_settings(kind):
    """Returns the settings beside a stage that its baseline has, too."""
    return [setting for setting in BESIDE.get(kind, ()) if not setting.startswith("optimization.")]


def train_shortly(name, sets):
    return train_here(name, SHORT[name.partition("_")[0]], *sets)


def check_training(kind, name, request):
    """Trains with one stage and what it requires; without an effect, or exact, it has the digits of the baseline."""
    # One is compiled to the end in ``stages/test_amp.py``.
    request.getfixturevalue("traced_only")
    staged = train_shortly(name, with_requirements(kind, name))
    report = next(report for report in staged.stages if report.kind == kind)
    assert report.active or report.reason
    assert all(torch.isfinite(torch.tensor(value)) for value in learnt(staged).values())
    if not report.active or is_exact(kind, name):
        assert learnt(staged) == baseline(name, *baseline_settings(kind))


@pytest.mark.sampled(120)
@pytest.mark.usefixtures("migrated_workspace", "copied_children")
@pytest.mark.parametrize(("kind", "name"), TRAINED)
def test_a_stage_trains_or_says_why_not_and_keeps_its_contract(kind, name, request):
    """With what it requires: active, or inactive or refused with a reason; exact ones train together below."""
    problem, report = attached(kind, name)
    if problem:
        assert kind in problem
    elif not is_active(kind, name):  # then it is not in the pipeline at all
        assert report.reason
    elif not is_exact(kind, name):
        check_training(kind, name, request)


def fit_together(kinds, name):
    """Whether stages of a recipe have the same baseline and can be attached in one pipeline."""
    if len({tuple(baseline_settings(kind)) for kind in kinds}) > 1:
        return False
    try:
        reports = assemble(tiny(name, *requirements_of(kinds, name))).reports
    except UsageError:
        return False
    return all(kind not in reports or reports[kind].active for kind in kinds)


def requirements_of(kinds, name):
    return [setting for kind in kinds for setting in with_requirements(kind, name)]


def exact_groups(name):
    """Returns lists of exact stages of a recipe, as few as possible, each of which one training can have."""
    groups = []
    for kind in (kind for kind, host in TRAINED if host == name):
        if not is_active(kind, name) or not is_exact(kind, name):
            continue
        group = next((group for group in groups if fit_together([*group, kind], name)), None)
        if group is None:
            groups.append([kind])
        else:
            group.append(kind)
    return groups


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("migrated_workspace", "copied_children")
@pytest.mark.parametrize("name", LEARNERS.values())
def test_exact_stages_give_the_digits_of_the_baseline_together(name, request):
    """Bits that several stages keep are kept by each; one without an effect in company is trained alone."""
    for kinds in exact_groups(name):
        staged = train_shortly(name, requirements_of(kinds, name))
        expected = baseline(name, *baseline_settings(kinds[0]))
        if learnt(staged) != expected:
            for kind in kinds:
                check_training(kind, name, request)
            pytest.fail(f"{' + '.join(kinds)} give other digits than the baseline, and each alone the same")
        assert all(torch.isfinite(torch.tensor(value)) for value in expected.values())
        active = {report.kind for report in staged.stages if report.active}
        for kind in {*kinds} - active:
            check_training(kind, name, request)


@pytest.mark.parametrize(("section", "kind"), [("model", k) for k in MODELS] + [("data", k) for k in SOURCES])
def test_a_learner_or_source_has_a_card_and_documented_settings(section, kind):
    face = REGISTRY.get(section, kind)
    assert inspect.getdoc(face)
    assert setting_descriptions(face).keys() == face.model_fields.keys()


@pytest.mark.parametrize("kind", MODELS)
def test_a_learner_offers_the_slots_that_it_declares(kind):
    """Each is a method, and its story and what may be compiled are among them."""
    face = REGISTRY.get("model", kind)
    learner = assemble(SHIPPED[LEARNERS[kind]]).learner
    assert {name for name in face.slots if not callable(getattr(learner, name, None))} == set()
    assert {*learner.story, *learner.compilable} <= vars(learner.slots).keys() & face.slots
    assert set(face.roles) == {role for role, _ in learner.optimizers()}


@pytest.mark.parametrize("name", PLAINEST.values())
def test_every_setting_of_a_plugin_is_read(name, tmp_path):
    """Nothing that can be written in a recipe is ignored, and the recipe that ``show`` prints is accepted."""
    printed = tmp_path / "printed.yaml"
    printed.write_text("\n".join(render(tiny(name).printable())))
    pipeline = assemble(load(printed, (), REGISTRY))
    trained(pipeline)
    pipeline.refuse_unread()
    unread = [path for section, config in pipeline._recorded.items() for path in config.unread(f"{section}.")]
    expected = {"data.workers"} if getattr(pipeline.recipe.data, "in_memory", False) else set()
    # Synthetic data read no file.
    files = {"data.root", "data.file", "data.boxes"} if pipeline.recipe.data.is_synthetic() else set()
    # A single obstacle that does not move is neither observed, nor does it turn.
    obstacles = getattr(pipeline.recipe.data, "obstacles", None)
    if obstacles is not None and not obstacles.are_random:
        expected |= {"data.obstacles.observed", "data.obstacles.turn"}
    # Without workers, nothing is prefetched, and batches need not be pinned.
    assert expected <= {*unread} <= expected | files | {"data.prefetch", "data.pin"}


@pytest.mark.parametrize("name", PLAINEST.values())
def test_a_source_keeps_its_word(name):
    """It counts what its settings say that it counts, and evaluates to the objective and the headline."""
    recipe = tiny(name)
    pipeline = assemble(recipe)
    trained(pipeline)
    counted = {unit for unit, count in pipeline.progress.state_dict().items() if count}
    assert counted | {"epochs"} >= recipe.data.units
    metrics = pipeline.source.evaluate(pipeline.learner)
    assert {*recipe.headline, recipe.objective.name} <= metrics.keys()
    assert metrics == pipeline.source.evaluate(pipeline.learner)


@pytest.mark.parametrize("name", PLAINEST.values())
def test_learner_and_source_restore_what_they_save(name):
    first, second = assemble(tiny(name)), assemble(tiny(name, "seed=77"))
    assert isinstance(first.learner, Learner)
    assert isinstance(first.source, Source)
    trained(first)
    second.load_state_dict(first.state_dict())
    second.context.seed = first.context.seed  # which no state holds, because a recipe does
    assert flat(trained(first)) == flat(trained(second))


def trained(pipeline):
    """What the next update that there is returns."""
    step = Step(pipeline)
    while (output := step()) is None:
        pass
    return output


RIVAL = """
from runner.api import Exact, Stage, StageConfig

class RivalConfig(StageConfig):
    "Wants what another stage has."
    kind = "rival"
    implementation = "Rival"
    phase = 1
    claims = frozenset({"critic_step"})

    def contract(self, setting):
        return Exact()

class Rival(Stage):
    def attach(self, pipeline):
        pass
"""


def test_two_stages_that_claim_one_slot_are_refused(tmp_path):
    plugin = tmp_path / "rival.py"
    plugin.write_text(RIVAL)
    with pytest.raises(RecipeError, match="critic_step"):
        tiny("marl_phase1", "optimization.rival=on", registry=Registry([plugin]))
