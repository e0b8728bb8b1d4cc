"""Where batches come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from runner.system.errors import RunnerError
from runner.system.names import method_named
from runner.system.tree import BatchLayout

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from runner.plugin.context import Context
    from runner.plugin.learner import Learner
    from runner.plugin.progress import Progress

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


class Source(ABC):
    """Where batches come from; what does not evaluate a model itself (a dataset) is a ``DatasetSource``."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of the tensors in a batch by name, without the batch dimension, as far as a learner needs to know them."""
    sizes: Mapping[str, int] = {}
    """What else a learner may need to know, by name (``classes``, ``vocabulary``)."""
    classes: Sequence[str] = ()
    """Names of what its labels stand for, by number. They are kept with the model: with others it is not used."""
    tables: Mapping[str, Tensor] = {}
    """What else a learner may need to know, as tensors (how targets are scaled, the measures of a machine)."""
    layout: BatchLayout = BatchLayout()
    """Which entries of a batch have one row per sample: all tensors with dimensions unless declared otherwise."""
    activities: ClassVar[Mapping[str, str]] = {}
    """Slots that the source defines and whose time is reported apart, each with the word for it while it lasts."""

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
        """Number of samples in a batch: the rows of the first entry that has one for each of them."""
        try:
            return self.layout.size(batch)
        except ValueError as error:
            raise RunnerError(f"{type(self).__name__}: {error}") from None

    def take(self, batch: Batch, index: slice | Tensor) -> Batch:
        """Returns a batch of the samples with these numbers. The ``layout`` decides what they consist of.

        Raises:
            RunnerError: An entry of the batch has not one row per sample.
        """
        try:
            return self.layout.take(batch, index)
        except ValueError as error:
            owner = type(self).__name__
            hint = f"name what belongs to a batch as a whole in {owner}.layout = BatchLayout(shared={{...}})"
            raise RunnerError(f"{owner}: a batch cannot be cut into parts: {error}; {hint}") from None

    def split(self, batch: Batch, size: int) -> Iterator[Batch]:
        """Cuts a batch into parts of that many samples; the last may be smaller."""
        for start in range(0, self.size(batch), size):
            yield self.take(batch, slice(start, start + size))

    def buckets(self, batch: Batch) -> Iterator[tuple[Tensor, Batch]]:
        """Cuts a batch into parts whose samples are about equally large, each padded no more than it needs.

        Each comes with the numbers of its rows. Sources that pad nothing have none.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how its batches are padded")

    def counts(self, batch: Batch | None) -> Mapping[str, int]:
        """How much further the training is, by unit but updates, now that a batch has been learnt from.

        Called once for every ``draw``, in order: also, with None, for those that had no batch.
        """
        return {} if batch is None else {"samples": self.size(batch)}

    def epoch_samples(self, batch_size: int) -> int | None:
        """Samples of one epoch in batches of that size; None if there are no epochs."""
        return None

    def fingerprint(self) -> str | None:
        """Returns a text that differs for different data; None if they follow from the recipe alone.

        It is compared when a run is resumed and when a lock is run again.
        """
        return None

    def feedback(self, batch: Batch, output: Batch) -> None:  # noqa: B027 (a dataset does not need it)
        """Receives what an update returned for a batch (priorities)."""

    @abstractmethod
    def evaluate(self, learner: Learner) -> dict[str, float]:
        """Measures a learner on held-out data or seeds; metrics are logged as ``eval/<name>``."""

    def render(self, learner: Learner, path: Path) -> None:
        """Draws what ``evaluate`` measures into a file with one of the endings in the settings' ``pictures``."""
        raise NotImplementedError(f"{type(self).__name__} has no render, although its settings name pictures")

    def show_data(self, learner: Learner, canvas: Any) -> None:
        """Draws training data for ``runner data show``, before anything is trained.

        Args:
            learner: The untrained learner, whose config may contain settings that belong in the picture.
            canvas: An empty matplotlib figure; its size may be changed.
        """
        raise NotImplementedError(f"{type(self).__name__} has no show_data")

    def rehearse(self, learner: Learner, batch: Batch) -> dict[str, float] | None:
        """Tries once, after the first update, what ``evaluate`` will need, so that a mistake shows at once.

        Returns metrics of the same names, if so little can tell them.
        """
        from runner.plugin.learner import Learner

        try:
            with learner.evaluating():
                learner.predict(learner.inputs(batch))
        except Exception as error:
            if isinstance(error, RunnerError) or type(learner).inputs is not Learner.inputs:
                raise
            who, said = method_named(learner, "predict"), f"{type(error).__name__}: {error}"
            whole = f"{type(learner).__name__} has no inputs(batch) that says what of a batch it answers to"
            raise RunnerError(f"{who} was given a whole batch, and failed: {said}; {whole}") from error
        return None

    def limit_evaluation(self, samples: int) -> None:  # noqa: B027 (a simulator has no such samples)
        """Evaluates at most this number of held-out samples from now on, where the source can."""

    def statistics(self) -> dict[str, float]:
        """What happened while drawing since the last call; logged as ``train/<name>``."""
        return {}

    def state_dict(self) -> State:
        """What a resumed run needs to draw the same batches; the context's generators are kept anyway."""
        return {}

    def load_state_dict(self, state: State) -> None:  # noqa: B027 (there may be nothing)
        """Restores what ``state_dict`` returned."""
