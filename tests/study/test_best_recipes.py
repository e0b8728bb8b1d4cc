"""``run`` accepts what ``study best`` prints, whatever the study's source, and comes to the same."""

import json
import os
from pathlib import Path

import pytest
from children import start
from pages import blocks_of
from running import QUIETLY, TINY_MLP
from toy_runs import RECIPE, TOYS
from typer.testing import CliRunner

from runner.cli import app

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("migrated_workspace")]
PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"
ODD_NAME = os.fsdecode(b"caf\xe9")


def shipped(folder):
    """A recipe that ships, with data in memory."""
    return "mlp", [*TINY_MLP], []


def toys(folder):
    """A recipe of a plugin file, with data in memory."""
    (folder / "toy.yaml").write_text(RECIPE)
    return "toy.yaml", ["train={updates: 4, batch_size: 8}"], [TOYS]


def samples(folder):
    """The same with samples that are read one by one, and loaded by a worker."""
    (folder / "toy.yaml").write_text(RECIPE)
    sets = ["train={updates: 4, batch_size: 8}", "data.augmented=true", "data.workers=1"]
    return "toy.yaml", sets, [TOYS]


def sampler(folder):
    """The first model of the page on plugins, with a source that samples its batches itself."""
    plugins = [folder / "mine.py", folder / "sampler.py"]
    plugins[0].write_text(block_with("class NetConfig("))
    plugins[1].write_text(block_with("class Sampler("))
    (folder / "mine.yaml").write_text(block_with("name: mine\n"))
    sets = ["data={kind: my_sampler}", "train.epochs=null", "train.updates=4", "train.batch_size=8"]
    return "mine.yaml", sets, plugins


def block_with(text):
    """The first block of the page that contains a text."""
    return next(block for block in blocks_of(PAGE) if text in block)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [shipped, toys, samples, sampler])
def test_the_best_recipe_of_any_source_is_accepted_and_comes_to_the_same(make, tmp_path):
    recipe, sets, plugins = make(tmp_path)
    metric = "eval/accuracy" if make is sampler else "eval/loss"
    study = {
        "kind": "study",
        "name": "tiny",
        "recipe": recipe,
        "set": [*sets, *QUIETLY],
        "space": {"optimizer.lr": {"float": [1e-3, 1e-2], "log": True}},
        "objectives": {metric: "maximize" if make is sampler else "minimize"},
        "budget": {"trials": 1},
    }
    path = tmp_path / f"{ODD_NAME}.yaml"
    path.write_text(json.dumps(study))
    named = [word for plugin in plugins for word in ("--plugin", str(plugin))]
    summary = start(tmp_path, "study", "run", str(path), "--json", *named).data()
    (row,) = summary["rows"]

    printed = CliRunner().invoke(app, ["study", "best", "tiny"])
    assert printed.exit_code == 0, printed.output
    best = tmp_path / "best.yaml"
    best.write_text(printed.stdout)
    shown = CliRunner().invoke(app, ["show", str(best), *named])
    assert shown.exit_code == 0, shown.output
    result = start(tmp_path, "run", str(best), "--json", "--quiet", *named).data()
    assert result["metrics"][metric] == row["values"][metric]
