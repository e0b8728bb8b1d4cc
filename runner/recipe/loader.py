"""From a file to a validated recipe: over what it extends, under the command line, all that is wrong said at once."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import reduce
from importlib import resources
from pathlib import Path
from typing import Any

from runner.recipe.catalog import Catalog, Section
from runner.recipe.constraints import conflicts
from runner.recipe.document import DEFAULT, Node, Place, Problem, RecipeError, dump_inline, parse, read
from runner.recipe.fill import face_of, fill, lr_scheduler, plugin_section, secrets_of, stages
from runner.recipe.optimizers import optimizers
from runner.recipe.recipe import Recipe, flatten
from runner.recipe.sections import Head, TrackingConfig, TrainConfig
from runner.system.names import nearest, shown_path, suggestion
from runner.system.secrets import MASK, register

SECTIONS = ("extends", "model", "data", "optimizer", "lr_scheduler", "train", "optimization", "tracking")
"""The keys of a recipe beside those of ``Head``."""
SUFFIX = ".yaml"


def load(reference: str | Path, sets: Sequence[str], catalog: Catalog) -> Recipe:
    """Reads, merges and validates a recipe.

    Args:
        reference: a file (a recipe, or the ``recipe.lock.yaml`` of a run), or the bare name of a recipe that ships.
        sets: assignments ``a.b.c=VALUE`` that override the file, the last one winning.
        catalog: the plugins that the recipe may name.

    Raises:
        RecipeError: everything that is wrong with it, each at its line.
    """
    path = find(reference)
    problems: list[Problem] = []
    found = layers(path, sets, problems)
    recipe = _validated(path, compose(found), catalog, problems)
    for leaf in (leaf for layer in found for leaf in secrets_of(recipe, layer)):
        register(str(leaf.value))  # also what another layer has replaced: a patch, or a study's file, may quote it
    return recipe


def from_values(values: Mapping[str, Any], path: str, origins: Mapping[str, Place], catalog: Catalog) -> Recipe:
    """A recipe that another process has loaded and given to this one.

    The values are with secrets, and the path is of the file that it was loaded from, which is not read.

    Raises:
        RecipeError: it is not valid here, for example because a plugin is missing.
    """
    problems: list[Problem] = []
    root = parse(json.dumps(values, ensure_ascii=False), path, problems)
    return replace(_validated(Path(path), root, catalog, problems), origins=origins)


def secret_assignments(recipe: Recipe) -> list[str]:
    """What ``--set`` has to say for a lock of this recipe to be whole again; for this process alone."""
    pairs = zip(flatten(recipe.values(masked=False)), flatten(recipe.values()), strict=True)
    return [f"{path}={dump_inline(clear)}" for (path, clear), (_, masked) in pairs if clear != masked]


def _validated(path: Path, composed: Node, catalog: Catalog, problems: list[Problem]) -> Recipe:
    root = replace(composed, place=Place(path))
    problems += _lost(root)
    assert isinstance(root.value, dict)
    rest = replace(root, value={key: node for key, node in root.value.items() if key not in SECTIONS})
    left_out = replace(root, value={})
    head = fill(Head, rest, "", problems, others=SECTIONS)
    model = plugin_section(root, "model", catalog, problems)
    data = plugin_section(root, "data", catalog, problems)
    train = fill(TrainConfig, root.get("train") or left_out, "train", problems)
    tracking = fill(TrackingConfig, root.get("tracking") or left_out, "tracking", problems)
    optimizer = optimizers(root, model, problems)
    schedule = lr_scheduler(root, problems)
    on, switched = stages(root, catalog, problems)
    problems += conflicts(root, model, data, train, on, switched)
    if problems:
        raise RecipeError([_where_it_is_now(problem, root, catalog) for problem in problems])
    assert head is not None  # or there would be a problem
    assert train is not None
    assert tracking is not None
    off = tuple(kind for kind, is_on in switched.items() if not is_on)
    recipe = Recipe(
        path, **head.model_dump(), model=model, data=data, optimizer=optimizer, lr_scheduler=schedule, train=train,
        tracking=tracking, stages=on, off=off, origins={},
    )  # fmt: skip
    recipe.values(masked=False)  # makes known what no file holds: a plugin's default may come from the environment
    origins = {}
    for written, value in (*((f"optimization.{kind}", None) for kind in switched), *flatten(recipe.values())):
        node = root.get(*written.split("."))
        place = DEFAULT if node is None else node.place
        origins[written] = replace(place, text="") if MASK in str(value) else place  # a text would hold the value
    return replace(recipe, origins=origins)


def _where_it_is_now(problem: Problem, root: Node, catalog: Catalog) -> Problem:
    """An unknown key that a plugin of the recipe says has moved, with the place where it is now."""
    sections: tuple[Section, ...] = ("model", "data")
    for section in sections:
        kind = root.get(section, "kind")
        face = face_of(catalog, section, str(kind.value)) if kind is not None else None
        if face is not None and problem.path in face.moved and problem.message.startswith("unknown key"):
            return replace(problem, message=f"unknown key - it is now {face.moved[problem.path]}")
    return problem


def _lost(node: Node, path: str = "") -> Iterator[Problem]:
    """Everything that was masked when it was written, and so is no value."""
    if isinstance(node.value, dict):
        for key, child in node.value.items():
            yield from _lost(child, f"{path}.{key}" if path else key)
    for child in node.items():
        yield from _lost(child, path)
    if isinstance(node.value, str) and MASK in node.value:
        yield node.problem(path, f"a secret is not kept in a run's files; give it again: --set {path}=VALUE")


def shipped() -> dict[str, Path]:
    """The recipes that ship with the runner, by bare name."""
    folder = Path(str(resources.files("runner.recipes")))
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def find(reference: str | Path) -> Path:
    """The file that a command line means: a path, or the bare name of a recipe that ships.

    Raises:
        RecipeError: there is no such recipe; the nearest name is in the message.
    """
    path, name = Path(reference), str(reference)
    found = _file(Path(), name)
    if found is not None or os.path.exists(path):
        return found or path  # a folder or a pipe: reading it tells
    if name == path.name:
        hint = suggestion(name.removesuffix(SUFFIX), shipped())
        raise RecipeError([Problem(Place(name), "", f"no such file, and no recipe of that name ships{hint}")])
    folder = path.absolute().parent
    known = [shown_path(sibling) for sibling in folder.glob(f"*{SUFFIX}")] if os.path.isdir(folder) else []
    near = nearest(shown_path(path), known)
    raise RecipeError([Problem(Place(path), "", "no such file" + (f" - did you mean '{near}'?" if near else ""))])


def _file(folder: Path, reference: str) -> Path | None:
    """The file that is meant, seen from a folder; or the recipe of that name that ships."""
    if os.path.isfile(folder / reference):  # unlike Path.is_file, it takes a name that is too long
        return folder / reference
    is_bare = reference == Path(reference).name
    return shipped().get(reference.removesuffix(SUFFIX)) if is_bare else None


def is_lock(path: Path) -> bool:
    """Whether a file is the lock of a run, told by its name: the recipe stands in it under ``recipe``."""
    return path.name.endswith(f".lock{SUFFIX}")


def layers(path: Path, sets: Sequence[str], problems: list[Problem]) -> list[Node]:
    """What a recipe is laid together from: what its file extends, the lowest first, the file, and each assignment.

    Raises:
        RecipeError: a file or an assignment cannot be read, or ``extends`` runs in a circle.
    """
    files: list[Node] = []
    chain: list[Path] = []
    while not is_lock(path):
        root = read(path, problems)
        assert isinstance(root.value, dict)
        extends = root.value.pop("extends", None)
        files.append(root)
        if extends is None:
            break
        chain.append(path.resolve())
        path = _parent(extends, path, problems)
        if path.resolve() in chain:
            circle = " -> ".join(link.name for link in (*chain, path))
            raise RecipeError([*problems, extends.problem("extends", f"runs in a circle: {circle}")])
    else:
        root = read(path, problems)
        recipe, origins = root.get("recipe"), root.plain().get("origins")
        if recipe is None or not isinstance(recipe.value, dict):
            raise RecipeError([Problem(Place(path), "recipe", "is missing: this is not a lock file")])
        places = origins if isinstance(origins, dict) else {}
        unwritten = {name for name, place in places.items() if place == DEFAULT.source}
        files.append(_without_masks(recipe, unwritten, ""))
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


def _parent(extends: Node, path: Path, problems: list[Problem]) -> Path:
    name = extends.value
    if not isinstance(name, str) or not name:
        message = "should be the path of a recipe, or the name of one that ships"
        raise RecipeError([*problems, extends.problem("extends", message)])
    found = _file(path.parent, name)
    if found is None:
        known = {sibling.name for sibling in path.parent.glob(f"*{SUFFIX}")} - {path.name} | set(shipped())
        message = f"no such recipe: '{name}'{suggestion(name, known)}"
        raise RecipeError([*problems, extends.problem("extends", message)])
    return found


def _without_masks(node: Node, defaults: Set[str], path: str) -> Node:
    """Leaves out the secrets that nobody wrote: a plugin finds them again where it found them (the environment)."""
    if not isinstance(node.value, dict):
        return node
    children = {key: _without_masks(child, defaults, f"{path}{key}.") for key, child in node.value.items()}
    kept = {key: child for key, child in children.items() if child.value != MASK or f"{path}{key}" not in defaults}
    return replace(node, value=kept)


def _assignment(number: int, text: str, problems: list[Problem]) -> Node:
    source = f"--set #{number}"
    dotted, equals, value = text.partition("=")
    keys = dotted.split(".")
    is_path = bool(equals) and all(keys) and dotted == "".join(dotted.split())
    if not is_path or keys[0] == "extends":
        message = "extends can only stand in a file" if is_path else "should be a.b.c=VALUE"
        raise RecipeError([*problems, Problem(Place(source, 1, 1, text), "", message)])
    # Blanks in place of the path keep the columns of the value.
    node = parse(" " * (len(dotted) + 1) + value, source, problems, shown=text)
    column = len(dotted) + 1
    for key in reversed(keys):
        column -= len(key) + 1
        place = Place(source, 1, column + 1, text)
        node = Node({key: replace(node, key=place)}, place)
    return node
