"""What whoever asks whether stages are harmless may choose."""

from __future__ import annotations

from dataclasses import dataclass

UPDATES_BETWEEN_EVALUATIONS = 2
LATE = (0.5, 0.95, 1.0)
"""Shares of the training at which the last batch comes again: rates and coefficients depend on progress."""


@dataclass(frozen=True)
class Options:
    """How thoroughly to look."""

    updates: int = 12  # compared one by one for Exact and Close
    steps: int | None = None  # length of a training for Statistical; unless told, what the budget has room for
    seeds: int = 8  # the most pairs of trainings for one stage; a PASS takes as many at least
    budget: float = 3600.0  # seconds for all of it: trainings are as long as it has room for, and none begins later
    stages: tuple[str, ...] = ()  # only these, and not the recipe as a whole; all if empty
    horizon: int = 2040  # updates of a long run that says how rare an error may be to be missed; none at all if 0
    names_operators: bool = True
    """Whether a FAIL names the first operator that diverges."""
    horizon_seconds: float = 15.0  # that such a run may take for each of the two
