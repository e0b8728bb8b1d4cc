"""A study's file: read, validated against the recipe, and every value of its space with every other."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from runner.recipe.catalog import Catalog
from runner.recipe.document import Node, Place, Problem, RecipeError, dump_inline, read
from runner.recipe.experiments import beside, fill_experiment, moved
from runner.recipe.loader import find, load, secret_assignments
from runner.recipe.recipe import Recipe
from runner.study.config import KIND, VERIFY, StudyConfig
from runner.study.space import OFF, STAGES, Parameter, Space, Value, assignments, is_on, label, ordered
from runner.system.errors import RunnerError
from runner.system.names import suggestion

_FIXED = {
    "name": "it names the runs",
    "seed": "the study's 'seeds' says how many there are",
    "tracking": "it says where the runs are kept",
    "extends": "it can only stand in a recipe",
}
"""Settings that cannot be searched, with the reason."""
UNESSENTIAL: Final = frozenset({"budget", "limits", "retries", "recipe", "set"})
"""Settings that may change while a study goes on; recipe and assignments count by what they come to."""
_LOGGED = ("eval/", "train/", "perf/")


@dataclass(frozen=True)
class Definition:
    """A validated study."""

    path: Path
    config: StudyConfig
    sets: tuple[str, ...]
    """Assignments for all trials, those of the command line last."""
    recipe: Recipe
    """What is searched around."""
    space: Space
    catalog: Catalog

    def recipe_of(self, values: Mapping[str, Any], seed: int | None = None) -> Recipe:
        """The recipe of one trial.

        Args:
            values: the searched settings by path.
            seed: that of the training; the recipe's own unless told.

        Raises:
            RecipeError: this combination is impossible.
        """
        seeded = [] if seed is None else [f"seed={seed}"]
        return load(_reference(self.path, self.config), (*self.sets, *assignments(values), *seeded), self.catalog)

    def as_given(self) -> dict[str, Value] | None:
        """The settings of the recipe as it is, by path as Optuna keeps them; None if the space leaves one out."""
        given = self.recipe.values()
        try:
            settled = self.space.settle(lambda parameter: self._given(parameter, given))
        except LookupError:
            return None
        exist = {each.path: each for each in self.space.parameters if each.path in settled}
        on = {each.stage for each in exist.values() if each.stage and is_on(settled[each.path])} | self.space.on
        return {path: label(settled[path]) for path, each in exist.items() if on.issuperset(each.needs)}

    def _given(self, parameter: Parameter, values: Mapping[str, Any]) -> Any:
        """The recipe's own value of a setting.

        Raises:
            LookupError: it is none of those that are searched.
        """
        own = _lookup(values, parameter.path)
        if parameter.config.choice is None:
            if parameter.has(own):
                return own
            raise LookupError(parameter.path)
        below = [each.path for each in self.space.parameters if each.path.startswith(f"{parameter.path}.")]
        for choice in parameter.config.choice:
            rest = {path: _lookup(values, path) for path in below} if is_on(choice) else {}  # they are searched too
            with suppress(RecipeError):
                if _lookup(self.recipe_of({parameter.path: choice, **rest}).values(), parameter.path) == own:
                    return choice
        raise LookupError(parameter.path)

    @property
    def seeds(self) -> list[int]:
        """Those of a trial's trainings."""
        return [self.recipe.seed + number for number in range(self.config.seeds)]

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides what a trial is and what it comes to; budget and limits do not."""
        config = self.config.model_dump(mode="json", exclude=set(UNESSENTIAL))
        parts = [config, self.recipe.digest]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def load_study(reference: str | Path, sets: Sequence[str], catalog: Catalog) -> Definition:
    """Reads and validates a study's file.

    Args:
        reference: the file.
        sets: assignments for the recipe from the command line, after those of the file.
        catalog: the plugins that the recipe may name.

    Raises:
        RecipeError: everything that is wrong with it, each at its line.
    """
    path = find(reference)
    problems: list[Problem] = []
    root = read(path, problems)
    config = fill_experiment(StudyConfig, KIND, "searched", root, problems)
    try:
        recipe = load(_reference(path, config), (*config.set, *sets), catalog)
    except RecipeError as error:
        written = root.items("set")
        raise RecipeError([moved(problem, written, root.get("recipe") or root) for problem in error.problems]) from None
    for name in (*config.objectives, *config.constraints):
        if name != VERIFY and not name.startswith(_LOGGED):
            section = "objectives" if name in config.objectives else "constraints"
            message = f"is no metric that a training logs: their names begin with {', '.join(_LOGGED)}"
            problems.append(Problem((root.get(section, name) or root).anchor, f"{section}.{name}", message))
    if problems:
        raise RecipeError(problems)
    check = _Check(root, config, (*config.set, *sets), recipe, catalog, path)
    space = check.space()
    check.values(space)
    if check.problems:
        raise RecipeError(check.problems)
    return Definition(path, config, check.sets, recipe, space, catalog)


def _lookup(values: Mapping[str, Any], path: str) -> Any:
    found: Any = values
    for key in path.split("."):
        found = found.get(key, OFF) if isinstance(found, Mapping) else OFF
    return found


def _said(problem: Problem, shown: Parameter) -> str:
    return problem.message if problem.path == shown.path else f"{problem.path}: {problem.message}"


def _reference(path: Path, config: StudyConfig) -> str | Path:
    return beside(path, config.recipe)


@dataclass
class _Check:
    """Finds what is wrong with a space."""

    root: Node
    config: StudyConfig
    sets: tuple[str, ...]
    recipe: Recipe
    catalog: Catalog
    path: Path

    def __post_init__(self) -> None:
        self.problems: list[Problem] = []

    def space(self) -> Space:
        """The space in order; raises if its paths alone are wrong.

        Raises:
            RecipeError: a path cannot be searched.
        """
        for path in self.config.space:
            self._refuse_path(path)
        if self.problems:
            raise RecipeError(self.problems)
        parameters = [Parameter(path, config) for path, config in self.config.space.items()]
        stages = {path.split(".")[1] for path in self.config.space if path.startswith(f"{STAGES}.")}
        requirements = {kind: self._requires(kind) for kind in sorted(stages)}
        on = frozenset(self.recipe.stages)
        space = Space(tuple(ordered(parameters, requirements)), on)
        switched = {parameter.stage for parameter in parameters}
        for parameter in space.parameters:
            for kind in parameter.needs:
                if kind not in on and kind not in switched:
                    message = f"never exists: '{kind}' is off in the recipe, and the study does not switch it"
                    self._add(self._anchor(parameter.path), parameter.path, message)
        if self.problems:
            raise RecipeError(self.problems)
        return space

    def values(self, space: Space) -> None:
        """Loads the recipe with every value, and with every two of them."""
        alone: set[tuple[str, str]] = set()
        for parameter in space.parameters:
            refused = [self._refusals(space, {parameter.path: value}, parameter) for value in parameter.levels()]
            if refused[0] and all(each == refused[0] for each in refused):  # it is not the value that is wrong
                for message in refused[0]:
                    self._add(self._anchor(parameter.path), parameter.path, message)
            else:
                self._add_all(parameter, refused)
            levels = zip(parameter.levels(), refused, strict=True)
            alone |= {(parameter.path, dump_inline(value)) for value, messages in levels if messages}
        for one, other in itertools.combinations(space.parameters, 2):
            for first in one.levels():
                pairs = [{one.path: first, other.path: second} for second in other.levels()]
                known = [any((path, dump_inline(value)) in alone for path, value in pair.items()) for pair in pairs]
                refused = [[] if old else self._refusals(space, p, other) for p, old in zip(pairs, known, strict=True)]
                self._add_all(other, refused)

    def _add_all(self, parameter: Parameter, refused: Sequence[Sequence[str]]) -> None:
        for number, messages in enumerate(refused):
            for message in messages:
                self._add(self._value(parameter.path, number), parameter.path, message)

    def _refusals(self, space: Space, wanted: Mapping[str, Any], shown: Parameter) -> list[str]:
        """Why the recipe cannot be loaded with these values, and stages as they have to be for these to exist."""
        settled = space.settle(lambda parameter: wanted.get(parameter.path, self._harmless(parameter, wanted, space)))
        settled = {path: value for path, value in settled.items() if path in wanted or space.find(path).stage}
        if any(path not in settled or settled[path] != value for path, value in wanted.items()):
            return []  # the values exclude each other, so no trial has both
        try:
            recipe = load(_reference(self.path, self.config), (*self.sets, *assignments(settled)), self.catalog)
        except RecipeError as error:
            company = [f"{path}: {dump_inline(value)}" for path, value in wanted.items() if path != shown.path]
            beside_it = f", with {' and '.join(company)}" if company else ""
            return [f"{_said(problem, shown)}{beside_it}" for problem in error.problems]
        secret = {each.partition("=")[0] for each in secret_assignments(recipe)}
        if any(each == shown.path or each.startswith(f"{shown.path}.") for each in secret):
            return ["cannot be searched: it is a secret, and what is tried is kept"]
        return []

    def _harmless(self, parameter: Parameter, wanted: Mapping[str, Any], space: Space) -> Any:
        """A value for a stage that is not asked about: on where one of the others needs it, else as in the recipe."""
        levels = parameter.levels()
        needed = {kind for path in wanted for kind in self._needs(space.find(path), space)}
        switched_on = [level for level in levels if is_on(level)]
        if parameter.stage in needed | space.on and switched_on:
            return switched_on[0]
        return next((level for level in levels if not is_on(level)), levels[0])

    def _needs(self, parameter: Parameter, space: Space) -> Iterator[str]:
        for kind in parameter.needs:
            yield kind
            switch = next((each for each in space.parameters if each.stage == kind), None)
            if switch is not None:
                yield from self._needs(switch, space)

    def _refuse_path(self, path: str) -> None:
        keys = path.split(".")
        anchor = self._anchor(path)
        if keys[0] in _FIXED:
            self._add(anchor, path, f"cannot be searched: {_FIXED[keys[0]]}")
        elif keys[0] == STAGES and len(keys) > 1 and keys[1] not in self.catalog.kinds(STAGES):
            self._add(anchor, path, f"unknown stage{suggestion(keys[1], self.catalog.kinds(STAGES))}")
        elif len(keys) < 2 and keys[0] != "device":
            self._add(anchor, path, "should be the dotted path of a setting, like optimizer.lr")
        for other in self.config.space:
            is_switch = keys[0] == STAGES and len(other.split(".")) == 2
            if path.startswith(f"{other}.") and not is_switch:
                self._add(anchor, path, f"is part of '{other}', which is searched as a whole")

    def _requires(self, kind: str) -> tuple[str, ...]:
        try:
            return tuple(self.catalog.get(STAGES, kind).requires)
        except RunnerError as error:
            raise RecipeError([Problem(self._anchor(f"{STAGES}.{kind}"), STAGES, str(error))]) from None

    def _anchor(self, path: str) -> Place:
        node = self.root.get("space", path)
        return (node or self.root).anchor

    def _value(self, path: str, number: int) -> Place:
        """Where the value of that number stands."""
        for name in ("choice", "float", "int"):
            values = self.root.items("space", path, name)
            if number < len(values):
                return values[number].place
        return self._anchor(path)

    def _add(self, place: Place, path: str, message: str) -> None:
        self.problems.append(Problem(place, f"space.{path}", message))
