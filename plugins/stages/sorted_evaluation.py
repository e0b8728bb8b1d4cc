"""Evaluates held-out samples in the order of their sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from runner.api import Close, DatasetConfig, Pipeline, Setting, Stage, StageConfig, nbytes

from .bucketing import nothing_is_padded

if TYPE_CHECKING:
    from torch import Tensor

    from runner.api import DatasetSource


class SortedEvaluationConfig(StageConfig):
    """Evaluates held-out samples in the order of their sizes: a batch has samples of about one size,
    and little padding.

    Updates are the same. Metrics are sums over all samples, so they are the same, too, except for
    their rounding. A sample's size is the bytes of a batch that has it alone. Sizes are read once,
    before the training.

    When it helps: sizes differ much, and held-out data have many batches.
    When it hurts: one held-out batch, whose padding is that of its largest sample in any order; or
    samples that take long to make, because each is made once more.
    """

    kind: ClassVar[str] = "sorted_evaluation"
    implementation = "SortedEvaluation"
    phase: ClassVar[int] = 1

    def contract(self, setting: Setting) -> Close:
        """Returns ``Close``: updates are the same, and sums of an evaluation have another order."""
        return Close()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason if samples are of one size, or may not be read before a training."""
        data = setting.data
        if not isinstance(data, DatasetConfig):
            return f"'{data.kind}' is not a dataset: nothing is held out"
        if not data.shapes_vary:
            return nothing_is_padded(data)
        if data.workers:
            return "data.workers read the samples, and this process would have to read them first"
        return None


class SortedEvaluation(Stage):
    """Sorts the held-out and the test samples."""

    def attach(self, pipeline: Pipeline) -> None:
        """Selects the samples in another order."""
        from runner.api import has_numbers

        source = cast("DatasetSource", pipeline.source)
        if not has_numbers(source.held_out):
            kind = type(source.held_out).__name__
            pipeline.deactivate(f"{kind} is a stream, whose samples have no numbers")
            return
        source.replace_data(source.train, source.held_out)
        source.select(held_out=_order(source))
        if has_numbers(source.test):
            with source.testing():
                order = _order(source)
            source.select(test=order)


def _order(source: DatasetSource) -> Tensor:
    """Returns the numbers of the held-out samples, the smallest first."""
    import torch

    data: Any = source.held_out
    sizes = [nbytes(source.collate([data[number]])) for number in range(len(data))]
    # Samples of one size keep their order.
    return torch.tensor(sizes).argsort(stable=True)
