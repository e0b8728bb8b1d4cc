"""Base class of the part of a learning-rate schedule that evaluations change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.plugin.contract import Objective
    from runner.plugin.progress import Progress
    from runner.plugin.source import State


class ScheduleState(ABC):
    """Changes learning rates after evaluations, in addition to the schedule's multiplier.

    Args:
        config: The settings of the schedule.
        objective: The objective of the recipe; None if it has none.
    """

    def __init__(self, config: Any, objective: Objective | None) -> None:
        self.config = config
        self.objective = objective

    @abstractmethod
    def observe(self, metrics: Mapping[str, float], progress: Progress) -> None:
        """Called after every evaluation, with its metrics by name, without ``eval/``."""

    @abstractmethod
    def rate(self, base_rate: float) -> float:
        """Returns the learning rate that replaces a base rate until the next evaluation.

        The rate of an update is this one times the schedule's multiplier.

        Args:
            base_rate: The learning rate of a parameter group in the recipe.
        """

    @abstractmethod
    def state_dict(self) -> State:
        """Returns the state that a resumed run needs to continue bit for bit."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""


class NoState(ScheduleState):
    """The state of a schedule that depends on the progress alone."""

    def observe(self, metrics: Mapping[str, float], progress: Progress) -> None:
        """Changes nothing."""

    def rate(self, base_rate: float) -> float:
        """Returns the base rate."""
        return base_rate

    def state_dict(self) -> State:
        """Returns nothing."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restores nothing."""
