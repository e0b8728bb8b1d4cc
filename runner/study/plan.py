"""The plan of a study before its first trial: what it will cost, and what to expect of it."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from runner.child.spawn import Cause
from runner.plugin.contract import Statistical
from runner.study.config import STAGES, VERIFY, BudgetConfig, LimitsConfig
from runner.study.definition import Definition
from runner.system.errors import RunnerError
from runner.system.hardware import usable_cores
from runner.system.suggestions import shown_path

FORECAST_SECONDS = 30.0
# Load per core above which measured speeds depend on the other programs.
_BUSY_LOAD = 0.25
# Reported steps that a forecast needs: two in each half of the training.
_FEWEST_STEPS = 4


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
    config = definition.config
    space = definition.space
    remarks = list(_remarks(definition))
    measured_forecast = None
    if forecast:
        try:
            measured_forecast = _forecast(definition, plugin_files)
        except NoForecastError as error:
            remarks.append(str(error))

    return StudyPlan(
        name=config.name,
        recipe=shown_path(definition.recipe.path.resolve()),
        space=[(parameter.path, str(parameter.config), ", ".join(parameter.needs)) for parameter in space.parameters],
        configurations=space.configurations if math.isfinite(space.configurations) else None,
        trials=config.budget.trials,
        trainings=config.budget.trials * config.seeds,
        budget=", ".join(_set_values(config.budget)),
        sampler=config.sampler.kind,
        pruner=config.pruner_kind,
        limits=_set_values(config.limits),
        remarks=remarks,
        forecast=measured_forecast,
    )


def _set_values(section: BudgetConfig | LimitsConfig) -> list[str]:
    """Returns the name and value of every number of a section that is not None."""
    values = section.model_dump()
    return [f"{name} {value:g}" for name, value in values.items() if value is not None]


def _remarks(definition: Definition) -> Iterator[str]:
    config = definition.config
    recipe = definition.recipe
    space = definition.space
    if config.timed:
        yield f"{config.timed[0]} is a speed, so trials run one at a time"
        load = psutil.getloadavg()[0] / usable_cores()
        if load > _BUSY_LOAD:
            yield f"the load is {load:.1f} per core: speeds measured now mean little"

    if config.constraints.get(VERIFY) == "pass":
        for stage in _statistical_stages(definition):
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

    conditional = [parameter.path for parameter in space.parameters if parameter.needs]
    if conditional:
        yield f"exists only where its stage is on, or what it requires: {', '.join(conditional)}"
    fixed_on = [kind for kind in recipe.stages if kind not in space.switches]
    if fixed_on:
        yield f"on in every trial: {', '.join(fixed_on)}"


def _statistical_stages(definition: Definition) -> Iterator[str]:
    """The searched stages whose contract only complete trainings can prove."""
    from runner.training.pipeline import resolve_device, setting_of

    recipe = definition.recipe
    stage_context = setting_of(recipe, resolve_device(recipe.device))
    for stage in definition.space.switches:
        stage_config = recipe.stages.get(stage) or definition.catalog.get(STAGES, stage)()
        if isinstance(stage_config.contract(stage_context), Statistical):
            yield stage


def _forecast(definition: Definition, plugin_files: Sequence[Path]) -> Forecast:
    """Trains the recipe as it is for a while, and extrapolates the study from the pace in the second half."""
    from runner.study.training import limits_of, train

    recipe = definition.recipe
    config = definition.config
    budget = config.budget
    goal = recipe.length[1]
    start_time = time.monotonic()
    # When each step was first reported: a step may be reported twice.
    step_times: dict[int, float] = {}

    def is_time_up(step: int) -> bool:
        if step:
            step_times.setdefault(step, time.monotonic())
        return time.monotonic() - start_time > FORECAST_SECONDS

    with tempfile.TemporaryDirectory(prefix="runner-forecast-", ignore_cleanup_errors=True) as folder:
        outcome = train(recipe, Path(folder), plugin_files, limits_of(config), is_time_up)

    if outcome.cause == Cause.DONE:
        trained_seconds = outcome.training_seconds or 0.0
        start_seconds = outcome.seconds - trained_seconds
        seconds_a_step = trained_seconds / goal
        training_seconds = outcome.seconds
    elif outcome.cause != Cause.STOPPED:
        raise RunnerError(f"the recipe as it is cannot be trained: {outcome.cause}, {outcome.reason}")
    elif len(step_times) < _FEWEST_STEPS:
        raise NoForecastError(
            f"no forecast: the recipe reported fewer than {_FEWEST_STEPS} steps in {FORECAST_SECONDS:.0f} s, start-up "
            "included; close other programs and repeat, or run the study without a forecast"
        )
    else:
        steps = list(step_times)
        times = list(step_times.values())
        # The first half may contain compilation and caches that are still cold.
        middle = len(step_times) // 2
        seconds_a_step = (times[-1] - times[middle]) / (steps[-1] - steps[middle])
        start_seconds = times[0] - start_time
        remaining_steps = max(0, goal - steps[-1])
        training_seconds = times[-1] - start_time + seconds_a_step * remaining_steps

    trial_seconds = training_seconds * config.seeds
    study_seconds = trial_seconds * budget.trials / budget.parallel
    if budget.seconds is not None:
        # The last trial may start just before the budget is spent.
        study_seconds = min(study_seconds, budget.seconds + trial_seconds)
    return Forecast(start_seconds, seconds_a_step, trial_seconds, study_seconds)
