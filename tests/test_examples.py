"""The examples of the documentation: each trains, resumes bit for bit, and is as short as its page states."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from running import NoDisplay

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.system.errors import UsageError
from runner.system.tensor_trees import tensors
from runner.tracking import Workspace
from runner.training.checkpoint import kept
from runner.training.pipeline import assemble
from runner.training.run import run
from runner.training.step import Step

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"
PEERS = ROOT / "experiments" / "peers"
PAGE = (ROOT / "docs" / "examples.md").read_text()
RECIPES = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
PLUGINS = {"probe": "contrastive"}
LENGTHS = {"ppo": ("train.updates=4", "train.batch_size=64", "train.evaluate_every=4")}
ONE_EPOCH = ("train.epochs=1", "train.evaluate_every=1")
LONGEST = 100


@pytest.fixture(scope="module")
def counting():
    """The script that counts the lines of examples."""
    sys.path.insert(0, str(PEERS))
    try:
        import examples
    finally:
        sys.path.remove(str(PEERS))
    return examples


def example(name, *sets):
    """The recipe of an example, made short, and the files of its plugins."""
    plugins = [EXAMPLES / f"{PLUGINS.get(name, name)}.py"]
    lengths = LENGTHS.get(name, ONE_EPOCH)
    return load(EXAMPLES / f"{name}.yaml", [*lengths, "device=cpu", *sets], Registry(plugins)), plugins


def stepped(pipeline, updates):
    step = Step(pipeline)
    while pipeline.progress.updates < updates:
        step()
    return pipeline


@pytest.mark.usefixtures("migrated_workspace")
@pytest.mark.parametrize("name", RECIPES)
def test_every_example_trains_and_is_evaluated(name):
    recipe, plugins = example(name, "tracking.system_metrics=false")
    result = run(recipe, Registry(plugins), Workspace(), NoDisplay())
    assert result.status == "FINISHED"
    measured = {key: value for key, value in result.metrics.items() if key.startswith("eval/")}
    assert {f"eval/{recipe.objective.name}"} <= measured.keys()
    assert all(map(math.isfinite, measured.values()))


@pytest.mark.parametrize("name", RECIPES)
def test_every_example_resumes_bit_for_bit(name):
    recipe, plugins = example(name)
    pipeline = stepped(assemble(recipe, plugins), 1)
    state = kept(pipeline.state_dict())
    resumed = assemble(recipe, plugins, resumed=state)
    resumed.load_state_dict(state)
    for trained in (pipeline, resumed):
        stepped(trained, 3)
    expected, actual = (list(tensors(kept(trained.state_dict()))) for trained in (pipeline, resumed))
    assert len(expected) == len(actual)
    assert all(map(torch.equal, expected, actual))


def test_a_table_is_classified_if_its_target_is_text():
    recipe, plugins = example("table", "data.target=district")
    assert assemble(recipe, plugins).source.sizes == {"classes": 4}


def test_a_column_that_the_table_does_not_have_is_refused():
    recipe, plugins = example("table", "data.target=price")
    with pytest.raises(UsageError, match=r"data.target: no column 'price'; synthetic_flats.csv has: area, rooms"):
        assemble(recipe, plugins)


@pytest.mark.parametrize("cell", ["", "n/a", "nan", "1,5"])
def test_a_column_of_numbers_with_another_cell_is_refused(tmp_path, cell):
    """Else one cell would make classes of numbers."""
    for column in ("rent", "area"):
        rows = [{"area": str(number), "rent": str(10 * number)} for number in range(1, 21)]
        rows[6][column] = cell
        lines = ["area,rent", *(f'{row["area"]},"{row["rent"]}"' for row in rows)]
        if column == "area":
            lines = ["area,rent", *(f'"{row["area"]}",{row["rent"]}' for row in rows)]
        (tmp_path / "synthetic_cells.csv").write_text("\n".join(lines))
        recipe, plugins = example("table", f"data.file={tmp_path / 'synthetic_cells.csv'}")
        with pytest.raises(UsageError, match=f"data.file: column '{column}' has numbers, and '{cell}' in row 7"):
            assemble(recipe, plugins)


def test_a_table_may_begin_with_a_byte_order_mark(tmp_path):
    text = "\n".join(["rent,area", *(f"{10 * number},{number}e-1" for number in range(1, 21))])
    (tmp_path / "synthetic_marked.csv").write_text(text, encoding="utf-8-sig")
    recipe, plugins = example("table", f"data.file={tmp_path / 'synthetic_marked.csv'}", "train.batch_size=8")
    assert assemble(recipe, plugins).source.shapes["x"] == (1,)


def test_the_probe_trains_only_its_layer():
    recipe, plugins = example("probe")
    trained = [name for name, _ in assemble(recipe, plugins).learner.named_parameters()]
    assert trained == ["model.1.weight", "model.1.bias"]


def test_examples_are_as_short_as_the_pages_state(counting):
    counts = {name: counting.lines_of_example(name) for name in counting.RECIPES}
    assert {recipe for recipes in counting.RECIPES.values() for recipe in recipes} == {
        f"{name}.yaml" for name in RECIPES
    }
    assert all(count <= LONGEST for count in counts.values())
    listed = re.findall(r"^\| \[[^]]+\]\([^)]+\) \| [^|]+ \| (\d+) \|$", PAGE, re.MULTILINE)
    assert listed == [str(count) for count in counts.values()]


def test_the_comparison_has_the_lines_of_today(counting):
    recorded = json.loads(counting.RESULT.read_text())["examples"]
    table = (PEERS / "README.md").read_text()
    for name, figures in recorded.items():
        assert figures["runner"] == counting.lines_of_example(name)
        assert figures["lightning"] == counting.lines_of_script(name)
        assert figures["lightning_run"]["exit_code"] == 0
        assert f"| `{name}` | {figures['runner']} | {figures['lightning']} |" in table
    assert recorded.keys() == counting.RECIPES.keys()


def test_lines_are_counted_without_blank_ones_and_comments(counting):
    text = '"""One.\n\nTwo.\n"""\n\n# Three.\nx = 1  # counted\n\ny = (\n    2,\n)\n'
    assert counting.lines_of_python(text) == 7
    assert counting.lines_of_yaml("# a\n\nname: x\n  # b\nseed: 1 # c\n") == 2
