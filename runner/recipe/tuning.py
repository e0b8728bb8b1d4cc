"""The section of a lock with the tuning choices of its run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from runner.plugin.tuning import Setup, parse_tuning
from runner.recipe.recipe import Recipe, flatten
from runner.recipe.yaml_nodes import LockError, Node, Problem

TUNING = "tuning"
_PLACES_OF_DATA = ("workers", "root", "file", "folder")
"""Settings that decide from where data are read, not which."""
_log = logging.getLogger(__name__)


def locked_tuning(root: Node, recipe: Recipe) -> Setup | None:
    """Returns the tuning choices of a lock.

    Args:
        root: The lock.
        recipe: The recipe of the lock, with all overrides.

    Returns:
        The choices; None if there are none, or if they were made for other settings, which is
        logged.

    Raises:
        LockError: The section has another form.
    """
    section = root.get(TUNING)
    if section is None:
        return None
    try:
        setup = parse_tuning(section.plain())
    except ValueError as error:
        raise LockError([Problem(section.place, TUNING, str(error))]) from None
    recorded = root.get("recipe")
    recorded_values = {} if recorded is None else recorded.plain()
    changed = list(_changed_settings(recorded_values, recipe.values()))
    if not setup.choices or not changed:
        return setup
    _log.warning(
        "tuning choices of the lock are not used, because %s has changed",
        ", ".join(changed),
    )
    return None


def settings_of_data(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns what decides which data are read, not from where or by how many processes."""
    return {
        name: str(value)
        for name, value in flatten(values)
        if name not in _PLACES_OF_DATA
    }


def _changed_settings(
    recorded: Mapping[str, Any], present: Mapping[str, Any]
) -> Iterator[str]:
    """Yields the settings that tuning choices depend on and that differ, as dotted paths."""
    recorded_settings = dict(_relevant_settings(recorded))
    present_settings = dict(_relevant_settings(present))
    for name in sorted(recorded_settings.keys() | present_settings.keys()):
        if recorded_settings.get(name) != present_settings.get(name):
            yield name


def _relevant_settings(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for section in ("model", "optimization"):
        for name, value in flatten(values.get(section) or {}, section):
            if value != "off":
                yield name, str(value)
    for name, text in settings_of_data(values.get("data") or {}).items():
        yield f"data.{name}", text
    yield "train.batch_size", str((values.get("train") or {}).get("batch_size"))
