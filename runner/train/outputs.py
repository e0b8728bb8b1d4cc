"""Where a training logs its metrics and shows its progress."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class MetricLog(Protocol):
    """Who keeps what the training logs."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Logs metrics of one step."""

    def mark(self) -> int:
        """Where a run that resumes here goes on."""

    def sync(self) -> None:
        """Makes durable what was logged so far."""


class Display(Protocol):
    """Who shows a person how the training goes."""

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Shows progress and the newest value of every metric."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Entered around what takes a while, which may be inside of something else that does."""

    def improved(self, best: float) -> None:
        """Told the best value of the objective so far."""


class NoOutput:
    """Keeps nothing of what a training logs, and shows nothing."""

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
        """Nothing is written."""

    def mark(self) -> int:
        """Nothing is resumed."""
        return 0
