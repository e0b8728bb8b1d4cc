"""Options of a verification."""

from __future__ import annotations

import math
from dataclasses import dataclass

UPDATES_BETWEEN_EVALUATIONS = 2
TRAINED_UPDATES = 2
"""Updates after which a trained model is used."""
LATE = (0.5, 0.95, 1.0)
"""Shares of the training at which the last batch comes again: rates and coefficients
depend on progress.
"""


@dataclass(frozen=True)
class Options:
    """Thoroughness of a verification.

    Attributes:
        updates: Updates that are compared one by one for Exact and Close.
        steps: Length of a training for Statistical; by default, as long as the budget
            allows.
        seeds: The most pairs of trainings for one stage; a PASS takes at least as many.
        budget: Seconds; they limit the length of trainings, and none starts later.
        stages: Sets of stages to judge; if empty, each stage and the complete recipe.
        horizon: Updates of a long run, which bounds the rate of undetected errors; 0
            for no long run.
        names_operators: Whether a FAIL names the first operator that diverges.
        horizon_seconds: Time of a long run, for each of the two.
        completes_horizon: Whether the long run has all updates of the horizon, as far as the budget
            allows, instead of those that fit into its time.
    """

    updates: int = 12
    steps: int | None = None
    seeds: int = 8
    budget: float = 3600.0
    stages: tuple[str, ...] = ()
    horizon: int = 2040
    names_operators: bool = True
    horizon_seconds: float = 15.0
    completes_horizon: bool = False

    @property
    def long_run_seconds(self) -> float:
        """Returns the time of a long run; inf if only its updates and the budget limit it."""
        return math.inf if self.completes_horizon else self.horizon_seconds
