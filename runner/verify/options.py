"""Options of a verification."""

from __future__ import annotations

from dataclasses import dataclass

UPDATES_BETWEEN_EVALUATIONS = 2
TRAINED_UPDATES = 2
"""Updates after which a trained model is used."""
LATE = (0.5, 0.95, 1.0)
"""Shares of the training at which the last batch comes again: rates and coefficients depend on progress."""


@dataclass(frozen=True)
class Options:
    """Thoroughness of a verification."""

    updates: int = 12  # compared one by one for Exact and Close
    # Length of a training for Statistical; by default, as long as the budget allows.
    steps: int | None = None
    seeds: int = (
        8  # the most pairs of trainings for one stage; a PASS takes as many at least
    )
    budget: float = (
        3600.0  # in seconds: it limits the length of trainings, and none starts later
    )
    stages: tuple[
        str, ...
    ] = ()  # only these sets; all, and the complete recipe, if empty
    # Updates of a long run, which bounds the rate of errors that could be missed; 0 for none.
    horizon: int = 2040
    names_operators: bool = True
    """Whether a FAIL names the first operator that diverges."""
    horizon_seconds: float = 15.0  # that such a run may take for each of the two
