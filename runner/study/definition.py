"""A study before its first trial: its file, tried against the recipe, what it will cost, and what is in its way."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from runner.child.spawn import Cause
from runner.plugin.contract import Statistical
from runner.plugin.registry import Registry
from runner.recipe.document import Node, Problem, RecipeError, Scalar, dump_inline, read
from runner.recipe.loader import assignments, fill_experiment, find, load, load_named, secret_assignments
from runner.recipe.recipe import Recipe, flatten
from runner.study.config import OFF, STAGES, VERIFY, Parameter, ParameterConfig, Space, StudyConfig, is_on, label
from runner.system.errors import RunnerError
from runner.system.hardware import usable_cores
from runner.system.names import shown_path, suggestion
from runner.system.secrets import redact_values

FORECAST_SECONDS = 30.0
_LOUD = 0.25  # load for each core from which on a measurement of speed is not worth beginning
_FIXED = {  # settings that cannot be searched, and why
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
        given, found = self.recipe.values(), dict[str, Scalar]()

        def own(parameter: Parameter) -> Any:
            value = _lookup(given, parameter.path)
            below = [each.path for each in self.space.parameters if each.path.startswith(f"{parameter.path}.")]
            for choice in parameter.config.choice or ([value] if parameter.config.has(value) else []):
                rest = {path: _lookup(given, path) for path in below} if is_on(choice) else {}  # they are searched too
                with suppress(RecipeError):
                    if _lookup(self.recipe_of({parameter.path: choice, **rest}).values(), parameter.path) == value:
                        found[parameter.path] = label(choice)
                        return choice
            raise LookupError(parameter.path)

        with suppress(LookupError):
            self.space.settle(own)
            return found
        return None

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
        return hashlib.sha256(json.dumps([self.essentials, self.recipe.digest], sort_keys=True).encode()).hexdigest()

    @property
    def described(self) -> dict[str, Any]:
        """Returns the description of the study for its storage, without secrets."""
        whole = {
            "digest": self.digest, "file": str(self.path.resolve()), "sets": list(self.sets[len(self.config.set) :]),
            "config": self.config.model_dump(mode="json"), "recipe": self.recipe.values(),
            "synthetic": self.recipe.data.is_synthetic(),
        }  # fmt: skip
        return dict(json.loads(json.dumps(redact_values(whole))))

    def differing(self, described: Mapping[str, Any]) -> list[str]:
        """Returns the dotted paths of determining settings that differ from a description."""

        def essential(whole: Mapping[str, Any]) -> dict[str, Any]:
            config = {name: value for name, value in whole["config"].items() if name not in _UNESSENTIAL}
            return dict(flatten({**config, "recipe": whole["recipe"]}))

        old, now = essential(described), essential(self.described)
        return sorted(name for name in old.keys() | now.keys() if old.get(name) != now.get(name))


def load_study(
    reference: str | Path, sets: Sequence[str], catalog: Registry, seconds: float | None = None
) -> Definition:
    """Reads and validates a study's file, its recipe with assignments of the command line after those of the file.

    ``seconds`` replaces the study's budget of seconds in the file.

    Raises:
        RecipeError: everything that is wrong with it, each at its line.
    """
    path, problems = find(reference), list[Problem]()
    root = read(path, problems)
    config = fill_experiment(StudyConfig, "study", "searched", root, problems)
    if seconds is not None:
        config = config.model_copy(update={"budget": config.budget.model_copy(update={"seconds": seconds})})
    recipe = load_named(root.get("recipe") or root, (*root.items("set"), *sets), catalog)
    for section, metrics in (("objectives", config.objectives), ("constraints", config.constraints)):
        for name in metrics:
            if name != VERIFY and not name.startswith(_LOGGED):
                message = f"is not a metric of a training; their names start with {', '.join(_LOGGED)}"
                problems.append(Problem((root.get(section, name) or root).anchor, f"{section}.{name}", message))
    if problems:
        raise RecipeError(problems)
    space = _space(config.space, recipe.stages, catalog, root)
    definition = Definition(path, config, (*config.set, *sets), recipe, space, catalog)
    _try_values(definition, root)
    return definition


def _lookup(values: Mapping[str, Any], path: str) -> Any:
    found: Any = values
    for key in path.split("."):
        found = found.get(key, OFF) if isinstance(found, Mapping) else OFF
    return found


def _space(searched: Mapping[str, ParameterConfig], on: Collection[str], catalog: Registry, root: Node) -> Space:
    """The space of a file, in order, with the stages that are on in the recipe.

    Raises:
        RecipeError: a path cannot be searched.
    """
    known, requirements, problems = catalog.kinds(STAGES), dict[str, Sequence[str]](), list[Problem]()

    def refuse(path: str, message: str) -> None:
        problems.append(Problem((root.get("space", path) or root).anchor, f"space.{path}", message))

    for path in searched:
        section, *rest = path.split(".")
        if section in _FIXED:
            refuse(path, f"cannot be searched: {_FIXED[section]}")
        elif not rest and section != "device":
            refuse(path, "should be the dotted path of a setting, like optimizer.lr")
        elif section == STAGES and rest[0] not in known:
            refuse(path, f"unknown stage{suggestion(rest[0], known)}")
        elif section == STAGES:
            try:
                requirements[rest[0]] = catalog.get(STAGES, rest[0]).requires
            except RunnerError as error:
                refuse(path, str(error))
        for other in searched:
            is_switch = section == STAGES and len(other.split(".")) == 2
            if path.startswith(f"{other}.") and not is_switch:
                refuse(path, f"is part of '{other}', which is searched in one piece")
    if problems:
        raise RecipeError(problems)
    space = Space.of(searched, requirements, on)
    for parameter in space.parameters:
        for kind in parameter.needs:
            if kind not in on and kind not in space.switches:
                refuse(parameter.path, f"never exists: '{kind}' is off in the recipe, and the study does not switch it")
    if problems:
        raise RecipeError(problems)
    return space


def _try_values(definition: Definition, root: Node) -> None:
    """Loads the recipe with every value, and with every two; a ``RecipeError`` for those that it cannot have."""
    problems, possible = list[Problem](), dict[str, list[tuple[int, Any]]]()

    def refuse(path: str, messages: Sequence[str], number: int | None) -> None:
        """Adds problems at the value with that number, or at the key."""
        values = [value for name in ("choice", "float", "int") for value in root.items("space", path, name)]
        named = (root.get("space", path) or root).anchor
        place = named if number is None or number >= len(values) else values[number].place
        problems.extend(Problem(place, f"space.{path}", message) for message in messages)

    for parameter in definition.space.parameters:
        path, levels = parameter.path, parameter.config.levels
        refused = [_refusals(definition, {path: value}, path) for value in levels]
        is_the_value = any(messages != refused[0] for messages in refused)
        for number, messages in enumerate(refused):
            refuse(path, messages, number if is_the_value else None)
        possible[path] = [pair for pair, messages in zip(enumerate(levels), refused, strict=True) if not messages]
    for one, other in itertools.combinations(possible, 2):
        for (_, first), (number, second) in itertools.product(possible[one], possible[other]):
            refuse(other, _refusals(definition, {one: first, other: second}, other), number)
    if problems:
        raise RecipeError(problems)


def _refusals(definition: Definition, wanted: Mapping[str, Any], shown: str) -> list[str]:
    """Why the recipe cannot be loaded with these values, and stages as they have to be for these to exist."""
    space, switches = definition.space, definition.space.switches
    needed = [kind for each in space.parameters if each.path in wanted for kind in each.needs]
    for kind in needed:  # which grows, by what a stage that is needed needs itself
        needed += [each for each in switches[kind].needs if each not in needed] if kind in switches else []

    def harmless(parameter: Parameter) -> Any:
        """Returns a value for a stage that is not under test: on where another stage requires it,
        else as in the recipe.
        """
        wants_on = parameter.stage in {*needed, *space.on}
        return next((each for each in parameter.config.levels if is_on(each) == wants_on), parameter.config.levels[0])

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
    if any(each.startswith((f"{shown}=", f"{shown}.")) for each in secret_assignments(recipe)):
        return ["cannot be searched: it is a secret, and what is tried is kept"]
    return []


class NoForecastError(RunnerError):
    """A short training of the recipe is too short for a forecast."""


@dataclass(frozen=True)
class Forecast:
    """The forecast of a study's time from one short training of the recipe."""

    start_seconds: float  # until the training starts
    seconds_a_step: float
    trial_seconds: float
    study_seconds: float  # of all trials, if none ends early and all are as fast as the recipe as it is


@dataclass(frozen=True)
class StudyPlan:
    """The output of ``runner study plan``."""

    name: str
    recipe: str
    space: Sequence[tuple[str, str, str]]  # path, values, and the stages that the setting needs
    configurations: float | None  # None with a range of real numbers
    trials: int
    trainings: int
    budget: str
    sampler: str
    pruner: str
    limits: Sequence[str]
    remarks: Sequence[str]
    forecast: Forecast | None


def plan(definition: Definition, plugin_files: Sequence[Path], forecast: bool) -> StudyPlan:
    """Looks ahead, for a forecast by half a minute of training; a ``RunnerError`` if the recipe cannot be trained."""
    config, space = definition.config, definition.space
    budget, limits = (
        [f"{name} {value:g}" for name, value in section.model_dump().items() if value is not None]
        for section in (config.budget, config.limits)
    )
    remarks, foreseen = list(_remarks(definition)), None
    if forecast:
        try:
            foreseen = _forecast(definition, plugin_files)
        except NoForecastError as error:
            remarks.append(str(error))
    return StudyPlan(
        name=config.name, recipe=shown_path(definition.recipe.path.resolve()),
        configurations=space.configurations if math.isfinite(space.configurations) else None,
        space=[(each.path, str(each.config), ", ".join(each.needs)) for each in space.parameters],
        trials=config.budget.trials, trainings=config.budget.trials * config.seeds, budget=", ".join(budget),
        sampler=config.sampler.kind, pruner=config.pruner_kind, limits=limits, remarks=remarks,
        forecast=foreseen,
    )  # fmt: skip


def _remarks(definition: Definition) -> Iterator[str]:
    from runner.train.assemble import resolve_device, setting_of

    config, recipe, space = definition.config, definition.recipe, definition.space
    if config.timed:
        yield f"{config.timed[0]} is a speed, so trials run one at a time"
        load = psutil.getloadavg()[0] / usable_cores()
        if load > _LOUD:
            yield f"the load is {load:.1f} per core: speeds measured now mean little"
    if config.constraints.get(VERIFY) == "pass":
        setting = setting_of(recipe, resolve_device(recipe.device))
        for stage in space.switches:
            promised = (recipe.stages.get(stage) or definition.catalog.get(STAGES, stage)()).contract(setting)
            if isinstance(promised, Statistical):
                yield (
                    f"{stage} has a promise that only complete trainings can prove (Statistical): with verify: pass no "
                    "configuration with it counts; verify: no_fail lets it through"
                )
    if config.pruner_kind in ("median", "hyperband") and recipe.train.evaluate_every is None:
        yield "nothing is pruned: train.evaluate_every is null, so that a training is judged at its end only"
    if recipe.train.checkpoint_every is None:
        yield "train.checkpoint_every is null: an interrupted trial starts again"
    if space.configurations <= config.budget.trials:
        yield f"{config.budget.trials} trials are more than there are configurations"
    if conditional := [each.path for each in space.parameters if each.needs]:
        yield f"exists only where its stage is on, or what it requires: {', '.join(conditional)}"
    if fixed_on := [kind for kind in recipe.stages if kind not in space.switches]:
        yield f"on in every trial: {', '.join(fixed_on)}"


def _forecast(definition: Definition, plugin_files: Sequence[Path]) -> Forecast:
    """Trains the recipe as it is for a while, and takes its pace in the second half of that for the study's."""
    from runner.study.training import limits_of, train

    recipe, config, budget = definition.recipe, definition.config, definition.config.budget
    goal, begun, seen = recipe.length[1], time.monotonic(), dict[int, float]()  # when each step was heard of

    def enough(step: int) -> bool:
        if step:
            seen.setdefault(step, time.monotonic())
        return time.monotonic() - begun > FORECAST_SECONDS

    with tempfile.TemporaryDirectory(prefix="runner-forecast-", ignore_cleanup_errors=True) as folder:
        ended = train(recipe, Path(folder), plugin_files, limits_of(config), enough)
    if ended.cause == Cause.DONE:
        trained = ended.training_seconds or 0.0
        start, pace, training = ended.seconds - trained, trained / goal, ended.seconds
    elif ended.cause != Cause.STOPPED:
        raise RunnerError(f"the recipe as it is cannot be trained: {ended.cause}, {ended.reason}")
    elif len(seen) < 4:
        raise NoForecastError(
            f"no forecast: the recipe reported fewer than 4 steps in {FORECAST_SECONDS:.0f} s, start-up included; "
            "close other programs and repeat, or run the study without a forecast"
        )
    else:
        steps, times = list(seen), list(seen.values())
        middle = len(seen) // 2
        start, pace = times[0] - begun, (times[-1] - times[middle]) / (steps[-1] - steps[middle])
        training = times[-1] - begun + pace * max(0, goal - steps[-1])
    trial = training * config.seeds
    study = trial * budget.trials / budget.parallel
    return Forecast(start, pace, trial, study if budget.seconds is None else min(study, budget.seconds + trial))
