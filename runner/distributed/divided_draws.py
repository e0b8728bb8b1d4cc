"""Divides updates among processes that draw the parts of a batch themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from runner.distributed.data_parallel import BatchPart, DataParallel, digest_of
from runner.system.errors import RunnerError
from runner.system.tensor_trees import tensors

if TYPE_CHECKING:
    from torch import Tensor

    from runner.plugin.progress import Progress
    from runner.plugin.source import Batch

DUPLICATES = 3
"""Checks after each other in which two processes have the same batch, until that is an error. Few
samples of a small set can be the same by chance.
"""


class DividedDraws(DataParallel):
    """Lets every process compute the gradient of the samples that it has drawn.

    The samples of all processes are the batch of the update. Their number is added up in every
    update, so that losses have the weight of their samples, however many a process has. Results
    with one row per sample stay in the process, for the feedback of its source.

    If the group cuts batches, it is given an entire batch, takes its rows, and returns the rows of
    all processes: that is how its updates are compared with those of a single process.
    """

    duplicates = 0
    samples = 0
    """Samples of all processes in the current update."""
    counted: Mapping[str, int] = {}
    """The progress before it."""

    def attach(self) -> None:
        """Wraps the slots of the pipeline; see ``DataParallel.attach``."""
        super().attach()
        self.slots.wrap("draw", self._wrap_draw)

    def _wrap_draw(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Lets the processes agree on a signal also while there is no update."""

        def draw(batch_size: int, progress: Progress) -> Batch | None:
            batch = step(batch_size, progress)
            if batch is None:
                self.total_samples(None)
            return batch

        return draw

    def total_samples(self, size: int | None) -> int:
        """Returns the samples of all processes in an update, and counts the votes for a stop.

        Args:
            size: Samples of this process; None if its source had no batch.

        Raises:
            RunnerError: Only some of the processes have a batch.
        """
        numbers = [float(size is not None), float(size or 0), *self._votes()]
        sums = torch.tensor(numbers, dtype=torch.float64)
        self.group.sum_in_place(sums)
        batches, samples, *counts = sums.tolist()
        self._count_votes(counts)
        if batches not in (0, self.group.count):
            source = type(self.source).__name__
            raise RunnerError(
                f"{source}.draw returned a batch in {batches:.0f} of {self.group.count} processes; "
                "let it decide by numbers that are the same in all processes, such as sums of "
                "context.sum_over_processes"
            )
        return int(samples)

    def _divide(self, batch: Batch, noise: Batch, progress: Progress) -> BatchPart:
        if self.group.cuts_batches:
            batch, noise, _, _ = super()._divide(batch, noise, progress)
        size = self.source.size(batch)
        self.samples = self.total_samples(size)
        self.counted = progress.state_dict()
        return BatchPart(batch, noise, slice(0, size), self.samples)

    def counts(self, batch: Batch | None) -> Mapping[str, int]:
        """Returns the counts of the source, with the samples of all processes."""
        counts = self.source.counts(batch)
        return counts if batch is None else {**counts, "samples": self.samples}

    def _check_batches(self, batch: Batch) -> None:
        """Raises a RunnerError if two processes have drawn the same batch in some checks, or count
        differently.
        """
        if self.group.cuts_batches:
            super()._check_batches(batch)
            return
        source = type(self.source).__name__
        checked = self.group.gather((digest_of(tensors(batch)), self.counted))
        digests = [digest for digest, _ in checked]
        if any(counted != self.counted for _, counted in checked):
            raise RunnerError(
                f"{source}.counts returns other numbers in each process; return those of all processes together"
            )
        if len(set(digests)) == len(digests):
            self.duplicates = 0
            return
        self.duplicates += 1
        if self.duplicates < DUPLICATES:
            return
        raise RunnerError(
            f"{source} draws the same batches in several processes; draw them from the numbers of "
            "context.process_generator"
        )

    def _rows_of_results(self, output: dict[str, Any]) -> dict[str, Tensor]:
        rows = {name: value for name, value in output.items() if isinstance(value, torch.Tensor) and value.dim()}
        if not self.group.cuts_batches:
            return rows
        return {name: torch.cat(self.group.gather(value)) for name, value in rows.items()}
