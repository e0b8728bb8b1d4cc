"""The secrets that are written in a recipe: remembered as soon as they are read, masked in the copy beside a run."""

from collections.abc import Iterator, Set
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from runner.recipe.errors import Problem, RecipeError
from runner.recipe.recipe import Recipe
from runner.recipe.yaml_nodes import Node, parse
from runner.system.files import write_durably
from runner.system.secrets import MASK, looks_secret, redact, register, register_url


def hide(node: Node, path: str = "") -> None:
    """Remembers the secrets in a node: passwords in URLs, and texts whose key looks secret.

    Args:
        node: what was read.
        path: its dotted path.
    """
    for where, leaf in _leaves(node, path):
        if isinstance(leaf.value, str):
            register_url(leaf.value)
            if looks_secret(where):
                remember(leaf, where)


def remember(node: Node, path: str) -> None:
    """Remembers all that stands in a node as secret, as it is meant and as it is spelled; also what it replaced."""
    if node.below is not None:
        remember(node.below, path)
    for where, leaf in _leaves(node, path):
        if leaf.value is not None and not isinstance(leaf.value, bool):
            key = last_name(where)
            register(str(leaf.value), key)
            for line in leaf.spelled.splitlines():
                register(line.strip().strip("\"'"), key)


def last_name(path: str) -> str:
    """The last part of a dotted path that is no number of a list's item."""
    return next((part for part in reversed(path.split(".")) if not part.isdecimal()), path)


def lost(node: Node, path: str = "") -> Iterator[Problem]:
    """Everything that was masked when it was written, and so is no value."""
    for where, leaf in _leaves(node, path):
        if isinstance(leaf.value, str) and MASK in leaf.value:
            dotted = ".".join(part for part in where.split(".") if not part.isdecimal())
            yield Problem(
                leaf.place, dotted, f"a secret is not kept in a run's files; give it again: --set {dotted}=VALUE"
            )


def copy_recipe(recipe: Recipe, target: Path) -> None:
    """Copies the file that a recipe was loaded from, with every secret in it masked.

    Args:
        recipe: the recipe.
        target: the copy; replaced if it exists.

    Raises:
        OSError: the file cannot be read, or the copy not be written.
    """
    text = recipe.path.read_bytes().decode("utf-8-sig", errors="replace")
    with suppress(RecipeError):  # it was changed after it was loaded
        text = _masked(text, parse(text, recipe.path, []), recipe.secrets().keys())
    write_durably(target, redact(text))


def _masked(text: str, root: Node, paths: Set[str]) -> str:
    starts = list(accumulate(map(len, text.splitlines(keepends=True)), initial=0))
    spans = set()  # what an alias repeats stands there once
    for path, leaf in _leaves(root, ""):
        if (path in paths and leaf.value is not None) or (looks_secret(path) and isinstance(leaf.value, str)):
            start = text.index(leaf.spelled, starts[leaf.place.line - 1] + leaf.place.column - 1)
            spans.add((start, start + len(leaf.spelled)))
    for start, end in sorted(spans, reverse=True):
        text = f"{text[:start]}'{MASK}'{text[end:]}"
    return text


def _leaves(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    """The scalars in a node with their dotted paths; items of a list are numbered."""
    if not isinstance(node.value, dict | list):
        yield path, node
        return
    for key, child in node.value.items() if isinstance(node.value, dict) else enumerate(node.value):
        yield from _leaves(child, f"{path}.{key}" if path else str(key))
