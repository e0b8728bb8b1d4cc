"""A group of runs has the results of one code and one data set, also if it is continued."""

import shutil

import pytest
from toy_runs import TOYS, toy, written

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.lock import write_lock
from runner.system import generators
from runner.system.errors import UsageError
from runner.tracking import RunFolder, Workspace
from runner.training.group_data import Group
from runner.training.outputs import NoOutput
from runner.training.pipeline import assemble
from runner.training.run import run
from runner.training.seed_process import locked_data
from runner.training.seeds import train_seeds

SHORT = ("train.updates=2", "train.evaluate_every=2")


class Watched(NoOutput):
    """Calls a function when the first training has ended."""

    def __init__(self, first_ended=lambda: None):
        self._first_ended = first_ended
        self._has_begun = False

    def show_seeds(self, steps):
        if self._has_begun and not steps:
            self._first_ended()
        self._has_begun = True


@pytest.fixture
def plugin(tmp_path):
    """A plugin that a test may edit."""
    return shutil.copy(TOYS, tmp_path / "edited.py")


def edit(plugin):
    plugin.write_text(plugin.read_text() + "\nEDITED = True\n")


def train(folder, plugin, display=None, **options):
    written(folder)
    registry = Registry([plugin])
    recipes = {seed: load(folder / "toy.yaml", [*SHORT, f"seed={seed}"], registry) for seed in (5, 6)}
    display = display or Watched()
    return train_seeds(recipes, registry, Workspace(), display, 1, tags={}, note="", resume_command="", **options)


def interrupt(result):
    """Makes a group one whose second run has not started."""
    shutil.rmtree(Workspace().runs / result.runs[6])
    folder = RunFolder(Workspace().seeds / result.name)
    folder.write(folder.record().model_copy(update={"status": "STOPPED"}))
    return folder


@pytest.mark.usefixtures("migrated_workspace", "copied_children")
def test_a_group_with_other_code_is_continued_only_with_allow_drift(tmp_path, plugin):
    first = train(tmp_path, plugin, go_on=False)
    interrupt(first)
    edit(plugin)
    with pytest.raises(UsageError, match=rf"group {first.name} .*code\.edited\.py.*--allow-drift"):
        train(tmp_path, plugin, go_on=True)
    accepted = train(tmp_path, plugin, go_on=True, allow_drift=True)
    assert (accepted.name, accepted.status, len(accepted.runs)) == (first.name, "FINISHED", 2)


@pytest.mark.usefixtures("migrated_workspace", "copied_children")
def test_a_file_that_is_edited_in_between_ends_the_group(tmp_path, plugin):
    result = train(tmp_path, plugin, Watched(lambda: edit(plugin)), go_on=False)
    assert result.status == "FAILED"
    assert result.failures.keys() == {6}, result.failures
    assert "code.edited.py" in result.failures[6]


def test_the_runs_of_a_group_need_the_data_of_the_others(tmp_path):
    recipes = {fold: toy(tmp_path, *SHORT, f"data.folds={{count: 3, index: {fold}}}") for fold in range(3)}
    recipes[3] = toy(tmp_path, *SHORT, "data.limit={train: 0.5, held_out: 0.5}")
    folders = {number: RunFolder(tmp_path / str(number)) for number in (0, 3)}
    for number, folder in folders.items():
        folder.path.mkdir()
        write_lock(recipes[number], folder.path, Registry([TOYS]), fingerprint=f"data {number}")
    assert locked_data(folders, recipes, 2) == (recipes[0].seed, "data 0")
    assert locked_data(folders, recipes, 0) is None
    assert locked_data({}, recipes, 1) is None


DRAWN = """

class DrawnConfig(DatasetConfig):
    '''Words that are drawn with the recipe's seed, and a first one from a setting.'''

    kind, provides, implementation = "drawn", "toy_words", "Drawn"
    first: int = 0


class Drawn(DatasetSource):
    def datasets(self, config):
        words = torch.randint(WORDS, (40, LENGTH))
        words[0] = config.first
        return {"words": words[8:]}, {"words": words[:8]}
"""


@pytest.mark.usefixtures("migrated_workspace")
@pytest.mark.parametrize("is_changed", [False, True])
def test_data_may_be_drawn_with_the_seed_of_each_run(tmp_path, plugin, is_changed):
    plugin.write_text(plugin.read_text() + DRAWN)
    registry = Registry([plugin])
    written(tmp_path)

    def recipe_of(seed, *sets):
        return load(tmp_path / "toy.yaml", [*SHORT, "data={kind: drawn}", f"seed={seed}", *sets], registry)

    generators.seed(5)
    other = assemble(recipe_of(5), registry.files).source.fingerprint()
    group = Group("toy-seeds", None, (5, other))
    settings = ("data.first=3",) if is_changed else ()

    def train():
        return run(recipe_of(6, *settings), registry, Workspace(), NoOutput(), parent=group)

    if is_changed:
        with pytest.raises(UsageError, match="its data have changed"):
            train()
        return
    alone = run(recipe_of(6), registry, Workspace(), NoOutput())
    assert train().metrics["eval/loss"] == alone.metrics["eval/loss"]


@pytest.mark.usefixtures("migrated_workspace")
def test_a_run_with_other_data_than_its_group_is_refused(tmp_path):
    group = Group("toy-seeds", None, (7, "other data"))
    with pytest.raises(UsageError, match=r"group toy-seeds .* its data have changed"):
        run(toy(tmp_path, *SHORT), Registry([TOYS]), Workspace(), NoOutput(), parent=group)
    assert not Workspace().runs.exists()
