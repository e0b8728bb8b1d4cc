"""A study's file: read, validated against the recipe, and every value of its space with every other."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.recipe.document import Node, Problem, RecipeError, Scalar, dump_inline, read
from runner.recipe.loader import fill_experiment, find, load, load_named, secret_assignments
from runner.recipe.recipe import Recipe, flatten
from runner.study.config import KIND, OFF, STAGES, VERIFY, Parameter, Space, StudyConfig, is_on, label, ordered
from runner.system.errors import RunnerError
from runner.system.names import suggestion
from runner.system.secrets import redact_values

if TYPE_CHECKING:
    from runner.plugin.registry import Registry

_FIXED = {  # settings that cannot be searched, and why
    "name": "it names the runs",
    "seed": "the study's 'seeds' says how many there are",
    "tracking": "it says where the runs are kept",
    "extends": "it can only stand in a recipe",
}
# What may change while a study goes on; recipe and assignments count by what they come to:
_UNESSENTIAL = {"budget", "limits", "retries", "recipe", "set"}
_LOGGED = ("eval/", "train/", "perf/")


@dataclass(frozen=True)
class Definition:
    """A validated study."""

    path: Path
    config: StudyConfig
    sets: tuple[str, ...]  # assignments for all trials, those of the command line last
    recipe: Recipe  # what is searched around
    space: Space
    catalog: Registry

    def recipe_of(self, values: Mapping[str, Any], seed: int | None = None) -> Recipe:
        """The recipe with these settings by path, or a ``RecipeError``; with its own seed unless told."""
        seeded = [] if seed is None else [f"seed={seed}"]
        return load(self.recipe.path, (*self.sets, *assignments(values), *seeded), self.catalog)

    def as_given(self) -> dict[str, Scalar] | None:
        """The settings of the recipe as it is, by path as Optuna keeps them; None if the space leaves one out."""
        given, asked = self.recipe.values(), list[str]()

        def own(parameter: Parameter) -> Any:
            asked.append(parameter.path)
            value = _lookup(given, parameter.path)
            if parameter.config.choice is None:
                if parameter.has(value):
                    return value
                raise LookupError(parameter.path)
            below = [each.path for each in self.space.parameters if each.path.startswith(f"{parameter.path}.")]
            for choice in parameter.config.choice:
                rest = {path: _lookup(given, path) for path in below} if is_on(choice) else {}  # they are searched too
                with suppress(RecipeError):
                    if _lookup(self.recipe_of({parameter.path: choice, **rest}).values(), parameter.path) == value:
                        return choice
            raise LookupError(parameter.path)

        try:
            settled = self.space.settle(own)
        except LookupError:
            return None
        return {path: label(settled[path]) for path in asked}

    @property
    def seeds(self) -> list[int]:
        """Those of a trial's trainings."""
        return [self.recipe.seed + number for number in range(self.config.seeds)]

    @property
    def essentials(self) -> dict[str, Any]:
        """The study's settings that decide what a trial is and what it comes to; budget and limits do not."""
        return self.config.model_dump(mode="json", exclude=_UNESSENTIAL)

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides what a trial is and what it comes to."""
        return hashlib.sha256(json.dumps([self.essentials, self.recipe.digest], sort_keys=True).encode()).hexdigest()

    @property
    def described(self) -> dict[str, Any]:
        """What the study's storage keeps of it, without secrets."""
        whole = {
            "digest": self.digest, "file": str(self.path.resolve()), "sets": list(self.sets[len(self.config.set) :]),
            "config": self.config.model_dump(mode="json"), "recipe": self.recipe.values(),
        }  # fmt: skip
        described: dict[str, Any] = json.loads(json.dumps(redact_values(whole)))
        return described

    def differing(self, described: Mapping[str, Any]) -> list[str]:
        """The dotted paths of what decides and is not as it was described."""
        kept = {name: value for name, value in described["config"].items() if name not in _UNESSENTIAL}
        old = dict(flatten({**kept, "recipe": described["recipe"]}))
        now = dict(flatten({**self.essentials, "recipe": self.described["recipe"]}))
        return sorted(name for name in old.keys() | now.keys() if old.get(name) != now.get(name))


def load_study(reference: str | Path, sets: Sequence[str], catalog: Registry) -> Definition:
    """Reads and validates a study's file, its recipe with assignments of the command line after those of the file.

    Raises:
        RecipeError: everything that is wrong with it, each at its line.
    """
    path, problems = find(reference), list[Problem]()
    root = read(path, problems)
    config = fill_experiment(StudyConfig, KIND, "searched", root, problems)
    recipe = load_named(root.get("recipe") or root, (*root.items("set"), *sets), catalog)
    for section, metrics in (("objectives", config.objectives), ("constraints", config.constraints)):
        for name in metrics:
            if name != VERIFY and not name.startswith(_LOGGED):
                message = f"is no metric that a training logs: their names begin with {', '.join(_LOGGED)}"
                problems.append(Problem((root.get(section, name) or root).anchor, f"{section}.{name}", message))
    if problems:
        raise RecipeError(problems)
    bare = Definition(path, config, (*config.set, *sets), recipe, Space((), frozenset(recipe.stages)), catalog)
    definition = replace(bare, space=_space(bare, root))
    _try_values(definition, root)
    return definition


def assignments(values: Mapping[str, Any]) -> list[str]:
    """Settings as ``--set`` takes them."""
    return [f"{path}={dump_inline(value)}" for path, value in values.items()]


def _lookup(values: Mapping[str, Any], path: str) -> Any:
    found: Any = values
    for key in path.split("."):
        found = found.get(key, OFF) if isinstance(found, Mapping) else OFF
    return found


def _space(bare: Definition, root: Node) -> Space:
    """The space of a definition that has none yet, in order; a ``RecipeError`` if a path cannot be searched."""
    paths, on, known = bare.config.space, bare.space.on, bare.catalog.kinds(STAGES)
    problems: list[Problem] = []

    def refuse(path: str, message: str) -> None:
        problems.append(Problem((root.get("space", path) or root).anchor, f"space.{path}", message))

    for path in paths:
        keys = path.split(".")
        if keys[0] in _FIXED:
            refuse(path, f"cannot be searched: {_FIXED[keys[0]]}")
        elif keys[0] == STAGES and len(keys) > 1 and keys[1] not in known:
            refuse(path, f"unknown stage{suggestion(keys[1], known)}")
        elif len(keys) < 2 and keys[0] != "device":
            refuse(path, "should be the dotted path of a setting, like optimizer.lr")
        for other in paths:
            is_switch = keys[0] == STAGES and len(other.split(".")) == 2
            if path.startswith(f"{other}.") and not is_switch:
                refuse(path, f"is part of '{other}', which is searched as a whole")
    if problems:
        raise RecipeError(problems)
    requirements = {}
    for kind in sorted({path.split(".")[1] for path in paths if path.startswith(f"{STAGES}.")}):
        try:
            requirements[kind] = tuple(bare.catalog.get(STAGES, kind).requires)
        except RunnerError as error:
            place = (root.get("space", f"{STAGES}.{kind}") or root).anchor
            raise RecipeError([Problem(place, STAGES, str(error))]) from None
    space = Space(tuple(ordered([Parameter(*each) for each in paths.items()], requirements)), on)
    for parameter in space.parameters:
        for kind in parameter.needs:
            if kind not in on and kind not in space.switches:
                refuse(parameter.path, f"never exists: '{kind}' is off in the recipe, and the study does not switch it")
    if problems:
        raise RecipeError(problems)
    return space


def _try_values(definition: Definition, root: Node) -> None:
    """Loads the recipe with every value, and with every two; a ``RecipeError`` for those that it cannot have."""
    problems: list[Problem] = []

    def refuse(path: str, messages: Sequence[str], number: int | None = None) -> None:
        """Says it at the value of that number, or at the key."""
        values = [value for name in ("choice", "float", "int") for value in root.items("space", path, name)]
        named = (root.get("space", path) or root).anchor
        place = named if number is None or number >= len(values) else values[number].place
        problems.extend(Problem(place, f"space.{path}", message) for message in messages)

    alone: set[tuple[str, str]] = set()
    for parameter in definition.space.parameters:
        refused = [_refusals(definition, {parameter.path: value}, parameter.path) for value in parameter.levels]
        if refused[0] and all(each == refused[0] for each in refused):  # it is not the value that is wrong
            refuse(parameter.path, refused[0])
        else:
            for number, messages in enumerate(refused):
                refuse(parameter.path, messages, number)
        levels = zip(parameter.levels, refused, strict=True)
        alone |= {(parameter.path, dump_inline(value)) for value, messages in levels if messages}
    for one, other in itertools.combinations(definition.space.parameters, 2):
        for first, (number, second) in itertools.product(one.levels, enumerate(other.levels)):
            pair = {one.path: first, other.path: second}
            if alone.isdisjoint((path, dump_inline(value)) for path, value in pair.items()):
                refuse(other.path, _refusals(definition, pair, other.path), number)
    if problems:
        raise RecipeError(problems)


def _refusals(definition: Definition, wanted: Mapping[str, Any], shown: str) -> list[str]:
    """Why the recipe cannot be loaded with these values, and stages as they have to be for these to exist."""
    space, switches = definition.space, definition.space.switches
    needed = [kind for each in space.parameters if each.path in wanted for kind in each.needs]
    for kind in needed:  # which grows, by what a stage that is needed needs itself
        needed += [each for each in switches[kind].needs if each not in needed] if kind in switches else []

    def harmless(parameter: Parameter) -> Any:
        """A value for a stage that is not asked about: on where one of the others needs it, else as in the recipe."""
        wants_on = parameter.stage in {*needed, *space.on}
        return next((each for each in parameter.levels if is_on(each) == wants_on), parameter.levels[0])

    settled = space.settle(lambda each: wanted.get(each.path, harmless(each)))
    if any(path not in settled or settled[path] != value for path, value in wanted.items()):
        return []  # the values exclude each other, so no trial has both
    asked = {*wanted, *(each.path for each in switches.values())}
    try:
        recipe = definition.recipe_of({path: value for path, value in settled.items() if path in asked})
    except RecipeError as error:
        company = [f", with {path}: {dump_inline(value)}" for path, value in wanted.items() if path != shown]
        said = [p.message if p.path == shown else f"{p.path}: {p.message}" for p in error.problems]
        return ["".join([message, *company]) for message in said]
    secret = [each.partition("=")[0] for each in secret_assignments(recipe)]
    if any(each == shown or each.startswith(f"{shown}.") for each in secret):
        return ["cannot be searched: it is a secret, and what is tried is kept"]
    return []
