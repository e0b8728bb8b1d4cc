"""Reduces learning rates when a metric stops improving (``lr_scheduler.kind: plateau``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from runner.plugin.schedule_state import ScheduleState
from runner.plugin.watched_metric import missing_metric
from runner.system.errors import RunnerError

if TYPE_CHECKING:
    from runner.plugin.contract import Objective
    from runner.plugin.lr_scheduler import PlateauConfig
    from runner.plugin.progress import Progress
    from runner.plugin.source import State

LEAST_REDUCTION = 1e-8
"""A rate that would fall by less stays, as in torch's ReduceLROnPlateau."""


class Plateau(ScheduleState):
    """Counts evaluations without an improvement, and reductions of the learning rates.

    An evaluation before the first update, or during the warm-up, does not count. One in which the
    metric has no finite value is one without an improvement.

    Args:
        config: The settings.
        objective: That of the recipe.

    Attributes:
        reductions: How often the learning rates were reduced.
    """

    config: PlateauConfig

    def __init__(self, config: PlateauConfig, objective: Objective | None) -> None:
        super().__init__(config, objective)
        self.reductions = 0
        self._metric, direction = config.watched(objective) or ("", "minimize")
        self._sign = 1.0 if direction == "maximize" else -1.0
        self._best = -math.inf
        self._evaluations = 0
        self._cooldown = 0

    def observe(self, metrics: Mapping[str, float], progress: Progress) -> None:
        """Takes the metrics of an evaluation.

        Raises:
            RunnerError: The evaluation has no such metric.
        """
        if self._metric not in metrics:
            problem = missing_metric(self._metric, set(metrics))
            raise RunnerError(f"lr_scheduler.metric: {problem}")
        # Rates still rise in a warm-up, so that a metric without progress shows nothing.
        if not progress.updates or progress.fraction < self.config.warmup:
            return

        value = metrics[self._metric]
        score = value * self._sign
        self._evaluations += 1
        if math.isfinite(value) and score > self._best + self.config.min_delta:
            self._best = score
            self._evaluations = 0
        if self._cooldown:
            self._cooldown -= 1
            self._evaluations = 0
        if self._evaluations > self.config.patience:
            self.reductions += 1
            self._evaluations = 0
            self._cooldown = self.config.cooldown

    def rate(self, base_rate: float) -> float:
        """Returns a learning rate after the reductions."""
        rate = base_rate
        # One after the other, because a rounded product depends on the order.
        for _ in range(self.reductions):
            reduced = max(rate * self.config.factor, self.config.min_lr)
            if rate - reduced > LEAST_REDUCTION:
                rate = reduced
        return rate

    def state_dict(self) -> State:
        """Returns what a resumed training needs to reduce rates where this one would."""
        return {
            "reductions": self.reductions,
            "best": self._best,
            "evaluations": self._evaluations,
            "cooldown": self._cooldown,
        }

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""
        self.reductions = int(state["reductions"])
        self._best = float(state["best"])
        self._evaluations = int(state["evaluations"])
        self._cooldown = int(state["cooldown"])
