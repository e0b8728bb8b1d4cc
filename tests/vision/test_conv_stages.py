"""The experiment that trains ``conv_classifier`` with every stage names all of them."""

import re
import sys
from pathlib import Path

import pytest

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.system.errors import UsageError

FOLDER = Path(__file__).parents[2] / "experiments" / "conv_classifier"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    yield __import__("stages")
    sys.modules.pop("stages")


def test_every_stage_is_trained_or_absent_for_a_reason(script):
    registry = Registry()
    variants = script.variants()
    switched = {path.split(".")[1] for overrides in variants.values() for path in overrides}
    assert switched == set(registry.kinds("optimization"))
    for overrides in variants.values():
        settings = [f"{path}={value}".replace("'", "") for path, value in overrides.items()]
        used = {path.split(".")[1] for path, value in overrides.items() if value != "off"}
        assert used <= stages_of(script.RECIPE, settings)


def stages_of(recipe, settings):
    """Returns the stages of a recipe; those that cannot work with it, too."""
    try:
        return load(recipe, settings, Registry()).stages.keys()
    except UsageError as error:
        return set(re.findall(r"optimization\.(\w+): cannot work here", str(error)))


def test_an_absent_stage_has_the_reason_in_words(script):
    reason = script.reason_for_absence({"seed": 0, "optimization.forward_cache": "on"})
    assert reason.startswith("optimization.forward_cache: cannot work here")
    assert script.reason_for_absence({"seed": 0}) == ""
