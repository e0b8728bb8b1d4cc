"""Lays a recipe over what it extends, and the command line over both."""

import os
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from functools import reduce
from importlib import resources
from pathlib import Path

from runner.recipe.errors import DEFAULT, Place, Problem, RecipeError, nearest, shown_path, suggestion
from runner.recipe.yaml_nodes import Node, parse, read
from runner.system.secrets import MASK

SUFFIX = ".yaml"
LOCK_SUFFIX = ".lock.yaml"


def shipped() -> dict[str, Path]:
    """The recipes that ship with the runner, by bare name."""
    folder = Path(str(resources.files("runner.recipes")))
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def find(reference: str | Path) -> Path:
    """The file that a command line means: a path, or the bare name of a recipe that ships.

    Raises:
        RecipeError: there is no such recipe; the nearest name is in the message.
    """
    path = Path(reference)
    if os.path.isfile(path):  # unlike Path.is_file, it takes a name that is too long for one that is not there
        return path
    bare = _bare_name(reference)
    if bare in shipped():
        return shipped()[bare]
    if os.path.exists(path):
        return path  # a folder or a pipe: reading it tells
    folder = path.absolute().parent
    known = [shown_path(sibling) for sibling in folder.glob(f"*{SUFFIX}")] if os.path.isdir(folder) else []
    if bare is None:
        near = nearest(shown_path(path), known)
        hint = f" - did you mean '{near}'?" if near else ""
        raise RecipeError([Problem(Place(path), "", f"no such file{hint}")])
    hint = suggestion(bare, shipped())
    raise RecipeError([Problem(Place(str(reference)), "", f"no such file, and no recipe of that name ships{hint}")])


def is_lock(path: Path) -> bool:
    """Whether a file is the lock of a run, told by its name: the recipe stands in it under ``recipe``."""
    return path.name.endswith(LOCK_SUFFIX)


def layers(path: Path, sets: Sequence[str], problems: list[Problem]) -> list[Node]:
    """What a recipe in a file is laid together from: what it extends, the file, and each assignment.

    Args:
        path: the file.
        sets: assignments ``a.b.c=VALUE``, the last one winning.
        problems: receives what does not keep the rest from being read.

    Raises:
        RecipeError: a file or an assignment cannot be read, or ``extends`` runs in a circle.
    """
    files = list(_documents(path, problems))
    return [*reversed(files), *(_assignment(number, text, problems) for number, text in enumerate(sets, start=1))]


def compose(layers: Sequence[Node]) -> Node:
    """The recipe as one mapping: every layer over those before it."""
    return reduce(merge, layers)


def merge(base: Node, over: Node) -> Node:
    """Lays one value over another: mappings merge key by key, everything else replaces.

    Where a mapping names another ``kind`` than the one below it, the inherited keys are marked as leftovers: those that
    the new kind does not know belonged to the old one.
    """
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    old, new = base.get("kind"), over.get("kind")
    changed = old is not None and new is not None and old.value != new.value
    children = {key: replace(node, leftover=node.leftover or changed) for key, node in base.value.items()}
    for key, node in over.value.items():
        children[key] = merge(children[key], node) if key in children else node
    section = over if changed else base  # it stands where it was opened, unless it has become another one
    return replace(section, value=children, leftover=False)


def _documents(path: Path, problems: list[Problem]) -> Iterator[Node]:
    """What stands in a recipe's file, then in the one that it extends, and so on."""
    chain: list[Path] = []
    while True:
        root = read(path, problems)
        if is_lock(path):
            yield _locked(root)
            return
        assert isinstance(root.value, dict)
        extends = root.value.pop("extends", None)
        yield root
        if extends is None:
            return
        chain.append(path.resolve())
        path = _parent(extends, path, problems)
        if path.resolve() in chain:
            circle = " -> ".join(link.name for link in (*chain, path))
            raise RecipeError([*problems, Problem(extends.place, "extends", f"runs in a circle: {circle}")])


def _locked(root: Node) -> Node:
    recipe = root.get("recipe")
    if recipe is None or not isinstance(recipe.value, dict):
        raise RecipeError([Problem(Place(root.place.source), "recipe", "is missing: this is not a lock file")])
    origins = root.get("origins")
    places = origins.value if origins is not None and isinstance(origins.value, dict) else {}
    return _without_masks(recipe, {path for path, place in places.items() if place.value == DEFAULT.source}, "")


def _without_masks(node: Node, defaults: Set[str], path: str) -> Node:
    """Leaves out the secrets that nobody wrote: a plugin finds them again where it found them (the environment)."""
    if not isinstance(node.value, dict):
        return node
    children = {key: _without_masks(child, defaults, f"{path}{key}.") for key, child in node.value.items()}
    kept = {key: child for key, child in children.items() if child.value != MASK or f"{path}{key}" not in defaults}
    return replace(node, value=kept)


def _parent(extends: Node, path: Path, problems: list[Problem]) -> Path:
    if not isinstance(extends.value, str) or not extends.value:
        message = "should be the path of a recipe, or the name of one that ships"
        raise RecipeError([*problems, Problem(extends.place, "extends", message)])
    beside = path.parent / extends.value
    if os.path.isfile(beside):
        return beside
    bare = _bare_name(extends.value)
    if bare in shipped():
        return shipped()[bare]
    known = {sibling.name for sibling in path.parent.glob(f"*{SUFFIX}")} - {path.name} | set(shipped())
    message = f"no such recipe: '{extends.value}'{suggestion(extends.value, known)}"
    raise RecipeError([*problems, Problem(extends.place, "extends", message)])


def _bare_name(reference: str | Path) -> str | None:
    """``marl_phase2`` for itself and for ``marl_phase2.yaml``; None for anything with a folder."""
    name = str(reference)
    return name.removesuffix(SUFFIX) if name == Path(name).name else None


def _assignment(number: int, text: str, problems: list[Problem]) -> Node:
    source = f"--set #{number}"
    dotted, equals, value = text.partition("=")
    keys = dotted.split(".")
    if not equals or not all(keys) or dotted != "".join(dotted.split()):
        raise RecipeError([*problems, Problem(Place(source, 1, 1, text), "", "should be a.b.c=VALUE")])
    if keys[0] == "extends":
        raise RecipeError([*problems, Problem(Place(source, 1, 1, text), "", "extends can only stand in a file")])
    # Blanks in place of the path keep the columns of the value.
    node = parse(" " * (len(dotted) + 1) + value, source, problems, shown=text)
    column = len(dotted) + 1
    for key in reversed(keys):
        column -= len(key) + 1
        place = Place(source, 1, column + 1, text)
        node = Node({key: replace(node, key=place)}, place)
    return node
