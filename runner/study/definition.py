"""The definition of a study: its file, validated against the recipe and every value of the search space."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from runner.plugin.registry import Registry
from runner.recipe.dumping import dump_inline, is_same
from runner.recipe.loader import (
    assignments,
    fill_experiment,
    find,
    load,
    load_named,
    secret_assignments,
)
from runner.recipe.lock import computation_of
from runner.recipe.recipe import Recipe, flatten
from runner.recipe.scalars import Scalar
from runner.recipe.yaml_nodes import OVERRIDE, Node, Problem, RecipeError, read
from runner.study.config import OFF, STAGES, VERIFY, ParameterConfig, StudyConfig, label
from runner.study.space import Parameter, Space, is_on
from runner.system.errors import RunnerError
from runner.system.secrets import redact_values
from runner.system.suggestions import suggestion

# Settings that cannot be searched, and why.
_FIXED = {
    "name": "it names the runs",
    "seed": "the study's 'seeds' determines the seeds",
    "tracking": "it determines where runs are recorded",
    "extends": "it is only valid in a recipe",
}
# Settings that may change during a study; recipe and assignments count by their result:
_UNESSENTIAL = {"budget", "limits", "retries", "recipe", "set"}
_LOGGED = ("eval/", "train/", "perf/")


@dataclass(frozen=True)
class Definition:
    """A validated study."""

    path: Path
    config: StudyConfig
    sets: tuple[str, ...]  # assignments for all trials, those of the command line last
    recipe: Recipe  # the base of the search
    space: Space
    catalog: Registry

    def recipe_of(self, values: Mapping[str, Any], seed: int | None = None) -> Recipe:
        """Returns the recipe with these settings by path, or raises a
        ``RecipeError``; its seed is unchanged by default.
        """
        seeded = [] if seed is None else [f"seed={seed}"]
        return load(self.recipe.path, (*self.sets, *assignments(values), *seeded), self.catalog)

    def as_given(self) -> dict[str, Scalar] | None:
        """The settings of the recipe as it is, by path as Optuna keeps them; None if the space leaves one out."""
        labels: dict[str, Scalar] = {}

        def choice_of_recipe(parameter: Parameter) -> Any:
            choice = self._choice_of_recipe(parameter)
            labels[parameter.path] = label(choice)
            return choice

        try:
            self.space.settle(choice_of_recipe)
        except LookupError:
            return None
        return labels

    def _choice_of_recipe(self, parameter: Parameter) -> Any:
        """Returns the value in the search space that results in the recipe's; a ``LookupError`` if there is none."""
        recipe_values = self.recipe.values()
        value = _lookup(recipe_values, parameter.path)
        prefix = f"{parameter.path}."
        settings_below = {
            searched.path: _lookup(recipe_values, searched.path)
            for searched in self.space.parameters
            if searched.path.startswith(prefix)
        }
        choices = parameter.config.choice
        if choices is None:
            choices = [value] if parameter.config.has(value) else []

        for choice in choices:
            # Settings of a stage are searched, too: they must not count as a difference of the stage.
            settings = {parameter.path: choice, **(settings_below if is_on(choice) else {})}
            with suppress(RecipeError):
                resulting_values = self.recipe_of(settings).values()
                if is_same(_lookup(resulting_values, parameter.path), value):
                    return choice
        raise LookupError(parameter.path)

    def can_have(self, parameter: Parameter, path: str) -> bool:
        """Returns whether a searched setting has a value with which a setting at or below it is as in the recipe."""
        value = _lookup(self.recipe.values(), path)
        if parameter.config.choice is None:
            return parameter.config.has(value)
        for choice in parameter.config.choice:
            with suppress(RecipeError):
                resulting_values = self.recipe_of({parameter.path: choice}).values()
                if is_same(_lookup(resulting_values, path), value):
                    return True
        return False

    @property
    def seeds(self) -> list[int]:
        """Returns the seeds of a trial's trainings."""
        return [self.recipe.seed + number for number in range(self.config.seeds)]

    @property
    def essentials(self) -> dict[str, Any]:
        """Returns the study's settings that determine trials and their results,
        without budget and limits.
        """
        return self.config.model_dump(mode="json", exclude=_UNESSENTIAL)

    @property
    def digest(self) -> str:
        """Returns the SHA-256 of everything that determines trials and their results."""
        text = json.dumps([self.essentials, self.recipe.digest], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def described(self) -> dict[str, Any]:
        """Returns the description of the study for its storage, without secrets."""
        command_line_sets = self.sets[len(self.config.set) :]
        description = {
            "digest": self.digest,
            "file": str(self.path.resolve()),
            "sets": list(command_line_sets),
            "config": self.config.model_dump(mode="json"),
            "recipe": self.recipe.values(),
            "synthetic": self.recipe.data.is_synthetic(),
        }
        # Through JSON, so that it is equal to the description that the storage returns.
        return dict(json.loads(json.dumps(redact_values(description))))

    def computation(self) -> dict[str, dict[str, str]]:
        """Returns what the results of all trials depend on apart from settings: code, plugins and packages."""
        return computation_of(self._switched, self.catalog)

    @cached_property
    def _switched(self) -> list[Recipe]:
        """Recipes that together use every plugin that a trial may use."""
        recipes = [self.recipe]
        for parameter in self.space.parameters:
            for choice in parameter.config.choice or ():
                # A choice that excludes itself from all trials adds no plugin.
                recipe = _recipe_with(self, {parameter.path: choice})
                recipes += [] if recipe is None else [recipe]
        return recipes

    def differing(self, described: Mapping[str, Any]) -> list[str]:
        """Returns the dotted paths of determining settings that differ from a description."""
        old = _essential_settings(described)
        new = _essential_settings(self.described)
        return sorted(name for name in old.keys() | new.keys() if not is_same(old.get(name), new.get(name)))


def load_study(
    reference: str | Path, sets: Sequence[str], catalog: Registry, seconds: float | None = None
) -> Definition:
    """Reads and validates a study's file, its recipe with assignments of the command line after those of the file.

    ``seconds`` replaces the study's budget of seconds in the file.

    Raises:
        RecipeError: everything that is wrong with it, each at its line.
    """
    path = find(reference)
    problems: list[Problem] = []
    root = read(path, problems)
    config = fill_experiment(
        StudyConfig,
        "study",
        "searched",
        root,
        problems,
    )
    if seconds is not None:
        budget = config.budget.model_copy(update={"seconds": seconds})
        config = config.model_copy(update={"budget": budget})
    recipe = load_named(root.get("recipe") or root, (*root.items("set"), *sets), catalog)

    problems += _unlogged_metrics("objectives", config.objectives, root)
    problems += _unlogged_metrics("constraints", config.constraints, root)
    if problems:
        raise RecipeError(problems)

    space = _space(config.space, recipe.stages, catalog, root)
    definition = Definition(
        path,
        config,
        (*config.set, *sets),
        recipe,
        space,
        catalog,
    )
    _try_values(definition, root)
    problems += _ineffective_assignments(definition, root)
    if problems:
        raise RecipeError(problems)
    return definition


def _unlogged_metrics(section: str, metrics: Collection[str], root: Node) -> Iterator[Problem]:
    """The problems of names in a section that no training logs."""
    for name in metrics:
        if name == VERIFY or name.startswith(_LOGGED):
            continue
        anchor = (root.get(section, name) or root).anchor
        message = f"is not a metric of a training; their names start with {', '.join(_LOGGED)}"
        yield Problem(anchor, f"{section}.{name}", message)


def _ineffective_assignments(definition: Definition, root: Node) -> Iterator[Problem]:
    """The problems of assignments whose values no trial can have, because the study searches the settings."""
    sources = (OVERRIDE, root.place.source)
    recipe = definition.recipe
    leaves = dict(flatten(recipe.values()))
    for path, origin in recipe.origins.items():
        containers = [
            parameter for parameter in definition.space.parameters if f"{path}.".startswith(f"{parameter.path}.")
        ]
        if origin.source not in sources or path not in leaves or not containers:
            continue
        parameter = max(containers, key=lambda parameter: len(parameter.path))
        if not definition.can_have(parameter, path):
            message = f"{dump_inline(leaves[path])} is set, but no value in space.{parameter.path} leads to it"
            yield Problem(origin, path, f"{message}: remove the assignment, or extend the space")


def _essential_settings(description: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a description that determine trials and their results, by dotted path."""
    config = description["config"]
    essentials = {name: value for name, value in config.items() if name not in _UNESSENTIAL}
    return dict(flatten({**essentials, "recipe": description["recipe"]}))


def _lookup(values: Mapping[str, Any], path: str) -> Any:
    value: Any = values
    for key in path.split("."):
        value = value.get(key, OFF) if isinstance(value, Mapping) else OFF
    return value


def _space(searched: Mapping[str, ParameterConfig], on: Collection[str], catalog: Registry, root: Node) -> Space:
    """The space of a file, in order, with the stages that are on in the recipe.

    Raises:
        RecipeError: a path cannot be searched.
    """
    stages = catalog.kinds(STAGES)
    requirements: dict[str, Sequence[str]] = {}
    problems: list[Problem] = []

    def refuse(path: str, message: str) -> None:
        anchor = (root.get("space", path) or root).anchor
        problems.append(Problem(anchor, f"space.{path}", message))

    for path in searched:
        section, *keys = path.split(".")
        if section in _FIXED:
            refuse(path, f"cannot be searched: {_FIXED[section]}")
        elif not keys and section != "device":
            refuse(path, "should be the dotted path of a setting, like optimizer.lr")
        elif section == STAGES and keys[0] not in stages:
            refuse(path, f"unknown stage{suggestion(keys[0], stages)}")
        elif section == STAGES:
            try:
                requirements[keys[0]] = catalog.get(STAGES, keys[0]).requires
            except RunnerError as error:
                refuse(path, str(error))
        for container in searched:
            # A stage is switched in one piece, and its settings are searched where it is on.
            is_switch = section == STAGES and container.count(".") == 1
            if path.startswith(f"{container}.") and not is_switch:
                refuse(path, f"is part of '{container}', which is searched in one piece")
    if problems:
        raise RecipeError(problems)

    space = Space.of(searched, requirements, on)
    for parameter in space.parameters:
        for kind in parameter.needs:
            if kind not in on and kind not in space.switches:
                refuse(
                    parameter.path,
                    f"never exists: '{kind}' is off in the recipe, and the study does not switch it",
                )
    if problems:
        raise RecipeError(problems)
    return space


def _try_values(definition: Definition, root: Node) -> None:
    """Loads the recipe with every value, and with every two; a ``RecipeError`` for those that it cannot have."""
    problems: list[Problem] = []
    # Number and value of those that the recipe can have, by path.
    accepted: dict[str, list[tuple[int, Any]]] = {}

    def refuse(path: str, messages: Sequence[str], number: int | None) -> None:
        """Adds problems at the value with that number, or at the key."""
        kinds = ("choice", "float", "int")
        values = [value for kind in kinds for value in root.items("space", path, kind)]
        position = (root.get("space", path) or root).anchor
        if number is not None and number < len(values):
            position = values[number].place
        problems.extend(Problem(position, f"space.{path}", message) for message in messages)

    for parameter in definition.space.parameters:
        path = parameter.path
        levels = parameter.config.levels
        refusals = [_refusals(definition, {path: value}, path) for value in levels]
        # If all values are refused alike, the setting is the reason and not its values.
        depends_on_value = any(messages != refusals[0] for messages in refusals)
        for number, messages in enumerate(refusals):
            refuse(path, messages, number if depends_on_value else None)
        accepted[path] = [(number, value) for number, value in enumerate(levels) if not refusals[number]]

    for first_path, second_path in itertools.combinations(accepted, 2):
        pairs = itertools.product(accepted[first_path], accepted[second_path])
        for (_, first_value), (number, second_value) in pairs:
            values = {first_path: first_value, second_path: second_value}
            refuse(second_path, _refusals(definition, values, second_path), number)
    if problems:
        raise RecipeError(problems)


def _refusals(definition: Definition, values: Mapping[str, Any], reported_path: str) -> list[str]:
    """Returns why the recipe cannot be loaded with these values, with other stages set so that the settings exist."""
    try:
        recipe = _recipe_with(definition, values)
    except RecipeError as error:
        context = [f", with {path}: {dump_inline(value)}" for path, value in values.items() if path != reported_path]
        return ["".join([_message(problem, reported_path), *context]) for problem in error.problems]
    # The values exclude each other, so no trial has both.
    if recipe is None:
        return []

    secrets = secret_assignments(recipe)
    if any(secret.startswith((f"{reported_path}=", f"{reported_path}.")) for secret in secrets):
        return ["cannot be searched: it is a secret, and what is tried is kept"]
    return []


def _recipe_with(definition: Definition, values: Mapping[str, Any]) -> Recipe | None:
    """Returns the recipe with these values, and with other stages set so that the settings exist.

    It is None if the values exclude each other.

    Raises:
        RecipeError: The recipe cannot have the values.
    """
    space = definition.space
    required_stages = _required_stages(space, values)

    def harmless(parameter: Parameter) -> Any:
        """Returns a value for a stage that is not under test: on where another stage requires it,
        else as in the recipe.
        """
        should_be_on = parameter.stage in {*required_stages, *space.on}
        levels = parameter.config.levels
        return next((level for level in levels if is_on(level) == should_be_on), levels[0])

    settled = space.settle(lambda parameter: values.get(parameter.path, harmless(parameter)))
    if any(path not in settled or not is_same(settled[path], value) for path, value in values.items()):
        return None

    switch_paths = [switch.path for switch in space.switches.values()]
    settings = {path: value for path, value in settled.items() if path in values or path in switch_paths}
    return definition.recipe_of(settings)


def _message(problem: Problem, reported_path: str) -> str:
    if problem.path == reported_path:
        return problem.message
    return f"{problem.path}: {problem.message}"


def _required_stages(space: Space, paths: Collection[str]) -> list[str]:
    """Returns the stages that have to be on for these settings to exist, with those that they require in turn."""
    stages = [stage for parameter in space.parameters if parameter.path in paths for stage in parameter.needs]
    # The list grows while it is iterated over.
    for stage in stages:
        switch = space.switches.get(stage)
        if switch is not None:
            stages += [required for required in switch.needs if required not in stages]
    return stages
