"""Loads a recipe: the file, the files that it extends and the assignments of the command line; all
mistakes are reported together.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from importlib import resources
from pathlib import Path
from typing import Any

from runner.plugin.lr_scheduler import ConstantConfig
from runner.plugin.progress import UNITS
from runner.plugin.registry import SECTIONS, Registry
from runner.plugin.tuning import Setup
from runner.recipe.contradictions import conflicts
from runner.recipe.dumping import dump_inline
from runner.recipe.environment import with_environment
from runner.recipe.mapping import node_of
from runner.recipe.optimizers import optimizers
from runner.recipe.parameter_groups import group_origins, with_patterns
from runner.recipe.plain_nodes import plain_node
from runner.recipe.recipe import MLFLOW, Head, Recipe, TrainConfig, flatten
from runner.recipe.stored_values import changing_values
from runner.recipe.tuning import locked_tuning
from runner.recipe.validation import (
    Model,
    face_of,
    fill,
    plugin_section,
    secrets_of,
    stages,
)
from runner.recipe.yaml_nodes import (
    DEFAULT,
    MAPPING,
    OVERRIDE,
    SUFFIXES,
    LockError,
    Node,
    Place,
    Problem,
    RecipeError,
    has_suffix,
    is_lock,
    parse,
    read,
)
from runner.system.errors import UsageError
from runner.system.secrets import MASK, REFUSED_NAME, has_secret, redact, register
from runner.system.suggestions import nearest, shown_path, suggestion

PARTS = (
    "extends", "model", "data", "optimizer", "lr_scheduler", "train", "optimization", "inference",
    "callbacks",
)  # fmt: skip
"""The keys of a recipe without those of ``Head``."""
SUFFIX = ".yaml"
NAMES = ("name", "tracking.experiment")
"""Settings that become names of folders, runs and experiments."""
VERBS = {"ablation": "runner ablate", "study": "runner study run"}
"""Commands for files of other types than recipes."""


def load(
    reference: str | Path | Mapping[str, Any],
    sets: Sequence[str | Node],
    catalog: Registry,
) -> Recipe:
    """Reads, merges and validates a recipe; a ``RecipeError`` lists all mistakes with their lines.

    The reference is a file (a recipe, or the ``recipe.lock.yaml`` of a run), or the bare name of a
    recipe that ships. Assignments ``a.b.c=VALUE`` override its values, and the last one wins; the
    assignments of an experiment's file are nodes with their places, and precede the others. A
    program may pass a mapping with the structure of a file.
    """
    problems: list[Problem] = []
    if isinstance(reference, Mapping):
        path = Path(MAPPING)
        all_layers = layers(path, sets, problems, node_of(reference, problems))
    else:
        path = find(_reference(reference))
        all_layers = layers(path, sets, problems)
    composed = reduce(merge, all_layers)
    recipe = _validated(path, composed, catalog, problems)
    if is_lock(path):
        recipe = replace(recipe, tuning=locked_tuning(read(path, problems), recipe))
    # Also what another layer has replaced: a patch, or a study's file, may quote it.
    secret_leaves = [leaf for layer in all_layers for leaf in secrets_of(recipe, layer)]
    register(*(str(leaf.value) for leaf in secret_leaves))
    refused_names = list(_names_with_secrets(composed))
    if refused_names:
        raise RecipeError(refused_names)
    return recipe


def _names_with_secrets(root: Node, section: str = "") -> Iterator[Problem]:
    """Problems about all keys that contain a secret, and about values that become the name of
    something.
    """
    for key, child in root.children.items():
        path = f"{section}.{key}" if section else str(key)
        is_secret_name = path in NAMES and has_secret(str(child.value))
        if has_secret(str(key)) or is_secret_name:
            yield Problem(child.anchor, redact(path), REFUSED_NAME)
        yield from _names_with_secrets(child, path)


def _reference(reference: Any) -> str | Path:
    """Returns what can be the name of a recipe; raises a UsageError about anything else."""
    if not isinstance(reference, str | Path):
        kind = type(reference).__name__
        expected = "a file, the name of a recipe that ships, or a mapping in the form of a file"
        raise UsageError(
            f"recipe: {reference!r:.60} is of type {kind}; should be {expected}"
        )
    if "\n" in str(reference):
        raise UsageError(
            "recipe: got a text of several lines; pass it as a mapping: yaml.safe_load(TEXT)"
        )
    return reference


def load_named(name: Node, sets: Sequence[str | Node], catalog: Registry) -> Recipe:
    """The recipe that an experiment's file names: seen from its folder, or else as on a command
    line; as ``load``.
    """
    folder = Path(name.place.source).parent
    if not (folder / str(name.value)).is_file():
        folder = Path()
    path = _find_named(name, "recipe", folder, ())
    return load(path, sets, catalog)


def fill_experiment(
    model: type[Model], kind: str, what: str, root: Node, problems: list[Problem]
) -> Model:
    """An experiment's settings, from a file of its kind; one of another cannot be ``what``, for
    example ``ablated``.
    """
    kind_node = root.get("kind")
    if kind_node is None and root.children.keys() & PARTS:
        path = shown_path(Path(root.place.source))
        message = (
            f"is missing: this is a recipe, which is trained by: runner run {path}"
        )
        raise RecipeError([Problem(root.place, "kind", message)])
    if kind_node is not None and kind_node.value != kind:
        hint = _command_hint(kind_node)
        message = f"{kind_node.shown} cannot be {what}; should be '{kind}'{hint}"
        raise RecipeError([Problem(kind_node.place, "kind", message)])
    filled = fill(model, root, "", problems)
    problems += _names_with_secrets(root)
    if filled is None or problems:
        raise RecipeError(problems)
    return filled


def _command_hint(kind: Node) -> str:
    """The end of a message about a file of another kind: the command that takes it, if there is
    one.
    """
    verb = VERBS.get(str(kind.value))
    if not verb:
        return ""
    path = shown_path(Path(kind.place.source))
    return f"; a file of that kind is for: {verb} {path}"


def from_values(
    values: Mapping[str, Any],
    path: str,
    origins: Mapping[str, Place],
    catalog: Registry,
    tuning: Setup | None = None,
) -> Recipe:
    """Creates the recipe that another process has loaded and sent; raises a ``RecipeError`` if a
    plugin is missing in this process.

    The values are with secrets, and the path is of the file that it was loaded from, which is not
    read.
    """
    problems: list[Problem] = []
    root = plain_node(values, Place(path))
    recipe = _validated(Path(path), with_patterns(root), catalog, problems)
    return replace(recipe, origins=origins, tuning=tuning)


def assignments(values: Mapping[str, Any]) -> list[str]:
    """Converts settings by dotted path to assignments for ``--set``; raises a UsageError if they
    are not a mapping.
    """
    if not isinstance(values, Mapping):
        raise UsageError(
            "settings should be values by dotted path, as {'train.epochs': 2}, "
            f"got {values!r:.80}"
        )
    return [f"{path}={dump_inline(value)}" for path, value in values.items()]


def secret_assignments(recipe: Recipe) -> list[str]:
    """Returns assignments that restore masked secrets of a lock, for this process only."""
    clear_values = flatten(recipe.values(masked=False))
    # Pairs in order, because masking may change a path as well.
    pairs = zip(clear_values, flatten(recipe.values()), strict=True)
    secrets = {
        path: clear for (path, clear), (_, masked) in pairs if MASK in str(masked)
    }
    return assignments(secrets)


def _validated(
    path: Path, composed: Node, catalog: Registry, problems: list[Problem]
) -> Recipe:
    root = replace(composed, place=Place(path))
    # A value that could not be read, such as that of an unset variable, is not validated.
    unread = {problem.place for problem in problems}
    read_problems = problems
    problems = []
    problems += _masked_secrets(root)

    head_keys = {key: node for key, node in root.children.items() if key not in PARTS}
    head = fill(Head, replace(root, value=head_keys), "", problems, others=PARTS)
    train_node = root.get("train") or replace(root, value={})
    uncounted = _uncounted_units(root, catalog)
    train = fill(TrainConfig, train_node, "train", problems, useless=uncounted)
    model = plugin_section(root, "model", catalog, problems)
    data = plugin_section(root, "data", catalog, problems)
    optimizer = optimizers(root, model, catalog, problems)
    schedule: Any = ConstantConfig()
    if root.get("lr_scheduler") is not None:
        schedule = plugin_section(root, "lr_scheduler", catalog, problems)
    optimization = stages(root, "optimization", catalog, problems, model)
    inference = stages(root, "inference", catalog, problems, model)
    callbacks = stages(root, "callbacks", catalog, problems)
    problems += conflicts(
        root,
        model,
        data,
        train,
        {"optimization": optimization, "inference": inference},
        schedule,
    )
    problems += _of_tracking(root, data, train, catalog)
    problems = [problem for problem in problems if problem.place not in unread]
    problems = [*read_problems, *problems]
    if problems or head is None or train is None or schedule is None:
        raise RecipeError(_with_moved_settings(problems, root, catalog))

    stages_on = {
        kind: stage for kind, stage in optimization.items() if stage is not None
    }
    named_stages = (root.get("optimization") or replace(root, value={})).children
    recipe = Recipe(
        path,
        **dict(head),
        train=train,
        model=model,
        data=data,
        optimizer=optimizer,
        lr_scheduler=schedule,
        stages=stages_on,
        off=tuple(kind for kind in named_stages if kind not in stages_on),
        inference={
            kind: stage for kind, stage in inference.items() if stage is not None
        },
        callbacks={kind: callback for kind, callback in callbacks.items() if callback},
        origins={},
    )
    # This registers secrets that no file holds: a plugin's default may come from the environment.
    recipe.values(masked=False)
    changing = list(changing_values(recipe, root))
    if changing:
        raise RecipeError(changing)
    stage_paths = dict.fromkeys(
        [
            *(f"optimization.{kind}" for kind in named_stages),
            *(f"callbacks.{kind}" for kind in recipe.callbacks),
        ]
    )
    return replace(
        recipe,
        origins={
            **_origins(root, {**stage_paths, **dict(flatten(recipe.values()))}),
            **group_origins(root),
        },
    )


def _uncounted_units(root: Node, catalog: Registry) -> dict[str, str]:
    """Returns the units that the data of a recipe do not count, with a hint at those that they
    count.
    """
    kind = root.get("data", "kind")
    face = None if kind is None else face_of(catalog, "data", str(kind.value))
    if face is None:
        return {}
    counted = [unit for unit in UNITS if unit in face.units]
    settings = ", ".join(f"train.{unit}" for unit in counted)
    hint = f" - set the length of a training on '{face.kind}' by one of {settings}"
    return {unit: hint for unit in UNITS if unit not in counted}


def _of_tracking(
    root: Node, data: Any, train: TrainConfig | None, catalog: Registry
) -> Iterator[Problem]:
    """Problems about sinks that no plugin has, and pictures that the source does not draw."""
    every = root.get("tracking", "render_every")
    if every is not None and every.value is not None and data and not data.pictures:
        message = f"'{data.kind}' has no picture of its evaluation to draw"
        yield Problem(every.anchor, "tracking.render_every", message)
    # The last evaluation alone is drawn only with 1.
    is_rare = every is not None and isinstance(every.value, int) and every.value > 1
    if is_rare and train is not None and train.evaluate_every is None:
        message = "there is only one evaluation, the last: set train.evaluate_every, or 1 here"
        yield Problem(
            root.asked("tracking.render_every"), "tracking.render_every", message
        )
    for sink in root.items("tracking", "sinks"):
        known = [MLFLOW, *catalog.sinks]
        if isinstance(sink.value, str) and sink.value not in known:
            hint = suggestion(sink.value, known)
            message = f"unknown sink '{sink.value}'{hint}"
            yield Problem(sink.anchor, "tracking.sinks", message)


def _masked_secrets(root: Node) -> Iterator[Problem]:
    """Problems about secrets that a run's files contain in masked form only."""
    for name, value in flatten(root.plain()):
        if MASK in str(value):
            message = f"a secret is not kept in a run's files; give it again: --set {name}=VALUE"
            yield Problem(root.asked(name), name, message)


def _with_moved_settings(
    problems: Sequence[Problem], root: Node, catalog: Registry
) -> list[Problem]:
    """Returns the problems; those about a setting that has a new name mention it."""
    messages: dict[str, str] = {}
    for section in SECTIONS:
        kind = root.get(section, "kind")
        face = None if kind is None else face_of(catalog, section, str(kind.value))
        if face is not None:
            messages |= {
                old: f"unknown key - it is now {new}" for old, new in face.moved.items()
            }
    return [
        replace(problem, message=messages.get(problem.path, problem.message))
        for problem in problems
    ]


def _origins(root: Node, values: Mapping[str, Any]) -> dict[str, Place]:
    """Returns where each of these values was written, by dotted path."""
    origins = {}
    for path, value in values.items():
        node = root.get(*path.split("."))
        origin = DEFAULT if node is None else node.place
        # The text of the line would contain the secret.
        origins[path] = replace(origin, text="") if MASK in str(value) else origin
    return origins


def shipped() -> dict[str, Path]:
    """The recipes that ship with the runner, by bare name."""
    folder = Path(str(resources.files("runner.recipes")))
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def find(reference: str | Path, folder: Path = Path()) -> Path:
    """The file that is meant, seen from a folder: a path, or the bare name of a recipe that ships;
    or an error.
    """
    path = folder / reference
    name = str(reference)
    is_bare = name == Path(name).name
    ships = shipped() if is_bare else {}
    # Unlike Path.is_file, os.path accepts a name that is too long. Folders and pipes pass here, and
    # are refused when they are read.
    if not os.path.isfile(path) and name.removesuffix(SUFFIX) in ships:
        return ships[name.removesuffix(SUFFIX)]
    if os.path.exists(path):
        return path

    message = (
        "no such file, and no recipe of that name ships" if is_bare else "no such file"
    )
    hint = suggestion(path.stem, ships) if is_bare else ""
    files = path.parent.glob(f"*{SUFFIX}") if os.path.isdir(path.parent) else ()
    candidates = {stem: stem for stem in ships} | {
        file.stem: file.name for file in files
    }
    similar = nearest(path.stem, candidates)
    if similar:
        hint = f" - did you mean '{Path(name).with_name(candidates[similar])}'?"
    raise RecipeError([Problem(Place(path), "", message + hint)])


def layers(
    path: Path,
    sets: Sequence[str | Node],
    problems: list[Problem],
    mapping: Node | None = None,
) -> list[Node]:
    """Returns what a recipe is made from: what its file extends, the lowest first, the file, and
    each assignment.

    A ``mapping`` takes the place of the file.
    """
    files: list[Node] = []
    _add_layers(path, mapping, (), set(), files, problems)
    overrides = [_assignment(override, problems) for override in sets]
    values = [with_environment(override, problems) for override in overrides]
    return [with_patterns(layer) for layer in (*files, *values)]


def _add_layers(
    path: Path,
    mapping: Node | None,
    chain: tuple[Path, ...],
    included: set[Path],
    files: list[Node],
    problems: list[Problem],
) -> None:
    """Adds what a file extends, the lowest first, and the file itself.

    Args:
        path: The file.
        mapping: Takes the place of the file, if given.
        chain: The files that lead to this one.
        included: Files that were added; each is added once, where it is reached first.
        files: Receives the layers.
        problems: Receives mistakes.
    """
    if is_lock(path):
        files.append(_locked(read(path, problems)))
        return
    root = mapping
    if root is None:
        # A file that another one names may be anything; only the first is quoted whatever it holds.
        root = read(path, problems, quotes=not chain)
    _refuse_experiment(root)
    root = with_environment(root, problems)
    children = dict(root.children)
    extends = children.pop("extends", None)
    longer_chain = (*chain, path.resolve())
    for name in _extended(extends, problems):
        base = _find_named(name, "extends", path.parent, problems)
        if base.resolve() in longer_chain:
            circle = " -> ".join(link.name for link in (*longer_chain, base))
            message = f"runs in a circle: {circle}"
            raise RecipeError([*problems, Problem(name.place, "extends", message)])
        if base.resolve() not in included:
            included.add(base.resolve())
            _add_layers(base, None, longer_chain, included, files, problems)
    files.append(replace(root, value=children))


def _extended(extends: Node | None, problems: Sequence[Problem]) -> list[Node]:
    """Returns the names of the recipes that a recipe extends, the lowest first."""
    if extends is None:
        return []
    names = extends.value if isinstance(extends.value, list) else [extends]
    for name in names or [extends]:
        if not isinstance(name.value, str) or not name.value:
            form = "the path of a recipe or the name of one that ships"
            message = f"should be {form}, or a list of them"
            raise RecipeError([*problems, Problem(name.place, "extends", message)])
    return names


def _refuse_experiment(root: Node) -> None:
    """Raises a RecipeError about a file that another command takes."""
    kind = root.get("kind")
    if kind is None:
        return
    hint = _command_hint(kind)
    if hint:
        raise RecipeError(
            [Problem(kind.place, "kind", f"{kind.shown} is not a recipe{hint}")]
        )


def _find_named(
    name: Node, key: str, folder: Path, problems: Sequence[Problem]
) -> Path:
    """Returns the file of ``find``; raises a RecipeError with the place of the name if there is no
    such recipe file.
    """
    try:
        path = find(str(name.value), folder)
    except RecipeError as error:
        message = error.problems[0].message
    else:
        if os.path.isfile(path) and has_suffix(path):
            return path
        message = "is not a file"
        if os.path.isfile(path):
            message = (
                f"is not a recipe: names of recipe files end in {' or '.join(SUFFIXES)}"
            )
    raise RecipeError([*problems, Problem(name.place, key, f"{name.shown}: {message}")])


def _locked(root: Node) -> Node:
    """Returns the recipe of a lock without masked secrets that were defaults: a plugin reads them
    again, for example from the environment.
    """
    recipe = root.get("recipe")
    if recipe is None or not isinstance(recipe.value, dict):
        raise LockError(
            [Problem(root.place, "recipe", "is missing: this is not a lock file")]
        )
    origins = root.get("origins")
    if origins is None:
        return recipe

    for path, origin in origins.children.items():
        *sections, key = path.split(".")
        section = recipe.get(*sections)
        values = None if section is None else section.value
        if (
            origin.value != DEFAULT.source
            or not isinstance(values, dict)
            or key not in values
        ):
            continue
        if values[key].value == MASK:
            del values[key]
    return recipe


def merge(base: Node, over: Node) -> Node:
    """Lays one value over another: mappings merge key by key, everything else replaces.

    Where a mapping names another ``kind`` than the one below it, the inherited keys are marked as
    leftovers: those that the new kind does not have belonged to the previous kind.
    """
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    base_kind = base.get("kind")
    over_kind = over.get("kind")
    is_other_kind = (
        base_kind is not None
        and over_kind is not None
        and base_kind.value != over_kind.value
    )
    children = {
        key: replace(node, leftover=node.leftover or is_other_kind)
        for key, node in base.value.items()
    }
    for key, node in over.value.items():
        children[key] = merge(children[key], node) if key in children else node
    # The place is that of the first definition, except for a section whose kind changed.
    section = over if is_other_kind else base
    return replace(section, value=children, leftover=False)


def _assignment(assignment: str | Node, problems: list[Problem]) -> Node:
    """Parses an assignment into a node with its place: an override, or a line of a file."""
    if isinstance(assignment, Node):
        text = str(assignment.value)
        quote_width = int(assignment.spelled[:1] in ("'", '"'))
        start = replace(assignment.place, column=assignment.place.column + quote_width)
    else:
        text = assignment
        start = Place(OVERRIDE, 1, 1, text)
    dotted, equals, value = text.partition("=")
    keys = dotted.split(".")
    is_path = bool(equals) and all(keys) and dotted == "".join(dotted.split())
    if not is_path or keys[0] == "extends":
        message = (
            "extends is only valid in a file" if is_path else "should be a.b.c=VALUE"
        )
        raise RecipeError([*problems, Problem(start, "", message)])

    # Blank lines and columns instead of everything before the value keep its position.
    blank_lines = "\n" * (start.line - 1)
    column = start.column + len(dotted) + 1
    padded_value = blank_lines + " " * (column - 1) + value
    node = parse(padded_value, start.source, problems, shown=blank_lines + start.text)
    for key in reversed(keys):
        column -= len(key) + 1
        position = replace(start, column=column)
        node = Node({key: replace(node, key=position)}, position)
    return node
