"""Refuses settings that a lock, or another process, would read back as other values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from runner.plugin.plugin_config import PluginConfig
from runner.recipe.dumping import dump_inline
from runner.recipe.plain_nodes import plain_node
from runner.recipe.recipe import Recipe, flatten, plain_values
from runner.recipe.validation import fill
from runner.recipe.yaml_nodes import DEFAULT, Node, Problem
from runner.system.secrets import redact

_NUMBER = "Annotated[float, Field(allow_inf_nan=True)]"


def changing_values(recipe: Recipe, root: Node) -> Iterator[Problem]:
    """Problems about settings of plugins whose values do not survive being written and read.

    A default is not validated by pydantic, so a plugin can have one that its type refuses.

    Args:
        recipe: A recipe whose values are valid.
        root: The document that it was loaded from.
    """
    for path, config in _sections(recipe):
        values = plain_values(config, masked=False)
        problems: list[Problem] = []
        read_back = fill(type(config), plain_node(values, DEFAULT), path, problems)
        for problem in problems:
            yield _refusal(config, problem, root)
        if read_back is not None:
            yield from _differences(
                path, values, plain_values(read_back, masked=False), root
            )


def _sections(recipe: Recipe) -> Iterator[tuple[str, PluginConfig]]:
    """Yields the settings of every plugin that is on, with their dotted paths."""
    yield "model", recipe.model
    yield "data", recipe.data
    yield "lr_scheduler", recipe.lr_scheduler
    named: Mapping[str, Mapping[str, PluginConfig]] = {
        "optimization": recipe.stages,
        "inference": recipe.inference,
        "callbacks": recipe.callbacks,
    }
    for section, configs in named.items():
        for kind, config in configs.items():
            yield f"{section}.{kind}", config


def _refusal(config: PluginConfig, problem: Problem, root: Node) -> Problem:
    """Returns the problem of a value that its class has and refuses to read."""
    name = type(config).__name__
    message = (
        f"class {name} has a value here that it refuses to read: {problem.message}"
    )
    if "finite number" in problem.message:
        message += f"; declare it as {_NUMBER}, or choose another default"
    return Problem(root.asked(problem.path), problem.path, message)


def _differences(
    path: str,
    written: Mapping[str, object],
    read_back: Mapping[str, object],
    root: Node,
) -> Iterator[Problem]:
    """Problems about values that change when they are read."""
    before = {name: dump_inline(value) for name, value in flatten(written, path)}
    after = {name: dump_inline(value) for name, value in flatten(read_back, path)}
    for name in dict.fromkeys(chain(before, after)):
        first = before.get(name, "nothing")
        second = after.get(name, "nothing")
        if first != second:
            # A value may be a secret.
            change = (
                f"{redact(first):.60} is read back from a lock as {redact(second):.60}"
            )
            yield Problem(root.asked(name), name, change)
