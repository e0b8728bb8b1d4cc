"""Attempts and logged values of trials, and the summary of a study."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import optuna
import psutil
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from runner.child.spawn import Cause
from runner.study.config import ObjectiveConfig, Parameter, StudyConfig, is_on
from runner.study.store import DEFINITION, Lease, Leases, StudyStore
from runner.system.errors import UsageError
from runner.system.names import suggestion
from runner.tracking.spool import lines
from runner.tracking.workspace import Workspace

# Attributes of a trial:
ATTEMPTS, RECIPE, VALUES, CAUSE = "runner.attempts", "runner.recipe", "runner.values", "runner.cause"
REASON, OVERHEAD, NEIGHBOURS, VERDICT = "runner.reason", "runner.overhead_s", "runner.neighbours", "runner.verdict"
DISTURBED = 0.1  # the share of the processor that others may take before a measurement of speed is in doubt
KILLED = "killed with its worker"
Interval = tuple[float, float]  # start and end in seconds since 1970
FEWEST = 5  # trials with a stage, and without, that its worth needs
FEWEST_DECIDE = 16  # trials that importance needs; with fewer it is dominated by chance
_TOP = 5  # trials that are the best, to importance, if a tenth of all are fewer
_RESAMPLES = 2000


class Attempts:
    """The attempts at one trial, each with ``begin``, ``seed`` (or another step)
    and then ``end`` and ``cause``.

    That of a worker that is gone ended when it was last seen; of one that is ``lost`` no end is kept.
    """

    def __init__(self, trial: Trial, seen: float, lost: Event) -> None:
        self._trial, self._lost = trial, lost
        self._all: list[dict[str, Any]] = list(trial.user_attrs.get(ATTEMPTS, []))
        if self._all and "end" not in self._all[-1]:
            self._all[-1] |= {"end": max(seen, self._all[-1]["begin"]), "cause": KILLED}
            trial.set_user_attr(ATTEMPTS, self._all)

    @contextmanager
    def at(self, seed: int | str) -> Iterator[dict[str, Any]]:
        """Records an attempt that lasts as long as the ``with``; its cause is
        STOPPED unless another is set.
        """
        attempt: dict[str, Any] = {"begin": time.time(), "seed": seed}
        self._all.append(attempt)
        self._trial.set_user_attr(ATTEMPTS, self._all)
        try:
            yield attempt
        finally:
            attempt |= {"end": time.time(), "cause": attempt.get("cause", Cause.STOPPED)}
            if not self._lost.is_set():
                self._trial.set_user_attr(ATTEMPTS, self._all)

    def of(self, seed: int | str, *causes: str) -> list[dict[str, Any]]:
        """Returns the attempts at one training, with one of these causes if any are given."""
        return [each for each in self._all if each["seed"] == seed and (not causes or each.get("cause") in causes)]


@dataclass(frozen=True)
class Used:
    """The used part of a budget."""

    trials: int
    seconds: float
    device_seconds: float

    @classmethod
    def by(cls, trials: Sequence[FrozenTrial], leases: Sequence[Lease] = ()) -> Used:
        """Returns the used part in all sessions and workers; leases show how long
        unfinished trials were alive.
        """
        seen = {lease.trial: lease.seen for lease in leases}
        intervals = [
            (each["begin"], each.get("end") or max(each["begin"], seen.get(trial.number, 0.0)))
            for trial in trials
            for each in trial.user_attrs.get(ATTEMPTS, ())
        ]
        finished = sum(trial.state.is_finished() for trial in trials)
        return cls(finished, union(intervals), sum(end - begin for begin, end in intervals))


def neighbours(own_seconds: float, seconds: float) -> float:
    """Returns the share of this process's processors that others used since the last call of
    ``psutil.cpu_percent``, 0 to 1.
    """
    every = psutil.cpu_percent(percpu=True)
    cores = psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else [*range(len(every))]
    busy = [every[core] / 100 for core in cores or () if core < len(every)]
    return min(1.0, max(0.0, statistics.fmean(busy) - own_seconds / max(1e-9, seconds * len(busy))))


class Point(NamedTuple):
    """A logged value."""

    at: float  # seconds since 1970
    step: int
    value: float


Logged = Mapping[str, Sequence[Point]]


def logged_by(spool: Path, prefix: str) -> Logged:
    """Returns all logged values of a training, by metric, in order."""
    found: dict[str, list[Point]] = defaultdict(list)
    for line, _ in lines(spool):
        for name, value in line.metrics.items():
            found[name.removeprefix(prefix)].append(Point(line.t / 1e3, line.step, value))
    return found


def objectives(config: StudyConfig, logged: Logged, active: Sequence[Interval]) -> dict[str, float | None]:
    """The value of every objective by what one training logged, and by when it was active.

    None if what it is to reach was not reached; a ``UsageError`` if a metric was not logged.
    """
    return {name: _value(each, _points(name, logged), active) for name, each in config.objectives.items()}


def bounds(config: StudyConfig, logged: Logged) -> dict[str, float]:
    """Returns by how much the last value of every bounded metric exceeds its bound; 0 or less is
    within. Raises as above.
    """
    found = {}
    for name, bound in config.constraints.items():
        if not isinstance(bound, str):
            last = _points(name, logged)[-1].value
            beyond = [sign * (last - end) for sign, end in ((-1, bound.min), (1, bound.max)) if end is not None]
            found[name] = math.inf if math.isnan(last) else max(beyond)
    return found


def union(intervals: Sequence[Interval]) -> float:
    """Seconds that at least one of the intervals covers."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _value(objective: ObjectiveConfig, points: Sequence[Point], active: Sequence[Interval]) -> float | None:
    best, sign = (max, 1) if objective.direction == "maximize" else (min, -1)
    if objective.reach is not None:
        first = next((point for point in points if sign * point.value >= sign * objective.reach), None)
        if first is None or objective.reach_in == "progress":
            return None if first is None else float(first.step)
        return union([(begin, min(end, first.at)) for begin, end in active if begin < first.at])
    values = [point.value for point in points]
    if objective.value in (None, "last"):
        return values[-1]
    if any(map(math.isnan, values)):  # which has no order
        return math.nan
    if objective.value == "best":
        return best(values)
    return statistics.fmean(values) if objective.value == "mean" else statistics.median(values)


def _points(name: str, logged: Logged) -> Sequence[Point]:
    if not logged.get(name):
        raise UsageError(f"no metric '{name}' was logged{suggestion(name, logged)}")
    return logged[name]


@dataclass(frozen=True)
class Row:
    """The row of a trial."""

    number: int
    state: str  # Optuna's: COMPLETE, PRUNED, FAIL, RUNNING or WAITING
    # The result: done, pruned, out of memory, diverged, ...; infeasible if a bound is violated.
    cause: str
    reason: str
    values: Mapping[str, float]
    settings: Mapping[str, Any]
    verdict: str  # of the gate; empty if it did not judge
    best: bool  # whether nothing is better in all objectives
    is_recipe: bool  # whether it is the recipe as it was given
    seconds: float
    recipe: Mapping[str, Any] | None  # with its settings, once it was put together


@dataclass(frozen=True)
class Worth:
    """A stage across the study: the median of an objective with it and without."""

    stage: str
    objective: str
    on: float
    off: float
    low: float  # of the 95 % bootstrap interval of the difference of the medians
    high: float
    trials_on: int
    trials_off: int


@dataclass(frozen=True)
class Summary:
    """The output of ``runner study show``."""

    name: str
    file: str
    objectives: Mapping[str, str]  # direction by metric
    budget: Mapping[str, Any]
    used: Used
    seconds_left: float | None  # for the rest of the budget's trials, at the pace so far; None if there is none yet
    rows: Sequence[Row]
    importance: Mapping[str, Mapping[str, float]]  # share of each setting, by objective
    worth: Sequence[Worth]
    causes: Mapping[str, int]
    overhead_s: float | None  # the runner's overhead per trial, in the median
    disturbed: int  # trials whose measured speed is in doubt
    seeds: int  # trainings of a trial
    logarithmic: Sequence[str]  # settings that are searched by their logarithm
    dashboard: str  # the command that shows the study in optuna-dashboard
    synthetic: bool = False  # whether the data are synthetic

    @property
    def best(self) -> list[Row]:
        """The best trial, or the Pareto front, in the order of the first objective."""
        name, direction = next(iter(self.objectives.items()))
        front = [row for row in self.rows if row.best]
        return sorted(front, key=lambda row: row.values[name], reverse=direction == "maximize")

    def data(self) -> dict[str, Any]:
        """Returns the summary as a JSON object."""
        data = asdict(self) | {"best": [row.number for row in self.best]}
        for row in data["rows"]:
            del row["recipe"]
        return data


def find(reference: str, workspace: Workspace) -> Summary:
    """Returns the present summary of a study by its name or its file."""
    with StudyStore.session(workspace, reading=True) as store:
        study = store.find(reference)
        return summarise(study, Leases(store.engine, study.study_name).all(), store.dashboard)


def summarise(study: Study, leases: Sequence[Lease] = (), dashboard: str = "") -> Summary:
    """Summarises a study of the runner; leases identify the trials that workers are running now."""
    described = study.user_attrs[DEFINITION]
    config = StudyConfig.model_validate(described["config"])
    waits = TrialState.WAITING  # beyond a budget that was lowered
    trials = [t for t in study.get_trials(deepcopy=False) if t.number < config.budget.trials or t.state != waits]
    counting = [t for t in trials if t.state == TrialState.COMPLETE and all(v <= 0 for v in t.constraints.values())]
    front = {trial.number for trial in study.best_trials} if counting else set()
    rows, used = [_row(trial, config, trial.number in front) for trial in trials], Used.by(trials, leases)
    left = None
    if used.trials:
        left = used.seconds / used.trials * (len(trials) - used.trials)
        if config.budget.seconds is not None:
            left = max(0.0, min(left, config.budget.seconds - used.seconds))
    overheads = [trial.user_attrs[OVERHEAD] for trial in trials if OVERHEAD in trial.user_attrs]
    directions = (direction.name.lower() for direction in study.directions)
    return Summary(
        name=study.study_name, file=described["file"], budget=config.budget.model_dump(mode="json"),
        objectives=dict(zip(config.objectives, directions, strict=True)), used=used, seconds_left=left, rows=rows,
        causes=dict(Counter(row.cause for row, trial in zip(rows, trials, strict=True) if trial.state.is_finished())),
        importance=_importance(study, list(config.objectives), counting),
        worth=_worths([row for row in rows if row.cause == "done"], config),
        overhead_s=statistics.median(overheads) if overheads else None,
        disturbed=sum(trial.user_attrs.get(NEIGHBOURS, 0.0) > DISTURBED for trial in trials),
        seeds=config.seeds, logarithmic=[path for path, each in config.space.items() if each.log], dashboard=dashboard,
        synthetic=described.get("synthetic", False),
    )  # fmt: skip


def _row(trial: FrozenTrial, config: StudyConfig, best: bool) -> Row:
    attributes, cause = trial.user_attrs, trial.state.name.lower()
    reason = str(attributes.get(REASON, ""))
    broken = [f"{name} is {value:.4g} beyond its bound" for name, value in trial.constraints.items() if value > 0]
    if trial.state == TrialState.COMPLETE and broken:
        cause, reason = "infeasible", reason or ", ".join(broken)
    elif trial.state.is_finished():
        cause = str(attributes.get(CAUSE, cause))
    return Row(
        number=trial.number, state=trial.state.name, cause=cause, reason=reason, best=best,
        values=dict(zip(config.objectives, trial.values or (), strict=False)),
        settings=attributes.get(VALUES, {}), verdict=str(attributes.get(VERDICT, {}).get("outcome", "")),
        is_recipe=trial.number == 0 and bool(trial.system_attrs.get("fixed_params")),
        seconds=Used.by([trial]).device_seconds, recipe=attributes.get(RECIPE),
    )  # fmt: skip


def _importance(study: Study, names: Sequence[str], counting: Sequence[FrozenTrial]) -> dict[str, dict[str, float]]:
    """Returns the importance of each setting by PED-ANOVA (Watanabe, Bansal and Hutter 2023): how
    it separates the best trials.
    """
    if len(counting) < FEWEST_DECIDE:
        return {}
    evaluator = PedAnovaImportanceEvaluator(target_quantile=max(0.1, _TOP / len(counting)))
    found = {}
    for number, (name, direction) in enumerate(zip(names, study.directions, strict=True)):
        plain = optuna.create_study(direction=direction)  # of this objective alone, and without what failed
        plain.add_trials(
            optuna.create_trial(params=each.params, distributions=each.distributions, value=each.values[number])
            for each in counting
        )
        if len({trial.values[number] for trial in counting}) > 1:
            with suppress(ValueError, RuntimeError):  # it raises where nothing varies
                found[name] = dict(get_param_importances(plain, evaluator=evaluator))
    return found


def _worths(done: Sequence[Row], config: StudyConfig) -> list[Worth]:
    """Every stage that is switched, with the 95 % percentile bootstrap interval (Efron and Tibshirani 1993)."""
    found = []
    for parameter, name in itertools.product(map(Parameter, config.space, config.space.values()), config.objectives):
        if parameter.stage is None:
            continue
        on = [row.values[name] for row in done if is_on(row.settings[parameter.path])]
        off = [row.values[name] for row in done if not is_on(row.settings[parameter.path])]
        if min(len(on), len(off)) >= FEWEST:
            draw = np.random.default_rng(0)
            medians = [np.median(draw.choice(each, (_RESAMPLES, len(each))), axis=1) for each in (on, off)]
            low, high = map(float, np.quantile(medians[0] - medians[1], [0.025, 0.975]))
            middle = statistics.median(on), statistics.median(off)
            found.append(Worth(parameter.stage, name, *middle, low, high, len(on), len(off)))
    return found
