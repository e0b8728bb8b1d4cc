"""Interfaces for logging metrics and displaying progress."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class MetricLog(Protocol):
    """Sink for training metrics."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Logs metrics of one step."""

    def mark(self) -> int:
        """Returns the position at which a resumed run continues the log."""

    def sync(self) -> None:
        """Makes everything logged so far durable."""


class Display(Protocol):
    """Display of the progress of a training."""

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Shows progress and the newest value of every metric.

        Called several times per second, and after the last update.
        """

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Surrounds an activity that takes a while; activities can be nested."""

    def improved(self, best: float) -> None:
        """Called with the best objective so far."""


class NoOutput:
    """Discards all metrics and displays nothing."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Forgets the metrics."""

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Shows nothing."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Shows nothing."""
        return nullcontext()

    def improved(self, best: float) -> None:
        """Shows nothing."""

    def sync(self) -> None:
        """Does nothing, because nothing is written."""

    def mark(self) -> int:
        """Returns 0, because nothing is resumed."""
        return 0
