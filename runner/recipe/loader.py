"""From a file to a validated recipe, with everything that is wrong said at once."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.recipe.catalog import Catalog
from runner.recipe.constraints import Draft, conflicts
from runner.recipe.errors import DEFAULT, Place, Problem, RecipeError
from runner.recipe.fill import fill
from runner.recipe.layers import compose, find, layers
from runner.recipe.optimizers import lr_scheduler, optimizers
from runner.recipe.plugin_sections import plugin_section, stages
from runner.recipe.recipe import Recipe, flatten
from runner.recipe.sections import Head, TrackingConfig, TrainConfig
from runner.recipe.yaml_nodes import Node, parse
from runner.system.secrets import MASK, register

SECTIONS = ("extends", "model", "data", "optimizer", "lr_scheduler", "train", "optimization", "tracking")
"""The keys of a recipe beside those of ``Head``."""


def load(reference: str | Path, sets: Sequence[str], catalog: Catalog) -> Recipe:
    """Reads, merges and validates a recipe.

    Args:
        reference: a file (a recipe, or the ``recipe.lock.yaml`` of a run), or the bare name of a recipe that ships.
        sets: assignments ``a.b.c=VALUE`` that override the file.
        catalog: the plugins that the recipe may name.

    Raises:
        RecipeError: everything that is wrong with it, each at its line.
    """
    path = find(reference)
    problems: list[Problem] = []
    found = layers(path, sets, problems)
    recipe = _validated(path, compose(found), catalog, problems)
    for leaf in (leaf for layer in found for leaf in recipe.secret_nodes(layer)):
        register(str(leaf.value))  # also what another layer has replaced: a patch, or a study's file, may quote it
    return recipe


def from_values(values: Mapping[str, Any], path: str, origins: Mapping[str, Sequence[Any]], catalog: Catalog) -> Recipe:
    """A recipe that another process has loaded and given to this one.

    Args:
        values: with secrets.
        path: of the file that it was loaded from, which is not read.
        origins: source, whether that is a file, line, column and text of the place of every value.
        catalog: the plugins that the recipe may name.

    Raises:
        RecipeError: it is not valid here, for example because a plugin is missing.
    """
    problems: list[Problem] = []
    root = parse(json.dumps(values, ensure_ascii=False), path, problems)
    recipe = _validated(Path(path), root, catalog, problems)
    places = {name: Place(Path(given[0]) if given[1] else given[0], *given[2:]) for name, given in origins.items()}
    return replace(recipe, origins={name: DEFAULT if each == DEFAULT else each for name, each in places.items()})


def _validated(path: Path, composed: Node, catalog: Catalog, problems: list[Problem]) -> Recipe:
    root = replace(composed, place=Place(path))
    problems += _lost(root)
    head = _head(root, problems)
    draft = Draft(
        root=root,
        model=plugin_section(root, "model", catalog, problems),
        data=plugin_section(root, "data", catalog, problems),
        train=fill(TrainConfig, _section(root, "train"), "train", problems),
        tracking=fill(TrackingConfig, _section(root, "tracking"), "tracking", problems),
    )
    draft.optimizer = optimizers(root, draft.model, problems)
    draft.lr_scheduler = lr_scheduler(root, problems)
    stages(draft, catalog, problems)
    problems += conflicts(draft)
    if problems:
        raise RecipeError(problems)
    return _recipe(path, draft, head)


def _head(root: Node, problems: list[Problem]) -> Head | None:
    assert isinstance(root.value, dict)
    rest = {key: node for key, node in root.value.items() if key not in SECTIONS}
    return fill(Head, replace(root, value=rest), "", problems, others=SECTIONS)


def _section(root: Node, name: str) -> Node:
    """A section that every recipe has; left out, it is made of defaults."""
    return root.get(name) or Node({}, root.place)


def _recipe(path: Path, draft: Draft, head: Head | None) -> Recipe:
    assert head is not None  # or there would be a problem, as for the others
    assert draft.model is not None
    assert draft.data is not None
    assert draft.train is not None
    assert draft.tracking is not None
    recipe = Recipe(
        path=path,
        **head.model_dump(),
        model=draft.model,
        data=draft.data,
        optimizer=draft.optimizer,
        lr_scheduler=draft.lr_scheduler,
        train=draft.train,
        tracking=draft.tracking,
        stages=draft.stages,
        off=tuple(kind for kind, on in draft.switched.items() if not on),
        origins={},
    )
    recipe.values(masked=False)  # makes known what no file holds: a plugin's default may come from the environment
    origins = {f"optimization.{kind}": draft.origin(f"optimization.{kind}") for kind in draft.switched}
    for written, value in flatten(recipe.values()):
        place = draft.origin(written)  # the text of an assignment holds its value
        origins[written] = replace(place, text="") if MASK in str(value) else place
    return replace(recipe, origins=origins)


def _lost(node: Node, path: str = "") -> Iterator[Problem]:
    """Everything that was masked when it was written, and so is no value."""
    if isinstance(node.value, dict):
        for key, child in node.value.items():
            yield from _lost(child, f"{path}.{key}" if path else key)
    elif isinstance(node.value, list):
        for child in node.value:
            yield from _lost(child, path)
    elif isinstance(node.value, str) and MASK in node.value:
        yield Problem(node.place, path, f"a secret is not kept in a run's files; give it again: --set {path}=VALUE")
