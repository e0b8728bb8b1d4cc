"""Results of several commands that are joined: all need the same code, plugins and packages.

A group of runs, a study and an ablation compare results with each other, also those of earlier
commands.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.recipe.lock import changed_computation
from runner.recipe.recipe import Recipe
from runner.recipe.tuning import settings_of_data
from runner.system.errors import UsageError
from runner.system.files import read_regular, write_durably
from runner.system.stored_json import json_text

Computation = Mapping[str, Mapping[str, str]]
"""What results depend on apart from settings, as ``computation_of`` returns it."""
COMPUTATION_NAME = "computation.json"
_DIGITS = 12
_FOLD = "folds.index"


def accepted_drift(
    name: str, stored: Computation, present: Computation, is_allowed: bool
) -> list[str]:
    """Returns what has changed since the first results.

    Args:
        name: What joins the results: ``study 'mine'``.
        stored: The computation of the first results.
        present: The computation of the next ones.
        is_allowed: Whether results of both are joined all the same.

    Raises:
        UsageError: Something has changed, and that is not allowed.
    """
    changes = [
        f"{change.name}: {_shortened(change.locked)} before, {_shortened(change.now)} now"
        for change in changed_computation(stored, present)
    ]
    if changes and not is_allowed:
        raise UsageError(
            f"{name} would not continue as it started: {'; '.join(changes)}; "
            "undo that, or accept it with --allow-drift"
        )
    return changes


def _shortened(value: str) -> str:
    """Returns a value with the first digits of a digest only."""
    *words, last = value.split(" ")
    return " ".join([*words, last[:_DIGITS]])


def record_computation(
    folder: Path, name: str, present: Computation, is_allowed: bool
) -> list[str]:
    """Stores the computation of the results in a folder, and returns what has changed in it.

    Raises:
        UsageError: Something has changed, and that is not allowed.
    """
    path = folder / COMPUTATION_NAME
    changes = []
    # The results of earlier versions have no such file.
    if path.exists():
        stored = json.loads(read_regular(path))
        changes = accepted_drift(name, stored, present, is_allowed)
    write_durably(path, json_text(present, indent=1))
    return changes


def data_key(recipe: Recipe) -> str:
    """Returns a text that is equal for recipes that read the same data."""
    settings: dict[str, Any] = settings_of_data(recipe.values()["data"])
    # All folds divide the same samples.
    settings.pop(_FOLD, None)
    return json.dumps(settings, sort_keys=True)
