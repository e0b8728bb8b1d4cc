"""Recipes as mappings and plugins as classes: what a script or a notebook passes."""

import json
import runpy
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch
import yaml
from default_objectives import Line, LineConfig, Points, PointsConfig

import runner
from runner.child.spawn import Child
from runner.plugin.registry import Registry
from runner.recipe.loader import load

PLUGIN = Path(__file__).with_name("default_objectives.py")
CLASSES = [LineConfig, PointsConfig]
RECIPE = {
    "name": "line",
    "device": "cpu",
    "model": {"kind": "line"},
    "data": {"kind": "points"},
    "optimizer": {"kind": "sgd", "lr": 0.1},
    "train": {"updates": 4, "batch_size": 8},
    "tracking": {"system_metrics": False},
}


def loaded(values, plugins=CLASSES):
    return load(values, [], Registry(plugins))


def test_a_mapping_and_classes_train_like_files(migrated_workspace, tmp_path):
    file = tmp_path / "line.yaml"
    file.write_text(yaml.safe_dump(RECIPE))
    of_files = runner.train(file, plugins=[PLUGIN])
    result = runner.train(RECIPE, plugins=CLASSES)
    assert result.status == "FINISHED"
    assert result.metrics["eval/loss"] == of_files.metrics["eval/loss"]
    copy = Path(result.run_dir, "recipe.yaml")
    assert load(copy, [], Registry(CLASSES)).digest == loaded(RECIPE).digest
    learner = runner.load_model(result, plugins=CLASSES)
    assert isinstance(learner, Line)
    again = runner.train(result.lock, plugins=CLASSES)
    assert again.metrics["eval/loss"] == result.metrics["eval/loss"]


def test_classes_of_a_script_train(migrated_workspace, tmp_path):
    """The module of such classes is __main__, which nobody can import."""
    lines = [PLUGIN.read_text(), "import json, runner", f"recipe = json.loads({json.dumps(RECIPE)!r})"]
    lines += ["result = runner.train(recipe, plugins=[LineConfig, PointsConfig])"]
    script = tmp_path / "script.py"
    script.write_text("\n".join(lines))
    names = runpy.run_path(str(script), run_name="__main__")
    assert names["LineConfig"].__module__ == "__main__"
    assert names["result"].status == "FINISHED"


@pytest.mark.parametrize(
    ("change", "path", "value"),
    [
        ({"seed": np.int64(3)}, "seed", None),
        ({"model": {"kind": "line", "measures": np.str_("error")}}, "model.measures", "error"),
        ({"optimizer": {"kind": "sgd", "lr": np.float64(0.5)}}, "optimizer.lr", 0.5),
        ({"optimizer": {"kind": "sgd", "lr": 1e-5}}, "optimizer.lr", 1e-5),
        ({"name": PurePosixPath("other")}, "name", "other"),
        ({"optimization": {"fused_optimizer": "on"}}, "optimization.fused_optimizer", "on"),
        ({"optimization": {"fused_optimizer": True}}, "optimization.fused_optimizer", "on"),
    ],
)
def test_values_are_those_of_yaml(change, path, value):
    if value is None:
        with pytest.raises(runner.RunnerError, match=rf"^recipe: {path}: .*3.* is of type int64; a recipe has text"):
            loaded({**RECIPE, **change})
        return
    values = loaded({**RECIPE, **change}).values()
    for key in path.split("."):
        values = values[key]
    assert (values, type(values)) == (value, type(value))


def test_only_assignments_are_overrides():
    recipe = load(RECIPE, ["seed=3"], Registry(CLASSES))
    assert recipe.overrides == {"seed": 3}


def test_a_mapping_can_extend_a_recipe():
    recipe = load({"extends": "digits_classifier", "seed": 5}, [], Registry())
    assert (recipe.name, recipe.seed) == ("digits_classifier", 5)


def endless():
    values = dict(RECIPE)
    values["model"] = values
    return values


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({**RECIPE, "sede": 1}, r"<mapping>: sede: unknown key - did you mean 'seed'\?"),
        ({**RECIPE, "seed": torch.tensor(1)}, r"recipe: seed: tensor\(1\) is of type Tensor; a recipe has text"),
        ({**RECIPE, 7: 1}, "recipe: key 7 is of type int, and should be text"),
        ({**RECIPE, "model": LineConfig()}, "recipe: model: LineConfig.* is of type LineConfig; a recipe has"),
        (endless(), "recipe: 'model' is nested deeper than 32 levels, or contains itself"),
        ({}, "<mapping>: .*name: is missing"),
        (None, "recipe: None is of type NoneType; should be a file, the name of a recipe that ships, or a mapping"),
        ([RECIPE], r"recipe: \[.* is of type list; should be a file"),
        (yaml.safe_dump(RECIPE), r"recipe: got a text of several lines; pass it as a mapping: yaml.safe_load\(TEXT\)"),
    ],
)
def test_what_is_no_recipe_is_one_message(recipe, message):
    with pytest.raises(runner.RunnerError, match=message):
        runner.train(recipe, plugins=CLASSES)


@pytest.mark.parametrize(
    ("plugins", "message"),
    [
        (LineConfig, r"plugins should be a list of classes: \[LineConfig\]"),
        ([LineConfig()], "plugins: LineConfig.* is of type LineConfig; should be the class itself: LineConfig"),
        ([Line], "plugins: class Line is not of settings: pass the LearnerConfig, .* whose implementation"),
        ([LineConfig, Points], "plugins: class Points is not of settings"),
        ([json], "plugins: <module 'json'.* is of type module; should be its file: json.__file__"),
        ([7], "plugins: 7 is of type int; should be a file, or a class of settings"),
        (7, "plugins should be a list of files and classes, got 7"),
        ([LineConfig, LineConfig], "model.line is registered twice"),
        ([LineConfig], "unknown kind 'points'.*; --plugin FILE adds the plugins of a file"),
    ],
)
def test_what_is_no_plugin_is_one_message(plugins, message):
    with pytest.raises(runner.RunnerError, match=message):
        runner.train(RECIPE, plugins=plugins)


def test_a_child_process_refuses_classes_with_the_fix():
    recipe = loaded(RECIPE)
    with pytest.raises(
        runner.RunnerError, match=r"class LineConfig of .* child process; write it to a file, .*plugins"
    ):
        Child("runner.training.batch_size_probe", recipe)
