"""Sources of batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from runner.system.errors import IndivisibleBatchError, RunnerError
from runner.system.suggestions import method_named
from runner.system.tensor_trees import BatchLayout

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from runner.plugin.context import Context
    from runner.plugin.learner import Learner
    from runner.plugin.progress import Progress

Batch = Any
"""A tree of tensors: nested dictionaries, lists and tuples. The source determines its size."""
State = dict[str, Any]
"""Nested dictionaries and lists of tensors, rings, numbers, strings and None: what a checkpoint can
hold.
"""
UNSENT = (
    "context",
    "train",
    "held_out",
    "test",
    "held_out_batches",
    "_all_data",
    "_stream",
    "_opening",
    "_content",
)
"""Attributes of a source that worker processes do not need for its ``collate``."""


class Source(ABC):
    """Source of batches; a source that does not evaluate a model itself (a dataset) is
    a ``DatasetSource``.
    """

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the tensors in a batch by name, without the batch dimension, as far as
    a learner needs them.
    """
    sizes: Mapping[str, int] = {}
    """Further sizes for a learner, by name (``classes``, ``vocabulary``)."""
    classes: Sequence[str] = ()
    """Names of the classes of its labels, by number. They are saved with the model: it
    is not used with others.
    """
    tables: Mapping[str, Tensor] = {}
    """Further tensors for a learner (scales of targets, dimensions of a machine)."""
    layout: BatchLayout = BatchLayout()
    """Which entries of a batch have one row per sample: all tensors with dimensions unless declared
    otherwise.
    """
    activities: ClassVar[Mapping[str, str]] = {}
    """Slots of the source whose time is reported separately, each with a word for the display."""

    capturable: tuple[str, ...] = ()
    """Slots of the source that a stage may capture in a CUDA graph. Their arguments and results are
    trees of tensors; other arguments stay the same. They never wait for the device or read its
    numbers, draw only from the context's generators, and change nothing but tensors that stay where
    they are. A slot may do otherwise in its first call.
    """

    @abstractmethod
    def __init__(self, config: Any, context: Context) -> None: ...

    def bind(self, learner: Learner) -> None:  # noqa: B027 (a dataset does not need it)
        """Receives the learner; a simulator acts with it."""

    @abstractmethod
    def draw(self, batch_size: int, progress: Progress) -> Batch | None:
        """Returns the next batch, or None if the source has advanced without one (a simulator that
        warms up).
        """

    def ahead(self) -> int:
        """Returns how many further batches may be sampled before an update or its
        feedback changes their content.
        """
        return 0

    def size(self, batch: Batch) -> int:
        """Returns the number of samples in a batch: the rows of its first entry with samples."""
        try:
            return self.layout.size(batch)
        except ValueError as error:
            raise RunnerError(f"{type(self).__name__}: {error}") from None

    def take(self, batch: Batch, index: slice | Tensor) -> Batch:
        """Returns a batch of the samples with these numbers. The ``layout`` decides what they
        consist of.

        Raises:
            IndivisibleBatchError: An entry of the batch has not one row per sample.
        """
        try:
            return self.layout.take(batch, index)
        except ValueError as error:
            owner = type(self).__name__
            problem = f"a batch cannot be cut into parts: {error}"
            layout = f"{owner}.layout = BatchLayout(shared={{...}})"
            hint = (
                f"name entries of the entire batch in {layout}, or write {owner}.split"
            )
            raise IndivisibleBatchError(f"{owner}: {problem}; {hint}") from None

    def split(self, batch: Batch, size: int) -> Iterator[Batch]:
        """Cuts a batch into parts of that many samples; the last may be smaller."""
        for start in range(0, self.size(batch), size):
            yield self.take(batch, slice(start, start + size))

    def buckets(self, batch: Batch) -> Iterator[tuple[Tensor, Batch]]:
        """Cuts a batch into parts whose samples are about equally large, each padded no more than
        it needs.

        Each comes with the numbers of its rows. Sources that pad nothing have none.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define how its batches are padded"
        )

    def counts(self, batch: Batch | None) -> Mapping[str, int]:
        """Returns the progress by unit, without updates, after learning from a batch.

        Called once for every ``draw``, in order: also, with None, for those that had no batch.
        """
        return {} if batch is None else {"samples": self.size(batch)}

    def epoch_samples(self, batch_size: int) -> int | None:
        """Returns the samples of one epoch in batches of that size; None without epochs."""
        return None

    def can_balance(self) -> bool:
        """Returns whether ``draw`` can draw every class equally often (``data.sampling``)."""
        return False

    def class_counts(self) -> Sequence[int] | None:
        """Returns the number of training samples of each class; None if the data have no labels."""
        return None

    def fingerprint(self) -> str | None:
        """Returns a text that differs for different data; None if they follow from the recipe
        alone.

        It is compared when a run is resumed and when a lock is run again.
        """
        return None

    def feedback(self, batch: Batch, output: Batch) -> None:  # noqa: B027 (a dataset does not need it)
        """Receives what an update returned for a batch (priorities)."""

    @abstractmethod
    def evaluate(self, learner: Learner) -> dict[str, float]:
        """Measures a learner on held-out data or seeds; metrics are logged as ``eval/<name>``.

        They select the best checkpoint. Inside of ``testing`` they are logged as ``test/<name>``.
        """

    def has_test(self) -> bool:
        """Returns whether there is a test part: data that no evaluation of a training reads.

        It is measured once, after the training, by ``evaluate`` inside of ``testing``.
        """
        return False

    def testing(self) -> AbstractContextManager[None]:
        """Returns a context in which ``evaluate`` and ``render`` read the test part."""
        raise NotImplementedError(f"{type(self).__name__} has no test part")

    def render(self, learner: Learner, path: Path) -> None:
        """Draws what ``evaluate`` measures into a file with one of the endings in the settings'
        ``pictures``.
        """
        problem = "has no render, although its settings name pictures"
        raise NotImplementedError(f"{type(self).__name__} {problem}")

    def show_data(self, learner: Learner, canvas: Any) -> None:
        """Draws training data for ``runner data show``, before anything is trained.

        Args:
            learner: The untrained learner, whose config may contain settings that belong in the
                picture.
            canvas: An empty matplotlib figure; its size may be changed.
        """
        raise NotImplementedError(f"{type(self).__name__} has no show_data")

    def rehearse(self, learner: Learner, batch: Batch) -> dict[str, float] | None:
        """Rehearses the evaluation once after the first update, so that a mistake is
        reported immediately.

        Returns metrics of the same names, if they can be determined from so little.
        """
        import torch

        from runner.plugin.learner import Learner
        from runner.plugin.plugin_errors import mistake

        # An evaluation may never predict for this batch: to compile for it may take long.
        uncompiled = torch.compiler.set_stance("force_eager")
        try:
            with learner.evaluating(), uncompiled:
                learner.predict(learner.inputs(batch))
        except Exception as error:
            # The code of a plugin that raised is named where the training ends.
            if isinstance(error, RunnerError) or mistake(error) is not None:
                raise
            method = method_named(learner, "predict")
            reason = f"{type(error).__name__}: {error}"
            name = type(learner).__name__
            hint = (
                f"prepare its input as the loss does, in {name}.inputs(batch) or in "
                f"{name}.predict(inputs)"
            )
            if type(learner).inputs is Learner.inputs:
                hint = (
                    f"{name} has no inputs(batch), which selects its input from a batch"
                )
            raise RunnerError(
                f"{method} failed for a complete batch: {reason}; {hint}"
            ) from error
        return None

    def can_repeat(self) -> bool:
        """Returns whether ``draw`` repeats ``context.overfit_batches`` batches if that is set."""
        return False

    def limit_evaluation(self, samples: int) -> None:  # noqa: B027 (a simulator has no such samples)
        """Evaluates at most this number of held-out samples from now on, where the source can."""

    def statistics(self) -> dict[str, float]:
        """Returns statistics of sampling since the last call; logged as ``train/<name>``."""
        return {}

    def events(self) -> Mapping[str, bool]:
        """Returns whether the last call of ``draw`` included rare events, by name, such as an end
        by success.

        ``runner verify`` samples until each has occurred, and a PASS names those that did not.
        """
        return {}

    def state_dict(self) -> State:
        """Returns the state that a resumed run needs to sample the same batches,
        without the context's generators.
        """
        return {}

    def load_state_dict(self, state: State) -> None:  # noqa: B027 (there may be nothing)
        """Restores what ``state_dict`` returned."""
