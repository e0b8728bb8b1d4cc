"""The settings that every dataset has."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from runner.plugin.progress import Unit
from runner.plugin.source import SourceConfig


class DatasetConfig(SourceConfig):
    """Settings that every dataset has."""

    units: ClassVar[frozenset[Unit]] = frozenset({"updates", "samples", "epochs"})
    in_memory: ClassVar[bool] = False
    """Whether all of it is kept in memory, and on an accelerator where it fits."""

    workers: Annotated[int, Field(ge=0, le=64)] = 0
    """Processes that load batches; 0 loads them in the training's own."""

    def resident(self, device: str) -> bool:
        """Data that are kept in memory are made where they are used."""
        return device == "cpu" or self.in_memory
