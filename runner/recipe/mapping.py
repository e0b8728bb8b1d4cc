"""A recipe that a program passes as a mapping, in the form that YAML has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from runner.recipe.dumping import dump
from runner.recipe.yaml_nodes import MAPPING, MAX_DEPTH, Node, Problem, parse
from runner.system.errors import UsageError


def node_of(values: Mapping[Any, Any], problems: list[Problem]) -> Node:
    """Returns the mapping as it would be read from a file; relative paths start at the working
    directory.

    Raises:
        UsageError: It contains what YAML has no form for.
    """
    return parse(dump(_plain(values, ())), MAPPING, problems)


def _plain(value: Any, keys: tuple[str, ...]) -> Any:
    """Returns plain dictionaries, lists and scalars."""
    location = f"recipe: {'.'.join(keys)}".removesuffix(": ")
    if len(keys) > MAX_DEPTH:
        problem = f"is nested deeper than {MAX_DEPTH} levels, or contains itself"
        raise UsageError(f"recipe: '{keys[0]}' {problem}")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                actual = f"key {key!r:.60} is of type {type(key).__name__}"
                raise UsageError(f"{location}: {actual}, and should be text")
        return {str(key): _plain(child, (*keys, key)) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [
            _plain(child, (*keys, str(number))) for number, child in enumerate(value)
        ]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, PurePath):
        return str(value)
    for scalar in (int, float, str):
        # Subclasses, such as those of NumPy, have no form in YAML.
        if isinstance(value, scalar):
            return scalar(value)
    kinds = "text, numbers, booleans, lists and mappings"
    raise UsageError(
        f"{location}: {value!r:.60} is of type {type(value).__name__}; a recipe has {kinds}"
    )
