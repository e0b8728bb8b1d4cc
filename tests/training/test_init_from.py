"""``model.init_from``: a model begins with the weights of another run, once, and says what it did not find."""

import logging
import shutil
import signal
from pathlib import Path

import mlflow
import pytest
import torch
from children import start
from interrupted import learnt, same
from running import RECIPES, settings_of, tiny, train_here
from toy_runs import TOYS, written

import runner
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.lock import read_lock
from runner.recipe.yaml_nodes import RecipeError
from runner.tracking import Workspace
from runner.training.outputs import NoOutput
from runner.training.pipeline import assemble
from runner.training.run import run
from runner.training.state_difference import differences
from runner.verify.subjects import recipe_with

GAN = Path(__file__).parents[2] / "docs" / "example_gan.py"

pytestmark = pytest.mark.usefixtures("migrated_workspace")


def weights(learner):
    """All parameters and buffers by name, copied."""
    modules = learner.modules().items()
    return {f"{name}.{key}": value.clone() for name, module in modules for key, value in module.state_dict().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def pipeline_from(name, other, *sets):
    return assemble(tiny(name, f"model.init_from={other}", "seed=77", *sets))


@pytest.mark.parametrize("name", ["marl_phase2", "mlp", "shakespeare_gpt"])
def test_a_model_begins_with_the_best_weights_of_the_run(name):
    result = train_here(name)
    expected = weights(runner.load_model(result))
    built = weights(assemble(tiny(name, "seed=77")).learner)
    for reference in (result.run_name, result.run_id, result.run_dir):
        pipeline = pipeline_from(name, reference)
        assert equal(weights(pipeline.learner), expected)
        assert (pipeline.start.run, pipeline.start.taken) == (result.run_name, len(expected))
        assert pipeline.start.remarks(None) == []
    assert not equal(built, expected)


STACKED = {"marl_baseline": (), "marl_phase2": ("optimization.amp=off",)}


def test_stages_and_target_networks_begin_with_them_too():
    result = train_here("marl_baseline")
    plain, stacked = (pipeline_from(name, result.run_name, *off) for name, off in STACKED.items())
    assert equal(weights(plain.learner), weights(runner.load_model(result)))
    assert equal(weights(plain.learner), weights(stacked.learner))
    observation = torch.rand(3, 2, 7)
    assert torch.allclose(plain.learner.predict(observation), stacked.learner.predict(observation), atol=1e-5)


def test_a_learner_with_an_update_of_its_own_begins_with_them():
    registry, recipe = Registry([GAN]), GAN.with_suffix(".yaml")
    settings = {"train.updates": 8, "train.evaluate_every": None, "train.log_every": 4}
    trained = runner.train(recipe, settings, plugins=[GAN])
    expected = weights(runner.load_model(trained, plugins=[GAN]))
    begun = assemble(load(recipe, [f"model.init_from={trained.run_name}", "seed=77"], registry), [GAN])
    assert equal(weights(begun.learner), expected)
    assert not equal(weights(assemble(load(recipe, ["seed=77"], registry), [GAN]).learner), expected)


@pytest.mark.parametrize("buffer", ["sparse", "expanded", "float8", "late_fraction"])
def test_buffers_of_any_kind_are_taken_as_they_are(buffer, tmp_path):
    written(tmp_path)
    plugins = [TOYS, TOYS.with_name("odd_states.py")]
    settings = {"model": {"kind": "odd_state", "buffer": buffer}, "train.updates": 3}
    trained = runner.train(tmp_path / "toy.yaml", settings, plugins=plugins)
    expected = runner.load_model(trained, plugins=plugins).module.odd
    sets = [f"model={{kind: odd_state, buffer: {buffer}, init_from: {trained.run_name}}}", "train.updates=3"]
    taken = assemble(load(tmp_path / "toy.yaml", sets, Registry(plugins)), plugins).learner.module.odd
    assert not list(differences(expected, taken))


def test_the_averages_are_what_a_model_begins_with(tmp_path):
    written(tmp_path)
    registry = Registry([TOYS])
    trained = runner.train(tmp_path / "toy.yaml", {"train.updates": 20, "train.ema": 0.9}, plugins=[TOYS])
    averaged = weights(runner.load_model(trained, plugins=[TOYS]))
    sets = [f"model.init_from={trained.run_name}", "train.updates=5", "seed=8"]
    without = assemble(load(tmp_path / "toy.yaml", sets, registry), [TOYS]).learner
    with_ema = assemble(load(tmp_path / "toy.yaml", [*sets, "train.ema=0.5"], registry), [TOYS]).learner
    expected = {name: value for name, value in averaged.items() if name.startswith("model.")}
    assert equal(weights(without), expected)
    assert equal({name: value for name, value in weights(with_ema).items() if name.startswith("model.")}, expected)
    assert equal(with_ema.averages.values, expected)


def test_what_was_not_found_or_has_another_shape_is_said_and_kept(caplog):
    first = train_here("digits_classifier", "model.widths=[8]", "train.epochs=1")
    caplog.set_level(logging.WARNING, "runner.training.run")
    sets = ("model.widths=[8, 16]", "train.epochs=1", f"model.init_from={first.run_name}")
    second = train_here("digits_classifier", *sets)
    (said,) = (record.message for record in caplog.records if record.message.startswith("model.init_from: "))
    locked = read_lock(Path(second.lock))["init_from"]
    assert locked["run"] == first.run_name
    assert locked["missing"]
    assert locked["reshaped"]
    assert f"not found there: {locked['missing'][0]}" in said
    assert f"of another shape there: {locked['reshaped'][0]}" in said
    tags = mlflow.MlflowClient(second.tracking_uri).get_run(second.run_id).data.tags
    assert tags["init_from.run"] == first.run_name
    assert tags["init_from.missing"] == ", ".join(locked["missing"])
    own = weights(assemble(tiny("digits_classifier", "model.widths=[8, 16]")).learner)
    assert len(own) == locked["taken"] + len(locked["missing"]) + len(locked["reshaped"])


def test_the_lock_begins_with_the_same_weights_again_and_says_when_they_are_others(caplog):
    first = train_here("mlp", "train.epochs=1")
    second = train_here("mlp", "train.epochs=1", "seed=9", f"model.init_from={first.run_name}")
    caplog.set_level(logging.WARNING, "runner.training.run")

    def again():
        registry = Registry()
        return run(load(second.lock, (), registry), registry, Workspace(), NoOutput())

    def drifts():
        return [record.message for record in caplog.records if record.message.startswith("drift: ")]

    assert again().metrics["train/loss"] == second.metrics["train/loss"]
    assert drifts() == []
    (newest,) = Path(first.run_dir, "checkpoints").glob("step-*")
    other = train_here("mlp", "train.epochs=1", "seed=10")
    shutil.rmtree(newest)
    shutil.copytree(next(Path(other.run_dir, "checkpoints").glob("step-*")), newest)
    again()
    assert drifts() == [
        f"drift: model.init_from is {first.run_name} ({newest.name}) now, and was other weights in the lock"
    ]


def test_a_run_that_goes_on_needs_the_other_no_more(tmp_path, migrated_workspace):
    first = train_here("marl_phase2")
    sets = (*settings_of("marl_phase2"), "seed=3", f"model.init_from={first.run_name}", "train.checkpoint_every=40")
    command = ["run", str(RECIPES / "marl_phase2.yaml"), "--quiet", "--json"]
    command += [part for setting in sets for part in ("--set", setting)]
    whole = start(tmp_path, *command).data()
    before = set(migrated_workspace.glob("runs/*"))
    assert start(tmp_path, *command, RUNNER_FAULTS="checkpoint.synced=kill@3").wait() == -signal.SIGKILL
    (killed,) = set(migrated_workspace.glob("runs/*")) - before
    shutil.rmtree(first.run_dir)
    resumed = start(tmp_path, "resume", killed.name, "--quiet", "--json").data()
    assert resumed["resumed_at"]
    same(learnt(resumed), learnt(whole))
    assert runner.load_model(resumed["run_name"])


def test_a_path_starts_at_the_recipe(tmp_path, monkeypatch):
    first = train_here("digits_classifier", "train.epochs=1")
    (tmp_path / "recipes").mkdir()
    shutil.copytree(first.run_dir, tmp_path / "kept")
    lines = ["name: mine", "extends: digits_classifier", "model: {init_from: ../kept}"]
    (tmp_path / "recipes" / "mine.yaml").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    recipe = load("recipes/mine.yaml", settings_of("digits"), Registry())
    assert recipe.values()["model"]["init_from"] == str(tmp_path / "kept")
    assert assemble(recipe).start.run == "kept"


def test_what_cannot_be_begun_with_is_an_error_at_its_place():
    train_here("digits_classifier", "train.epochs=1")
    for reference, said in (
        ("nothing", r"no run 'nothing' in .*; there are: digits_classifier-"),
        ("latest", r"'latest' would be another run when this is trained again"),
        ("digits", r"no tensor of digits_classifier-\w+ has the name and shape of one of this model"),
    ):
        with pytest.raises(RecipeError, match=rf"override.*model\.init_from: {said}"):
            pipeline_from("marl_baseline", reference)


def test_settings_of_a_learner_are_its_own():
    """A learner may hand all that it is told to its module: who begins with what is not among it."""
    model = tiny("digits_classifier", "model.init_from=other").model
    assert model.init_from == "other"
    assert "init_from" not in model.model_dump() | dict(model)
    plain = tiny("digits_classifier")
    assert "init_from" not in plain.values()["model"]
    begun = tiny("digits_classifier", "model.init_from=other")
    assert begun.digest != plain.digest
    assert recipe_with(begun, Registry(), ()).model.init_from == "other"  # what verify and ablate hand to a child
