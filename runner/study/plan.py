"""What a study will try, what it will cost, and what stands in its way, before its first trial."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from runner.child.spawn import Cause
from runner.plugin.contract import Statistical
from runner.study.config import STAGES, VERIFY
from runner.study.training import limits_of, train
from runner.system.errors import RunnerError
from runner.system.hardware import usable_cores
from runner.system.names import shown_path
from runner.train.assemble import resolve_device, setting_of

if TYPE_CHECKING:
    from runner.study.definition import Definition

FORECAST_SECONDS = 30.0
_LOUD = 0.25  # load for each core from which on a measurement of speed is not worth beginning


@dataclass(frozen=True)
class Forecast:
    """What one short training of the recipe as it is says about the study."""

    start_seconds: float  # until the training begins
    seconds_a_step: float
    trial_seconds: float
    study_seconds: float  # of all trials, if none ends early and all are as fast as the recipe as it is


@dataclass(frozen=True)
class StudyPlan:
    """What ``runner study plan`` says."""

    name: str
    recipe: str
    space: tuple[tuple[str, str, str], ...]  # path, values, and the stages that the setting needs
    configurations: float
    trials: int
    trainings: int
    budget: str
    sampler: str
    pruner: str
    limits: tuple[str, ...]
    remarks: tuple[str, ...]
    forecast: Forecast | None

    def data(self) -> dict[str, Any]:
        """As one JSON object."""
        return asdict(self) | ({} if math.isfinite(self.configurations) else {"configurations": None})


def plan(definition: Definition, plugin_files: Sequence[Path], forecast: bool) -> StudyPlan:
    """Looks ahead, for a forecast by half a minute of training; a ``RunnerError`` if the recipe cannot be trained."""
    config, space = definition.config, definition.space
    budget, limits = (
        [f"{name} {value:g}" for name, value in section.model_dump().items() if value is not None]
        for section in (config.budget, config.limits)
    )
    return StudyPlan(
        name=config.name, recipe=shown_path(definition.recipe.path.resolve()), configurations=space.configurations,
        space=tuple((each.path, str(each), ", ".join(each.needs)) for each in space.parameters),
        trials=config.budget.trials, trainings=config.budget.trials * config.seeds, budget=", ".join(budget),
        sampler=config.sampler.kind, pruner=config.pruner_kind, limits=tuple(limits),
        remarks=tuple(_remarks(definition)), forecast=_forecast(definition, plugin_files) if forecast else None,
    )  # fmt: skip


def _remarks(definition: Definition) -> Iterator[str]:
    config, recipe, space = definition.config, definition.recipe, definition.space
    if config.timed:
        yield f"{config.timed[0]} is a matter of time: trials run one at a time on a machine"
        load = psutil.getloadavg()[0] / usable_cores()
        if load > _LOUD:
            yield f"the load is {load:.1f} for each core of this machine: what is measured now says little"
    if config.constraints.get(VERIFY) == "pass":
        setting = setting_of(recipe, resolve_device(recipe.device))
        for stage in space.switches:
            promised = (recipe.stages.get(stage) or definition.catalog.get(STAGES, stage)()).contract(setting)
            if isinstance(promised, Statistical):
                yield (
                    f"{stage} promises what only whole trainings can show (Statistical): with verify: pass no "
                    "configuration with it counts; verify: no_fail lets it through"
                )
    if config.pruner_kind in ("median", "hyperband") and recipe.train.evaluate_every is None:
        yield "nothing is pruned: train.evaluate_every is null, so that a training is judged at its end only"
    if recipe.train.checkpoint_every is None:
        yield "train.checkpoint_every is null: a trial that is interrupted begins anew"
    if space.configurations <= config.budget.trials:
        yield f"{config.budget.trials} trials are more than there are configurations"
    if conditional := [each.path for each in space.parameters if each.needs]:
        yield f"exists only where its stage is on, or what it requires: {', '.join(conditional)}"
    if fixed_on := [kind for kind in recipe.stages if kind not in space.switches]:
        yield f"on in every trial: {', '.join(fixed_on)}"


def _forecast(definition: Definition, plugin_files: Sequence[Path]) -> Forecast:
    """Trains the recipe as it is for a while, and takes its pace in the second half of that for the study's."""
    recipe, config, budget = definition.recipe, definition.config, definition.config.budget
    goal, begun = recipe.length[1], time.monotonic()
    seen: list[tuple[float, int]] = []

    def enough(step: int) -> bool:
        if step != (seen[-1][1] if seen else 0):
            seen.append((time.monotonic(), step))
        return time.monotonic() - begun > FORECAST_SECONDS

    with tempfile.TemporaryDirectory(prefix="runner-forecast-", ignore_cleanup_errors=True) as folder:
        ended = train(recipe, Path(folder), plugin_files, limits_of(config), enough)
    if ended.cause == Cause.DONE:
        trained = ended.training_seconds or 0.0
        start, pace, training = ended.seconds - trained, trained / goal, ended.seconds
    elif ended.cause != Cause.STOPPED:
        raise RunnerError(f"the recipe as it is cannot be trained: {ended.cause}, {ended.reason}")
    elif len(seen) < 4:
        raise RunnerError(f"in {FORECAST_SECONDS:.0f} s the recipe as it is made too few steps for a forecast")
    else:
        middle, last = seen[len(seen) // 2], seen[-1]
        start, pace = max(0.0, seen[0][0] - begun), (last[0] - middle[0]) / max(1, last[1] - middle[1])
        training = last[0] - begun + pace * max(0, goal - last[1])
    trial = training * config.seeds
    study = trial * budget.trials / budget.parallel
    return Forecast(start, pace, trial, study if budget.seconds is None else min(study, budget.seconds + trial))
