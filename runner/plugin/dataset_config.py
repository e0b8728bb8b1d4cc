"""The settings that every dataset has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from runner.plugin.files import Anchor, DataFile, find, folders
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


class FileDatasetConfig(DatasetConfig):
    """Settings of a dataset that is read from files."""

    root: Annotated[str | None, Anchor()] = None
    """A folder in which its files are looked for first, before RUNNER_DATA and the user's cache."""

    def locate(self, name: str) -> Path | None:
        """Where a file is: an absolute path itself, anything else in the folders of data; None if it is nowhere.

        Raises:
            UsageError: it is called like one of ``files``, and holds something else.
        """
        return find(name, self.root, self.files)

    def nowhere(self, name: str) -> str:
        """What to say of a file that is nowhere, and what to do about it."""
        if Path(name).is_absolute():
            return f"no such file: {name}"
        message = f"no '{name}' in {', '.join(map(str, folders(self.root)))}"
        if any(file.name == name for file in self.files):
            return f"{message}; get it with: runner data get {name}"
        return f"{message}, nor beside the recipe"

    def wanted(self) -> tuple[DataFile, ...]:
        """Those of ``files`` that these settings need."""
        return self.files

    def absent(self) -> list[DataFile]:
        """Those that these settings need and that are not here."""
        return [file for file in self.wanted() if self.locate(file.name) is None]
