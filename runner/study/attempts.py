"""What a trial keeps beside Optuna's own: its attempts, what they took, and what they came to by what they logged."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from runner.system.errors import UsageError
from runner.system.names import suggestion
from runner.tracking.spool import lines

if TYPE_CHECKING:
    from pathlib import Path

    from optuna.trial import FrozenTrial, Trial

    from runner.study.config import ObjectiveConfig, StudyConfig
    from runner.study.leases import Lease

# Attributes of a trial:
ATTEMPTS, RECIPE, VALUES, CAUSE = "runner.attempts", "runner.recipe", "runner.values", "runner.cause"
REASON, OVERHEAD, NEIGHBOURS, VERDICT = "runner.reason", "runner.overhead_s", "runner.neighbours", "runner.verdict"
DISTURBED = 0.1  # the share of the processor that others may take before a measurement of speed is in doubt
KILLED = "killed with its worker"
Interval = tuple[float, float]  # begin and end in seconds since 1970


class Attempts:
    """The attempts at one trial, each with ``begin``, ``seed`` (or what else it is) and then ``end`` and ``cause``."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._all: list[dict[str, Any]] = list(trial.user_attrs.get(ATTEMPTS, []))

    def close(self, seen: float) -> None:
        """Ends the attempt of a worker that is gone, at the time when it was last seen."""
        if self._all and "end" not in self._all[-1]:
            self.end(KILLED, at=max(seen, self._all[-1]["begin"]))

    def begin(self, seed: int | str) -> None:
        """Begins one."""
        self._all.append({"begin": time.time(), "seed": seed})
        self._trial.set_user_attr(ATTEMPTS, self._all)

    def end(self, cause: str, at: float | None = None) -> None:
        """Ends the last one."""
        self._all[-1] |= {"end": time.time() if at is None else at, "cause": cause}
        self._trial.set_user_attr(ATTEMPTS, self._all)

    def of(self, seed: int | str, *causes: str) -> list[dict[str, Any]]:
        """Those at one training, with one of these causes if any are given."""
        return [each for each in self._all if each["seed"] == seed and (not causes or each.get("cause") in causes)]


@dataclass(frozen=True)
class Used:
    """What of a budget is spent."""

    trials: int
    seconds: float
    device_seconds: float


def used(trials: Sequence[FrozenTrial], leases: Sequence[Lease] = ()) -> Used:
    """What the study has used in all its sessions and workers; leases say how long what has not ended was alive."""
    seen = {lease.trial: lease.seen for lease in leases}
    intervals = [
        (each["begin"], each.get("end") or max(each["begin"], seen.get(trial.number, 0.0)))
        for trial in trials
        for each in trial.user_attrs.get(ATTEMPTS, ())
    ]
    finished = sum(trial.state.is_finished() for trial in trials)
    return Used(finished, union(intervals), sum(end - begin for begin, end in intervals))


def neighbours(own_seconds: float, seconds: float) -> float:
    """The share of this process's processors that others took since ``psutil.cpu_percent`` was last asked, 0 to 1."""
    every = psutil.cpu_percent(percpu=True)
    cores = psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else [*range(len(every))]
    busy = [every[core] / 100 for core in cores or () if core < len(every)]
    return min(1.0, max(0.0, statistics.fmean(busy) - own_seconds / max(1e-9, seconds * len(busy))))


class Point(NamedTuple):
    """One logged value."""

    at: float  # seconds since 1970
    step: int
    value: float


Logged = Mapping[str, Sequence[Point]]


def logged_by(spool: Path, prefix: str) -> Logged:
    """All that a training logged, by metric, in order."""
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
    """How far the last value of every bounded metric is beyond its bound; 0 or less is within. Raises as above."""
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
    sign = 1 if objective.direction == "maximize" else -1
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
        return sign * max(sign * value for value in values)
    return statistics.fmean(values) if objective.value == "mean" else statistics.median(values)


def _points(name: str, logged: Logged) -> Sequence[Point]:
    if not logged.get(name):
        raise UsageError(f"no metric '{name}' was logged{suggestion(name, logged)}")
    return logged[name]
