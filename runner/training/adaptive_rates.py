"""Learning rates of a schedule that reacts to evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from runner.plugin.implementation import imported
from runner.system import generators
from runner.system.errors import RunnerError

if TYPE_CHECKING:
    from runner.plugin.progress import Progress
    from runner.plugin.schedule_state import ScheduleState
    from runner.plugin.source import State
    from runner.recipe.recipe import Recipe


class RateSource(Protocol):
    """Learning rates that replace those of a recipe."""

    def rate(self, base_rate: float) -> float:
        """Returns the learning rate that replaces a base rate."""


class AdaptiveRates:
    """The state of a recipe's schedule, with the learning rates that follow from it.

    RateSource change after evaluations only, so that a resumed run has them in the same updates.

    Args:
        recipe: A recipe whose schedule reacts to evaluations.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.kind = recipe.lr_scheduler.kind
        implementation: type[ScheduleState] = imported(recipe.lr_scheduler)
        self.state = implementation(recipe.lr_scheduler, recipe.objective)
        # By base rate, since the last evaluation.
        self._rates: dict[float, float] = {}

    def observe(self, metrics: Mapping[str, float], progress: Progress) -> None:
        """Takes the metrics of an evaluation, by name without ``eval/``."""
        # Random numbers that a plugin draws do not change those of the training.
        random_state = generators.state_dict()
        try:
            self.state.observe(metrics, progress)
        finally:
            generators.load_state_dict(random_state)
        self._rates = {}

    def rate(self, base_rate: float) -> float:
        """Returns the learning rate that replaces a base rate.

        Raises:
            RunnerError: The schedule returned no finite number of at least 0.
        """
        rate = self._rates.get(base_rate)
        if rate is None:
            rate = self.state.rate(base_rate)
            is_valid = isinstance(rate, int | float) and math.isfinite(rate)
            if not is_valid or rate < 0:
                method = f"{type(self.state).__name__}.rate"
                expected = "a finite number of at least 0"
                raise RunnerError(f"{method} should return {expected}, got {rate!r}")
            self._rates[base_rate] = float(rate)
        return rate

    def state_dict(self) -> State:
        """Returns what a resumed training needs to have the same learning rates."""
        return {"kind": self.kind, "state": self.state.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned; a schedule of another kind starts without it."""
        if state["kind"] == self.kind:
            self.state.load_state_dict(state["state"])
        self._rates = {}
