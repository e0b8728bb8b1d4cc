"""Loads a recipe: the file, the files that it extends and the assignments of the command line; all
mistakes are reported together.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from importlib import resources
from pathlib import Path
from typing import Any

from runner.plugin.registry import SECTIONS, Registry
from runner.plugin.tuning import Setup
from runner.recipe.document import (
    DEFAULT,
    MAPPING,
    OVERRIDE,
    SUFFIXES,
    LockError,
    Node,
    Place,
    Problem,
    RecipeError,
    dump_inline,
    has_suffix,
    is_lock,
    parse,
    read,
)
from runner.recipe.fill import Model, face_of, fill, optimizers, plugin_section, secrets_of, stages
from runner.recipe.mapping import node_of
from runner.recipe.recipe import Head, Recipe, TrainConfig, conflicts, flatten
from runner.recipe.tuning import locked_tuning
from runner.system.errors import UsageError
from runner.system.names import nearest, shown_path, suggestion
from runner.system.secrets import MASK, REFUSED_NAME, has_secret, redact, register

PARTS = ("extends", "model", "data", "optimizer", "train", "optimization", "inference")
"""The keys of a recipe without those of ``Head``."""
SUFFIX = ".yaml"
NAMES = ("name", "tracking.experiment")
"""Settings that become names of folders, runs and experiments."""
VERBS = {"ablation": "runner ablate", "study": "runner study run"}
"""Commands for files of other types than recipes."""


def load(reference: str | Path | Mapping[str, Any], sets: Sequence[str | Node], catalog: Registry) -> Recipe:
    """Reads, merges and validates a recipe; a ``RecipeError`` lists all mistakes with their lines.

    The reference is a file (a recipe, or the ``recipe.lock.yaml`` of a run), or the bare name of a
    recipe that ships. Assignments ``a.b.c=VALUE`` override its values, and the last one wins; the
    assignments of an experiment's file are nodes with their places, and precede the others. A
    program may pass a mapping with the structure of a file.
    """
    problems: list[Problem] = []
    if isinstance(reference, Mapping):
        path = Path(MAPPING)
        found = layers(path, sets, problems, node_of(reference, problems))
    else:
        path = find(_reference(reference))
        found = layers(path, sets, problems)
    composed = reduce(merge, found)
    recipe = _validated(path, composed, catalog, problems)
    if is_lock(path):
        recipe = replace(recipe, tuning=locked_tuning(read(path, problems), recipe))
    # Also what another layer has replaced: a patch, or a study's file, may quote it.
    register(*(str(leaf.value) for layer in found for leaf in secrets_of(recipe, layer)))
    if names := list(_names_with_secrets(composed)):
        raise RecipeError(names)
    return recipe


def _names_with_secrets(root: Node, above: str = "") -> Iterator[Problem]:
    """Problems about all keys that contain a secret, and about values that become the name of something."""
    for key, child in root.children.items():
        path = f"{above}.{key}" if above else str(key)
        if has_secret(str(key)) or (path in NAMES and has_secret(str(child.value))):
            yield Problem(child.anchor, redact(path), REFUSED_NAME)
        yield from _names_with_secrets(child, path)


def _reference(reference: Any) -> str | Path:
    """Returns what can be the name of a recipe; raises a UsageError about anything else."""
    if not isinstance(reference, str | Path):
        kind = type(reference).__name__
        expected = "a file, the name of a recipe that ships, or a mapping in the form of a file"
        raise UsageError(f"recipe: {reference!r:.60} is of type {kind}; should be {expected}")
    if "\n" in str(reference):
        raise UsageError("recipe: got a text of several lines; pass it as a mapping: yaml.safe_load(TEXT)")
    return reference


def load_named(name: Node, sets: Sequence[str | Node], catalog: Registry) -> Recipe:
    """The recipe that an experiment's file names: seen from its folder, or else as on a command line; as ``load``."""
    folder = Path(name.place.source).parent
    folder = folder if (folder / str(name.value)).is_file() else Path()
    return load(_found(name, "recipe", folder, ()), sets, catalog)


def fill_experiment(model: type[Model], kind: str, what: str, root: Node, problems: list[Problem]) -> Model:
    """An experiment's settings, from a file of its kind; one of another cannot be ``what``, for example ``ablated``."""
    given = root.get("kind")
    if given is None and root.children.keys() & PARTS:
        message = f"is missing: this is a recipe, which is trained by: runner run {shown_path(Path(root.place.source))}"
        raise RecipeError([Problem(root.place, "kind", message)])
    if given is not None and given.value != kind:
        message = f"{given.shown} cannot be {what}; should be '{kind}'{_taken_by(given)}"
        raise RecipeError([Problem(given.place, "kind", message)])
    filled = fill(model, root, "", problems)
    problems += _names_with_secrets(root)
    if filled is None or problems:
        raise RecipeError(problems)
    return filled


def _taken_by(kind: Node) -> str:
    """The end of a message about a file of another kind: the command that takes it, if there is one."""
    verb = VERBS.get(str(kind.value))
    return f"; a file of that kind is for: {verb} {shown_path(Path(kind.place.source))}" if verb else ""


def from_values(
    values: Mapping[str, Any], path: str, origins: Mapping[str, Place], catalog: Registry, tuning: Setup | None = None
) -> Recipe:
    """Creates the recipe that another process has loaded and sent; raises a ``RecipeError`` if a
    plugin is missing in this process.

    The values are with secrets, and the path is of the file that it was loaded from, which is not read.
    """
    problems: list[Problem] = []
    root = parse(json.dumps(values, ensure_ascii=False), path, problems)
    return replace(_validated(Path(path), root, catalog, problems), origins=origins, tuning=tuning)


def assignments(values: Mapping[str, Any]) -> list[str]:
    """Converts settings by dotted path to assignments for ``--set``; raises a UsageError if they
    are not a mapping.
    """
    if not isinstance(values, Mapping):
        raise UsageError(f"settings should be values by dotted path, as {{'train.epochs': 2}}, got {values!r:.80}")
    return [f"{path}={dump_inline(value)}" for path, value in values.items()]


def secret_assignments(recipe: Recipe) -> list[str]:
    """Returns assignments that restore masked secrets of a lock, for this process only."""
    pairs = zip(flatten(recipe.values(masked=False)), flatten(recipe.values()), strict=True)
    return assignments({path: clear for (path, clear), (_, masked) in pairs if clear != masked})


def _validated(path: Path, composed: Node, catalog: Registry, problems: list[Problem]) -> Recipe:
    root = replace(composed, place=Place(path))
    for name in (name for name, value in flatten(root.plain()) if MASK in str(value)):
        message = f"a secret is not kept in a run's files; give it again: --set {name}=VALUE"
        problems.append(Problem(root.asked(name), name, message))
    own = replace(root, value={key: node for key, node in root.children.items() if key not in PARTS})
    head = fill(Head, own, "", problems, others=PARTS)
    train = fill(TrainConfig, root.get("train") or replace(root, value={}), "train", problems)
    model = plugin_section(root, "model", catalog, problems)
    data = plugin_section(root, "data", catalog, problems)
    optimizer = optimizers(root, model, catalog, problems)
    switched, answering = (stages(root, section, catalog, problems) for section in ("optimization", "inference"))
    problems += conflicts(root, model, data, train, {"optimization": switched, "inference": answering})
    if problems or head is None or train is None:
        kinds = [(section, kind) for section in SECTIONS if (kind := root.get(section, "kind")) is not None]
        faces = [face_of(catalog, section, str(kind.value)) for section, kind in kinds]
        moved = {old: new for face in faces if face is not None for old, new in face.moved.items()}
        now = {old: f"unknown key - it is now {new}" for old, new in moved.items()}
        raise RecipeError([replace(each, message=now.get(each.path, each.message)) for each in problems])
    on = {kind: stage for kind, stage in switched.items() if stage is not None}
    named = root.get("optimization") or replace(root, value={})
    off = tuple(kind for kind in named.children if kind not in on)
    recipe = Recipe(
        path, **dict(head), train=train, model=model, data=data, optimizer=optimizer, stages=on, off=off,
        inference={kind: stage for kind, stage in answering.items() if stage is not None}, origins={},
    )  # fmt: skip
    recipe.values(masked=False)  # makes known what no file holds: a plugin's default may come from the environment
    origins = {}
    for written, value in (*((f"optimization.{kind}", None) for kind in named.children), *flatten(recipe.values())):
        node = root.get(*written.split("."))
        place = DEFAULT if node is None else node.place
        origins[written] = replace(place, text="") if MASK in str(value) else place  # a text would hold the value
    return replace(recipe, origins=origins)


def shipped() -> dict[str, Path]:
    """The recipes that ship with the runner, by bare name."""
    folder = Path(str(resources.files("runner.recipes")))
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def find(reference: str | Path, folder: Path = Path()) -> Path:
    """The file that is meant, seen from a folder: a path, or the bare name of a recipe that ships; or an error."""
    path, name = folder / reference, str(reference)
    is_bare = name == Path(name).name
    ships = shipped() if is_bare else {}
    # Unlike Path.is_file, os.path accepts a name that is too long. Folders and pipes pass here, and
    # are refused when they are read.
    if not os.path.isfile(path) and name.removesuffix(SUFFIX) in ships:
        return ships[name.removesuffix(SUFFIX)]
    if os.path.exists(path):
        return path
    beside = path.parent.glob(f"*{SUFFIX}") if os.path.isdir(path.parent) else ()
    known = {stem: stem for stem in ships} | {each.stem: each.name for each in beside}
    message = "no such file, and no recipe of that name ships" if is_bare else "no such file"
    hint = suggestion(path.stem, ships) if is_bare else ""
    if near := nearest(path.stem, known):
        hint = f" - did you mean '{Path(name).with_name(known[near])}'?"
    raise RecipeError([Problem(Place(path), "", message + hint)])


def layers(path: Path, sets: Sequence[str | Node], problems: list[Problem], mapping: Node | None = None) -> list[Node]:
    """Returns what a recipe is made from: what its file extends, the lowest first, the file, and each assignment.

    A ``mapping`` takes the place of the file.
    """
    files: list[Node] = []
    chain: list[Path] = []
    while not is_lock(path):
        # A file that another one names may be anything; only the one on the command line is quoted whatever it holds.
        root = mapping if mapping is not None and not chain else read(path, problems, quotes=not chain)
        if (kind := root.get("kind")) is not None and (taken := _taken_by(kind)):
            raise RecipeError([Problem(kind.place, "kind", f"{kind.shown} is not a recipe{taken}")])
        rest = dict(root.children)
        extends = rest.pop("extends", None)
        files.append(replace(root, value=rest))
        if extends is None:
            break
        if not isinstance(extends.value, str) or not extends.value:
            message = "should be the path of a recipe, or the name of one that ships"
            raise RecipeError([*problems, Problem(extends.place, "extends", message)])
        chain.append(path.resolve())
        path = _found(extends, "extends", path.parent, problems)
        if path.resolve() in chain:
            circle = " -> ".join(link.name for link in (*chain, path))
            raise RecipeError([*problems, Problem(extends.place, "extends", f"runs in a circle: {circle}")])
    else:
        files.append(_locked(read(path, problems)))
    return [*reversed(files), *(_assignment(override, problems) for override in sets)]


def _found(name: Node, key: str, folder: Path, problems: Sequence[Problem]) -> Path:
    """Returns the file of ``find``; raises a RecipeError with the place of the name if there is no
    such recipe file.
    """
    try:
        found = find(str(name.value), folder)
        wrong = "" if os.path.isfile(found) else "is not a file"
        if not wrong and not has_suffix(found):
            wrong = f"is not a recipe: names of recipe files end in {' or '.join(SUFFIXES)}"
    except RecipeError as error:
        found, wrong = folder, error.problems[0].message
    if wrong:
        raise RecipeError([*problems, Problem(name.place, key, f"{name.shown}: {wrong}")])
    return found


def _locked(root: Node) -> Node:
    """Returns the recipe of a lock without masked secrets that were defaults: a plugin reads them
    again, for example from the environment.
    """
    recipe, origins = root.get("recipe"), root.get("origins")
    if recipe is None or not isinstance(recipe.value, dict):
        raise LockError([Problem(root.place, "recipe", "is missing: this is not a lock file")])
    for name, place in origins.children.items() if origins is not None else ():
        *above, key = name.split(".")
        section = recipe.get(*above)
        values = None if section is None else section.value
        if place.value == DEFAULT.source and isinstance(values, dict) and key in values and values[key].value == MASK:
            del values[key]
    return recipe


def merge(base: Node, over: Node) -> Node:
    """Lays one value over another: mappings merge key by key, everything else replaces.

    Where a mapping names another ``kind`` than the one below it, the inherited keys are marked as
    leftovers: those that the new kind does not have belonged to the previous kind.
    """
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    old, new = base.get("kind"), over.get("kind")
    changed = old is not None and new is not None and old.value != new.value
    children = {key: replace(node, leftover=node.leftover or changed) for key, node in base.value.items()}
    for key, node in over.value.items():
        children[key] = merge(children[key], node) if key in children else node
    # The place is that of the first definition, except for a section whose kind changed.
    section = over if changed else base
    return replace(section, value=children, leftover=False)


def _assignment(given: str | Node, problems: list[Problem]) -> Node:
    """Parses an assignment into a node with its place: an override, or a line of a file."""
    text = str(given.value) if isinstance(given, Node) else given
    at = Place(OVERRIDE, 1, 1, text)
    if isinstance(given, Node):
        at = replace(given.place, column=given.place.column + (given.spelled[:1] in ("'", '"')))
    dotted, equals, value = text.partition("=")
    keys = dotted.split(".")
    is_path = bool(equals) and all(keys) and dotted == "".join(dotted.split())
    if not is_path or keys[0] == "extends":
        message = "extends is only valid in a file" if is_path else "should be a.b.c=VALUE"
        raise RecipeError([*problems, Problem(at, "", message)])
    # Blanks in place of all that is before the value keep its line and columns.
    above, column = "\n" * (at.line - 1), at.column + len(dotted) + 1
    node = parse(above + " " * (column - 1) + value, at.source, problems, shown=above + at.text)
    for key in reversed(keys):
        column -= len(key) + 1
        place = replace(at, column=column)
        node = Node({key: replace(node, key=place)}, place)
    return node
