"""Interface of a sink: what a run logs goes there in addition to MLflow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar


class Sink(ABC):
    """Takes the parameters and metrics of a run, in a thread beside the training.

    A sink is made when a run starts, and again when it is resumed; then it gets everything from the
    beginning. One that raised an exception is made again later.
    """

    kind: ClassVar[str]
    """The name in ``tracking.sinks``."""

    @classmethod  # noqa: B027
    def require(cls) -> None:
        """Raises a UsageError if something that the sink needs is missing here."""

    @abstractmethod
    def __init__(self, folder: Path, run_name: str) -> None:
        """Removes what an earlier process of the run has written.

        Args:
            folder: Folder of the run.
            run_name: Name of the run.
        """

    @abstractmethod
    def add_metrics(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """Takes metrics of one step.

        Args:
            metrics: Values by name; they may be NaN or infinite.
            step: Progress of the training in the unit of its length.
            time: Seconds since 1970.
        """

    def add_params(self, params: Mapping[str, str]) -> None:  # noqa: B027
        """Takes parameters of the run: values of the recipe by dotted path."""

    def flush(self) -> None:  # noqa: B027
        """Writes what has been taken so far."""

    def close(self) -> None:  # noqa: B027
        """Writes the rest; nothing is called afterwards."""
