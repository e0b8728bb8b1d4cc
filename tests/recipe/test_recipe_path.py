"""Settings that are paths: where they start, and what a plugin receives."""

import os
from pathlib import Path
from typing import Annotated

import pytest

from runner.api import Anchor, Config, DataName, RecipePath
from runner.recipe.validation import fill
from runner.recipe.yaml_nodes import Problem, parse


class PathsConfig(Config):
    """Paths in all the forms that a setting may have."""

    folder: RecipePath = Path("somewhere")
    optional: RecipePath | None = None
    marked: Annotated[str | None, Anchor()] = None
    file: DataName = "letters.txt"


def filled(text, folder):
    problems: list[Problem] = []
    settings = fill(PathsConfig, parse(text, folder / "recipe.yaml", problems), "data", problems)
    return settings, [problem.message for problem in problems]


@pytest.mark.parametrize("written", ["images", "../images", "/images"])
@pytest.mark.parametrize("name", ["folder", "optional"])
def test_a_recipe_path_is_a_path_that_starts_at_the_recipe(name, written, tmp_path):
    settings, problems = filled(f"{name}: {written}", tmp_path)
    assert problems == []
    assert getattr(settings, name) == Path(os.path.abspath(tmp_path / written))
    assert settings.model_dump(mode="json")[name] == str(getattr(settings, name))


def test_what_nobody_writes_is_a_path_as_well(tmp_path):
    settings, _ = filled("{}", tmp_path)
    assert (settings.folder, settings.optional) == (Path("somewhere"), None)


def test_other_paths_stay_text(tmp_path):
    settings, _ = filled("{marked: images, file: other.txt}", tmp_path)
    assert (settings.marked, settings.file) == (str(tmp_path / "images"), "other.txt")


@pytest.mark.parametrize(("value", "shown"), [("7", "7"), ("[a]", "a list"), ("true", "true")])
def test_what_is_no_text_is_no_path(value, shown, tmp_path):
    _, problems = filled(f"folder: {value}", tmp_path)
    assert problems == [f"should be text, got {shown}"]
