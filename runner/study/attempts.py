"""What the study's storage keeps of a trial beside Optuna's own: its attempts, from when each begins, and its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
from optuna.trial import FrozenTrial, Trial

from runner.study.config import BudgetConfig
from runner.study.values import Interval, union

if TYPE_CHECKING:
    from runner.study.leases import Lease

ATTEMPTS, RECIPE, VALUES, CAUSE, REASON, OVERHEAD, NEIGHBOURS, VERDICT = (
    f"runner.{name}"
    for name in ("attempts", "recipe", "values", "cause", "reason", "overhead_s", "neighbours", "verdict")
)
"""Attributes of a trial."""
DISTURBED = 0.1
"""The share of the processor that others may take before a measurement of speed counts as disturbed."""
GATE = "gate"
"""Stands in the place of a seed where the gate was asked."""
KILLED = "killed with its worker"


class Attempts:
    """The attempts at one trial; each has ``begin``, ``seed`` and, when it is over, ``end`` and ``cause``.

    Args:
        trial: of this worker.
    """

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._all: list[dict[str, Any]] = list(trial.user_attrs.get(ATTEMPTS, []))

    def close(self, seen: float) -> None:
        """Ends the attempt of a worker that is gone, at the time when it was last seen."""
        if self._all and "end" not in self._all[-1]:
            self.end(KILLED, at=max(seen, self._all[-1]["begin"]))

    def begin(self, seed: int | str) -> None:
        """An attempt begins."""
        self._all.append({"begin": time.time(), "seed": seed})
        self._trial.set_user_attr(ATTEMPTS, self._all)

    def end(self, cause: str, at: float | None = None) -> None:
        """It is over."""
        self._all[-1] |= {"end": time.time() if at is None else at, "cause": cause}
        self._trial.set_user_attr(ATTEMPTS, self._all)

    def of(self, seed: int | str, *causes: str) -> list[dict[str, Any]]:
        """Those at one training, with one of these causes if any are given."""
        return [each for each in self._all if each["seed"] == seed and (not causes or each.get("cause") in causes)]

    def intervals(self, seed: int | str) -> list[Interval]:
        """When one training went on."""
        return [(each["begin"], each["end"]) for each in self.of(seed) if "end" in each]


@dataclass(frozen=True)
class Used:
    """What of a budget is spent."""

    trials: int
    seconds: float
    device_seconds: float

    def exhausted(self, budget: BudgetConfig) -> str:
        """Which part of the budget keeps further trials from being begun; empty if none does."""
        if budget.seconds is not None and self.seconds >= budget.seconds:
            return f"{budget.seconds:g} s of trials"
        if budget.device_seconds is not None and self.device_seconds >= budget.device_seconds:
            return f"{budget.device_seconds:g} s on devices"
        return ""


def used(trials: Sequence[FrozenTrial], leases: Sequence[Lease] = ()) -> Used:
    """What the study has used in all its sessions and workers.

    Args:
        trials: of the study.
        leases: say how long an attempt that has not ended was alive.
    """
    seen = {lease.trial: lease.seen for lease in leases}
    intervals: list[Interval] = []
    for trial in trials:
        for each in trial.user_attrs.get(ATTEMPTS, ()):
            end = each.get("end") or max(each["begin"], seen.get(trial.number, each["begin"]))
            intervals.append((each["begin"], end))
    finished = sum(trial.state.is_finished() for trial in trials)
    return Used(finished, union(intervals), sum(end - begin for begin, end in intervals))


class Neighbours:
    """What others take of the processors that this process may use; from when it is made."""

    def __init__(self) -> None:
        self._cores = sorted(psutil.Process().cpu_affinity() or ()) if hasattr(psutil.Process, "cpu_affinity") else None
        self._began = time.monotonic()
        self._busy = self._now()

    def share(self, own_seconds: float) -> float:
        """The share of the processors' time that was not this one's own, 0 to 1."""
        spent = (time.monotonic() - self._began) * max(1, len(self._times()))
        return min(1.0, max(0.0, self._now() - self._busy - own_seconds) / max(1e-9, spent))

    def _times(self) -> list[Any]:
        every = psutil.cpu_times(percpu=True)
        return [every[core] for core in self._cores if core < len(every)] if self._cores else list(every)

    def _now(self) -> float:
        """Seconds that these processors have worked."""
        return float(sum(sum(each) - each.idle - getattr(each, "iowait", 0.0) for each in self._times()))
