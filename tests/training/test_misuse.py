"""Mistakes in the settings of a training are one line with file, line, key and fix, and exit code 2."""

import re
from pathlib import Path

import pytest
from toy_runs import TOYS, Notes, written
from typer.testing import CliRunner

from runner.cli import app
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.system.errors import ExitCode, UsageError
from runner.tracking import Workspace
from runner.tracking.seeds import groups
from runner.training.fold_check import refuse_indivisible
from runner.training.loop import Loop
from runner.training.pipeline import assemble
from runner.training.signals import Stop

FOLDER = Path(__file__).parents[1]
PLUGINS = [TOYS, FOLDER / "observers.py", FOLDER / "schedules.py"]
REGISTRY = Registry(PLUGINS)
SECTIONS = {
    "name": "toy",
    "device": "cpu",
    "model": "{kind: toy}",
    "data": "{kind: toy_words}",
    "optimizer": "{lr: 1e-2}",
    "train": "{updates: 8, batch_size: 8, evaluate_every: 4}",
}
MISTAKES = [
    ({"optimizer": "{groups: {'nothing*': {lr: 1e-3}}}"}, "optimizer.groups.nothing*: matches no parameter; the names"),
    ({"optimizer": "{layer_decay: 0.5}"}, "optimizer.layer_decay: Toy.blocks() has no layer"),
    (
        {"train": "{stop: {patience: 1, metric: eval/nothing, direction: minimize}}"},
        "train.stop.metric: the evaluation has no 'eval/nothing'; it has eval/loss",
    ),
    (
        {"train": "{stop: {patience: 1, reach: 0.5}}"},
        "train.stop: set exactly one of patience, reach, seconds; got patience and reach",
    ),
    (
        {"train": "{evaluate_every: null, stop: {patience: 1}}"},
        "train.stop.patience: is compared at evaluations, and there is only the last: set train.evaluate_every",
    ),
    ({"tracking": "{sinks: [cvs]}"}, "tracking.sinks: unknown sink 'cvs' - did you mean 'csv'?"),
    ({"name": '"${env:NO_SUCH_NAME}"'}, "name: the environment variable NO_SUCH_NAME is not set; set it, or write"),
    ({"callbacks": "{conter: on}"}, "callbacks.conter: unknown callback - did you mean 'counter'?"),
    ({"callbacks": "{counter: {evry: 3}}"}, "callbacks.counter.evry: unknown key - did you mean 'every'?"),
    ({"callbacks": "{misspelt: on}"}, "callbacks.misspelt: Misspelt.after_updates in"),
    ({"callbacks": "{idle: on}"}, "callbacks.idle: Idle overrides none of"),
    (
        {"data": "{folds: {by: group}}"},
        "data.folds: 'toy_words' cannot be divided: it has no group of each sample; use by: random",
    ),
    ({"data": "{folds: {by: clas}}"}, "data.folds.by: should be 'random', 'class' or 'group', got 'clas' - did you"),
    ({"data": "{folds: {count: 500}}"}, "data.folds: 'toy_words' cannot be divided: it has 50 samples, and needs at"),
    ({"data": "{folds: {count: 3, index: 3}}"}, "data.folds: index 3 exceeds the last of 3 folds"),
    (
        {"train": "{keep: {best: 2, metrics: {eval/nothing: minimize}}}"},
        "train.keep.metrics.eval/nothing: the evaluation has no 'eval/nothing'; it has eval/loss",
    ),
    (
        {"train": "{evaluate_every: null, keep: {best: 2}}"},
        "train.keep.best: there is only one evaluation, the last: set train.evaluate_every",
    ),
    ({"tracking": "{render_every: 2}"}, "tracking.render_every: 'toy_words' has no picture of its evaluation to draw"),
    ({"train": "{overfit_batches: 0}"}, "train.overfit_batches: should be greater than or equal to 1, got 0"),
    (
        {"model": "{kind: toy_pair}", "train": "{on_nonfinite: skip}"},
        "train.on_nonfinite: 'toy_pair' has an update of its own",
    ),
    ({"train": "{on_nonfinite: skp}"}, "train.on_nonfinite: should be"),
    ({"data": "{sampling: balanced}"}, "data.sampling: 'toy_words' has no labels of its training samples"),
    ({"model": "{class_weights: balanced}"}, "model.class_weights: unknown key - known:"),
    ({"train": "{batch_size: 64}"}, "train.batch_size: 64 exceeds the 40 samples that 'toy_words' has to train on"),
    (
        {"lr_scheduler": "{kind: plateau}", "train": "{evaluate_every: null}"},
        "lr_scheduler.kind: 'plateau' reacts to evaluations, and there is only the last: set train.evaluate_every",
    ),
    (
        {"lr_scheduler": "{kind: plateau, metric: eval/nothing, direction: minimize}"},
        "lr_scheduler.metric: the evaluation has no 'eval/nothing'; it has eval/loss",
    ),
]


def with_settings(text, settings):
    """Returns a section with more settings; those that it has already are replaced."""
    pairs = dict(pair.split(": ", 1) for pair in text.strip("{}").split(", ")) if text else {}
    inner = settings.removeprefix("{").removesuffix("}")
    pairs = {key: value for key, value in pairs.items() if not inner.startswith(f"{key}: ")}
    return "{" + ", ".join([*(f"{key}: {value}" for key, value in pairs.items()), inner]) + "}"


def recipe_file(folder, mistakes):
    sections = dict(SECTIONS)
    for section, settings in mistakes.items():
        is_mapping = settings.startswith("{")
        sections[section] = with_settings(sections.get(section, ""), settings) if is_mapping else settings
    path = folder / "mine.yaml"
    path.write_text("".join(f"{section}: {text}\n" for section, text in sections.items()))
    return path


def train(path, folder):
    pipeline = assemble(load(path, [], REGISTRY), PLUGINS)
    Loop(pipeline, folder / "run", Notes(), Notes(), Stop()).run()


def test_without_a_mistake_it_trains(tmp_path):
    train(recipe_file(tmp_path, {}), tmp_path)


@pytest.mark.parametrize(("mistakes", "message"), MISTAKES, ids=[message.partition(": ")[0] for _, message in MISTAKES])
def test_a_mistake_is_one_line_with_file_line_key_and_fix(mistakes, message, tmp_path, monkeypatch):
    monkeypatch.delenv("NO_SUCH_NAME", raising=False)
    path = recipe_file(tmp_path, mistakes)
    with pytest.raises(UsageError) as caught:
        train(path, tmp_path)
    assert caught.value.exit_code == ExitCode.USAGE
    (problem,) = caught.value.problems
    first_line = str(problem).splitlines()[0]
    matched = re.fullmatch(rf"{re.escape(str(path))}:(\d+):\d+: (.*)", first_line)
    assert matched
    assert matched[2].startswith(message)
    section = message.partition(".")[0].partition(":")[0]
    assert path.read_text().splitlines()[int(matched[1]) - 1].startswith(f"{section}: ")


def test_pictures_of_evaluations_need_evaluations(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: shakespeare_gpt\ntracking: {render_every: 2}\ntrain: {evaluate_every: null}\n")
    with pytest.raises(UsageError) as caught:
        load(path, [], Registry())
    messages = [problem.message for problem in caught.value.problems]
    path.write_text("extends: shakespeare_gpt\ntracking: {render_every: 1}\ntrain: {evaluate_every: null}\n")
    assert messages == ["there is only one evaluation, the last: set train.evaluate_every, or 1 here"]
    load(path, [], Registry())


@pytest.mark.parametrize("setting", ["data.folds.by=group", "data.folds.by=class"])
def test_folds_that_the_data_do_not_allow_are_refused_once_before_any_is_trained(setting, tmp_path, migrated_workspace):
    result = CliRunner().invoke(app, [*written(tmp_path, "train.updates=4", setting), "--folds", "3"])
    assert isinstance(result.exception, UsageError)
    message = str(result.exception)
    assert message.count("data.folds: 'toy_words' cannot be divided: it has no ") == 1
    assert groups(Workspace()) == []


def test_folds_of_samples_that_can_be_divided_are_not_refused(tmp_path):
    written(tmp_path)
    recipe = load(tmp_path / "toy.yaml", ["train.updates=4", "data.folds={count: 3, index: 0}"], REGISTRY)
    assert refuse_indivisible(recipe) is None
