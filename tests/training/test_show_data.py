"""Pictures of training data: which sources have one, and the messages where there is none."""

import sys
from pathlib import Path

import pytest
from PIL import Image
from running import RECIPES, settings_of, tiny

from runner.cli import main
from runner.plugin.implementation import imported
from runner.plugin.registry import Registry
from runner.plugin.source import Source
from runner.recipe.loader import load
from runner.system.errors import UsageError
from runner.training.show_data import show_data

RECIPE_NAMES = sorted(path.stem for path in Path(RECIPES).glob("*.yaml"))
WITH_PICTURE = {"posed_views": "graf", "digits": "digits_classifier", "citation_graph": "gcn_cora"}
"""Recipes by the kind of their source."""


def shades(path):
    """The number of different colours of a picture."""
    with Image.open(path) as picture:
        return len(picture.convert("RGB").getcolors(2**24))


@pytest.mark.parametrize("kind", WITH_PICTURE)
def test_a_source_draws_its_data_and_trains_nothing(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = tiny(WITH_PICTURE[kind])
    show_data(recipe, Registry(), Path("data.png"))
    assert recipe.data.kind == kind
    assert shades("data.png") > 10
    assert [path.name for path in tmp_path.iterdir()] == ["data.png"]


def test_images_of_a_folder_are_drawn(tmp_path):
    for number in range(24):
        folder = tmp_path / "images" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (10 * number, 99, 255 - 10 * number)).save(folder / f"{number}.png")
    data = f"data={{kind: image_folder, folder: {tmp_path / 'images'}, side: 8}}"
    show_data(
        load(RECIPES / "digits_classifier.yaml", [data, "train.batch_size=4"], Registry()),
        Registry(),
        tmp_path / "data.png",
    )
    assert shades(tmp_path / "data.png") > 10


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_every_other_source_is_named_in_one_line(name, tmp_path):
    recipe = load(RECIPES / f"{name}.yaml", settings_of(name), Registry())
    kind = recipe.data.kind
    assert (imported(recipe.data).show_data is not Source.show_data) == (kind in WITH_PICTURE)
    if kind not in WITH_PICTURE:
        with pytest.raises(UsageError, match=rf"^data\.kind: '{kind}' has no picture of its data[^\n]*$"):
            show_data(recipe, Registry(), tmp_path / "data.png")
        assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("data.jpg", "--out: 'data.jpg' should end in .png"),
        ("data", "--out: 'data' should end in .png"),
        ("nowhere/data.png", "--out: no such folder: nowhere"),
        ("folder.png", "--out: .*folder.png cannot be written"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused(file, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder.png", "child").mkdir(parents=True)
    with pytest.raises(UsageError, match=message):
        show_data(tiny("digits_classifier"), Registry(), Path(file))


@pytest.fixture
def main_in(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder; returns its exit code, and what it printed on stdout and stderr."""

    def run(*words):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["runner", *words])
        with pytest.raises(SystemExit) as exit_info:
            main()
        printed = capsys.readouterr()
        return exit_info.value.code or 0, printed.out, printed.err

    return run


def test_the_verb_prints_the_path(main_in):
    code, output, _ = main_in("data", "show", "digits_classifier", "-q")
    assert (code, output) == (0, "digits_classifier_data.png\n")


def test_a_mistake_is_exit_code_2(main_in):
    code, output, message = main_in("data", "show", "shakespeare_gpt", "--out", "text.png", "-q")
    assert (code, output) == (2, "")
    assert "data.kind: 'text' has no picture of its data" in message


def test_without_matplotlib_the_package_is_named(main_in, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, message = main_in("data", "show", "digits_classifier", "-q")
    assert code == 2
    assert "pip install 'proven-runner[plots]'" in message
