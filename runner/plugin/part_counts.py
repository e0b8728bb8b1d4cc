"""Counts of the entire batch that a loss returns for parts of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from runner.plugin.loss import Loss
from runner.plugin.source import Batch, Source
from runner.system.errors import RunnerError
from runner.system.suggestions import method_named
from runner.system.tensor_trees import leaves


class PartCounts:
    """Refuses losses whose counts do not become smaller with the parts of a batch.

    A number of a batch that has no dimensions stays the same in every part. A loss that returns it
    as its count is weighted as if each part were the entire batch.

    Args:
        stage: Kind of the stage that cuts batches.
        learner: Computes the losses.
        source: Makes the batches.
    """

    def __init__(self, stage: str, learner: Any, source: Source) -> None:
        self._stage = stage
        self._learner = learner
        self._source = source
        # Training and evaluation may count in different ways.
        self._checked: set[bool] = set()

    def check(self, batch: Batch, sizes: Sequence[int], losses: Sequence[Loss]) -> None:
        """Checks the first batch that is cut: reading numbers waits for a device.

        Args:
            batch: The entire batch.
            sizes: Number of samples of each part.
            losses: Losses of the parts.

        Raises:
            RunnerError: A count is a number of the entire batch.
        """
        mode = torch.is_grad_enabled()
        if len(losses) < 2 or mode in self._checked:
            return
        self._checked.add(mode)
        for name, counts in _counts(losses):
            for entry_name, entry in leaves(batch):
                if self._is_of_entire_batch(entry_name, entry, counts, sizes):
                    self._refuse(name, entry_name)

    def _refuse(self, name: str, entry_name: str) -> NoReturn:
        learner = type(self._learner)
        # A learner with several losses may compute them in other methods.
        method = learner.__name__
        if hasattr(learner, "loss"):
            method = method_named(self._learner, "loss")
        problem = (
            f"the count of '{name}' is '{entry_name}' of the entire batch in each part"
        )
        hint = "count the items of the part, from entries with one row per sample"
        raise RunnerError(f"{self._stage}: {method}: {problem}; {hint}")

    def _is_of_entire_batch(
        self, name: str, entry: Any, counts: Sequence[Any], sizes: Sequence[int]
    ) -> bool:
        if not _is_number(entry):
            return False
        if isinstance(entry, Tensor) and all(count is entry for count in counts):
            return True
        # The equal value of another number may be a coincidence, unless it grows with the
        # samples or parts of different sizes have the same count.
        grows = name in self._source.layout.totals
        if not grows and len(set(sizes)) == 1:
            return False
        return all(
            _is_number(count) and float(count) == float(entry) for count in counts
        )


def _counts(losses: Sequence[Loss]) -> Iterator[tuple[str, list[Any]]]:
    """Yields the counts of each value that all losses have."""
    means = [loss.means() for loss in losses]
    for name in means[0]:
        if all(name in values for values in means):
            yield name, [values[name].count for values in means]


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)
