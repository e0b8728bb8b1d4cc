"""Decides whether a training ends before its length, as ``train.stop`` requires."""

from __future__ import annotations

import math
from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING

from runner.system.errors import RunnerError
from runner.system.text_lines import amount, duration, figure

if TYPE_CHECKING:
    from runner.plugin.contract import Objective
    from runner.plugin.progress import Progress
    from runner.plugin.source import State
    from runner.recipe.stopping import StopConfig


class EarlyStop:
    """The condition of a recipe, and what has been seen of its metric.

    An evaluation in which the metric has no finite value is one without an improvement, and does
    not enter the moving average.

    Attributes:
        reason: Why the training ends; empty until it does.
    """

    def __init__(self, config: StopConfig, objective: Objective | None) -> None:
        self.config = config
        self.reason = ""
        watched = config.watched(objective)
        self._metric, direction = watched or ("", "minimize")
        self._sign = 1.0 if direction == "maximize" else -1.0
        self._best = -math.inf
        self._best_at = 0
        self._average = math.nan
        self._evaluations = 0
        # Seconds when the clock was last read, those before an interruption included.
        self._seconds = 0.0
        self._counted_since = perf_counter()

    def ends(self, progress: Progress) -> bool:
        """Returns whether the training ends here."""
        limit = self.config.seconds
        if limit is not None and not self.reason:
            now = perf_counter()
            self._seconds += now - self._counted_since
            self._counted_since = now
            if self._seconds >= limit:
                self._end(progress, f"{duration(limit)} of training are over")
        return bool(self.reason)

    def observe(self, metrics: Mapping[str, float], progress: Progress) -> None:
        """Takes the metrics of an evaluation, by name without ``eval/``.

        Raises:
            RunnerError: The evaluation has no such metric.
        """
        if not self._metric:
            return
        if self._metric not in metrics:
            names = ", ".join(f"eval/{name}" for name in sorted(metrics))
            raise RunnerError(
                f"train.stop.metric: the evaluation has no 'eval/{self._metric}'; it has {names}"
            )
        value = self._smoothed(metrics[self._metric])
        # Without a finite value, nothing is reached or improved.
        score = value * self._sign if math.isfinite(value) else -math.inf
        if score > self._best + self.config.min_delta:
            self._best = score
            self._best_at = progress.done
            self._evaluations = 0
        else:
            self._evaluations += 1
        self._judge(value, score, progress)

    def state_dict(self) -> State:
        """Returns what a resumed training needs to end where this one would."""
        return {
            "best": self._best,
            "best_at": self._best_at,
            "average": self._average,
            "evaluations": self._evaluations,
            "seconds": self._seconds,
            "reason": self.reason,
        }

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""
        best = float(state["best"])
        # Earlier versions took an infinite value for the best.
        self._best = best if math.isfinite(best) else -math.inf
        self._best_at = int(state["best_at"])
        self._average = float(state["average"])
        self._evaluations = int(state["evaluations"])
        self._seconds = float(state["seconds"])
        self._counted_since = perf_counter()
        self.reason = str(state["reason"])

    def _smoothed(self, value: float) -> float:
        """Returns the moving average of the metric with a new value; a value that is not finite
        itself.
        """
        if not math.isfinite(value):
            return value
        # Earlier versions averaged infinite values, too.
        if not math.isfinite(self._average):
            self._average = value
        weight = self.config.smoothing
        self._average = weight * self._average + (1 - weight) * value
        return self._average

    def _judge(self, value: float, score: float, progress: Progress) -> None:
        config = self.config
        metric = f"eval/{self._metric}"
        if config.reach is not None and score >= config.reach * self._sign:
            self._end(progress, f"{metric} has reached {figure(value)}")
        elif config.patience is not None and self._evaluations >= config.patience:
            best = f"the best is {figure(self._best * self._sign)} after "
            best += amount(self._best_at, progress.unit)
            if math.isinf(self._best):
                best = "it never had a finite value"
            self._end(
                progress,
                f"{metric} did not improve in {self._evaluations} evaluations; {best}",
            )

    def _end(self, progress: Progress, reason: str) -> None:
        # A simulator is evaluated during its warm-up, too, before there is a trained model.
        if progress.updates and progress.done >= self.config.not_before:
            self.reason = reason
