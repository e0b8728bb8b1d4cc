"""Where batches come from: the settings of a source, and the source itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from runner.plugin.config import Config
from runner.plugin.contract import Objective
from runner.plugin.files import Anchor, DataFile, find, folders
from runner.plugin.progress import Progress, Unit
from runner.system.tree import map_tensors, tensors

if TYPE_CHECKING:
    from torch import Tensor

    from runner.plugin.context import Context
    from runner.plugin.learner import Learner

Batch = Any
"""A tree of tensors: dictionaries, lists and tuples in one another. Its size is the source's to say."""
State = dict[str, Any]
"""Nested dictionaries and lists of tensors, rings, numbers, strings and None: what a checkpoint can hold."""
_READ_ROWS = 4096


@dataclass(frozen=True)
class Ring:
    """A ring buffer in a state: rows numbered as they were written, of which the newest ``capacity`` are kept.

    A row never changes once it is written, so a checkpoint needs to write only those that the one before has not.
    """

    capacity: int
    written: int
    """Rows ever written."""
    read: Callable[[int, int], Tensor]
    """The rows with numbers from the first argument up to the second, which is left out: [rows, ...], on any device."""

    @property
    def first(self) -> int:
        """Number of the oldest row that is kept."""
        return max(0, self.written - self.capacity)

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """All rows that are kept, a few thousand at a time, each time with the number of the first."""
        for start in range(self.first, self.written, _READ_ROWS):
            yield start, self.read(start, min(start + _READ_ROWS, self.written))


class SourceConfig(Config, ABC):
    """The settings of a source, and where its works are. The docstring is its card."""

    kind: ClassVar[str]
    """The name under which it is registered: ``data.kind``."""
    provides: ClassVar[str]
    """The form of its batches, matched with ``LearnerConfig.learns_from``."""
    units: ClassVar[frozenset[Unit]] = frozenset({"updates", "samples"})
    """What it counts, so what a training on it can be counted in."""
    headline: ClassVar[tuple[str, ...]] = ()
    """The evaluation metrics that a person looks at first, without ``eval/``."""
    objective: ClassVar[Objective | None] = None
    """By what a model is judged; None leaves it to the learner."""
    depends_on_feedback: ClassVar[bool] = False
    """Whether what an update returns changes which batches are drawn next (priorities)."""
    shapes_vary: ClassVar[bool] = False
    """Whether batches of one size may have tensors of different shapes."""
    files: ClassVar[tuple[DataFile, ...]] = ()
    """Published files that it can read; ``runner data`` lists and fetches them."""

    @abstractmethod
    def implementation(self) -> type[Source]:
        """Imports and returns the source's class."""

    def absent(self) -> list[DataFile]:
        """Those of ``files`` that these settings need and that are not here."""
        return []

    def largest_batch(self) -> int | None:
        """The largest batch that can be drawn, None if there is no limit."""
        return None

    def resident(self, device: str) -> bool:
        """Whether its batches are made on a device of that type (``cpu``, ``cuda``), so that none has to be moved."""
        return device == "cpu"

    def contradictions(self, unit: Unit, length: int) -> Iterator[tuple[str, str]]:
        """What in these settings cannot be in a training of that length: pairs of a key and what is wrong with it."""
        return iter(())


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
        """Where a file is, as ``find`` says: an absolute path itself, anything else in the folders of data."""
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


class Source(ABC):
    """Where batches come from: the base of what evaluates a model itself (a simulator, a sampler).

    For a dataset there is ``DatasetSource``.
    """

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of the tensors in a batch by name, without the batch dimension, as far as a learner needs to know them."""
    sizes: Mapping[str, int] = {}
    """What else a learner may need to know, by name (``classes``, ``vocabulary``)."""
    activities: ClassVar[tuple[str, ...]] = ()
    """Slots that the source defines and whose time is reported apart."""

    @abstractmethod
    def __init__(self, config: Any, context: Context) -> None: ...

    def bind(self, learner: Learner) -> None:  # noqa: B027 (a dataset does not need it)
        """Gets to know who learns; a simulator acts with it."""

    @abstractmethod
    def draw(self, batch_size: int, progress: Progress) -> Batch | None:
        """The next batch, or None if the source has moved on without having one (a simulator that warms up)."""

    def ahead(self) -> int:
        """How many more batches may be drawn now without any update, or its feedback, changing what they hold."""
        return 0

    def size(self, batch: Batch) -> int:
        """How many samples a batch holds: unless told, the first dimension of its first tensor."""
        return len(next(tensors(batch)))

    def split(self, batch: Batch, size: int) -> Iterator[Batch]:
        """Cuts a batch into parts of so many samples; the last may be smaller.

        Unless told, every tensor whose first dimension is the batch's size is cut, and others go into every part.
        """
        rows = self.size(batch)

        def part(start: int, tensor: Tensor) -> Tensor:
            return tensor[start : start + size] if tensor.dim() and len(tensor) == rows else tensor

        for start in range(0, rows, size):
            yield map_tensors(partial(part, start), batch)

    def counts(self, batch: Batch | None) -> Mapping[str, int]:
        """What the training has come further by now that a batch has been learnt from, by unit (``samples``, ...).

        Called once for every ``draw``, in order: also, with None, for those that had no batch. Updates are not counted
        here.
        """
        return {} if batch is None else {"samples": self.size(batch)}

    def epoch_samples(self, batch_size: int) -> int | None:
        """Samples of one epoch in batches of that size; None if there are no epochs."""
        return None

    def fingerprint(self) -> str | None:
        """What tells these data from others, for the lock of a run; None if the recipe says it all."""
        return None

    def feedback(self, batch: Batch, output: Batch) -> None:  # noqa: B027 (a dataset does not need it)
        """Receives what an update returned for a batch (priorities)."""

    @abstractmethod
    def evaluate(self, learner: Learner) -> dict[str, float]:
        """Measures a learner on held-out data or seeds; metrics are logged as ``eval/<name>``."""

    def rehearse(self, learner: Learner, batch: Batch) -> dict[str, float] | None:
        """Tries once, after the first update, what ``evaluate`` will need, so that a mistake shows at once.

        Returns:
            Metrics of the same names, if so little can tell them.
        """
        learner.predict(learner.inputs(batch))
        return None

    def statistics(self) -> dict[str, float]:
        """What happened while drawing since the last call; logged as ``train/<name>``."""
        return {}

    def state_dict(self) -> State:
        """What a resumed run needs to draw the same batches; the context's generators are kept anyway."""
        return {}

    def load_state_dict(self, state: State) -> None:  # noqa: B027 (there may be nothing)
        """Restores what ``state_dict`` returned."""
