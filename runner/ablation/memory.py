"""Memory of an update, measured in several ways.

* ``tracked``: torch's ``MemTracker`` on real tensors; exact, by slot and module, and complete
  except for buffers inside of an operator.
* ``saved``: bytes that autograd holds for backward, by ``saved_tensors_hooks``.
* ``grown``: growth of the process in an update, as the kernel reports it. It is independent of
  torch's accounting, so it checks the first.
* ``allocated``: the peak of the allocator on a CUDA device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from runner.ablation.saved_tensors import SavedTensors
from runner.ablation.tracked_update import MemoryPeak, living_tensors, track_update
from runner.ablation.update_memory import UpdateMemory
from runner.ablation.variant_process import Measured
from runner.memory.call_stack import CallStack
from runner.system.hardware import (
    peak_host_memory,
    reset_peak_host_memory,
    resident_memory,
)
from runner.system.tensor_trees import tensors
from runner.training.pipeline import Assembly
from runner.training.step import Drawn

UPDATES = 4
"""Number of measured updates, each with a new batch; the largest counts."""
WARM_UP = 2
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Parameters of ``mallopt(3)``."""
SMALLEST_MMAP = 2**14
"""Blocks of this size and more are returned to the kernel when they are freed."""


class MemoryMeter:
    """Measures updates of one pipeline.

    Args:
        pipeline: The assembled pipeline. Labels are put on its slots.
        updates: Number of updates to measure.
    """

    def __init__(self, pipeline: Assembly, updates: int = UPDATES) -> None:
        self.pipeline = pipeline
        self.measured = Measured(pipeline)
        self.stack = CallStack.on(pipeline)
        kinds = (pipeline.recipe.stages[kind] for kind in pipeline.stages)
        self.is_compiled = any(stage.traces for stage in kinds)
        # A role that is stepped rarely has its largest update only then.
        self.updates = max(updates, *pipeline.learner.periods().values(), 1)
        self.batches: Sequence[Drawn] = ()

    def warm_up(self) -> None:
        """Draws the batches and makes a few updates.

        The first ones also make the optimizers' states, and compile.
        """
        while len(self.batches) < self.updates:
            self.batches = [
                *self.batches,
                *self.measured.draws(self.updates - len(self.batches)),
            ]
        for number in range(max(WARM_UP, self.updates)):
            self.measured.advance(self.batches[number % self.updates])

    def measure(self) -> UpdateMemory:
        """Measures all batches in every way that works here."""
        on_cpu = self.pipeline.device.type == "cpu"
        grown = None
        allocated = None
        if on_cpu:
            grown = self._largest(self._grow(batch) for batch in self.batches)
        else:
            allocated = self._largest(self._allocate(batch) for batch in self.batches)
        saved = max(self.saved(batch).peak for batch in self.batches)
        # Compiled code allocates past the operators that the tracker observes.
        peaks = []
        if not self.is_compiled:
            peaks = [self.tracked(batch) for batch in self.batches]
        tracked = max((peak.update for peak in peaks), default=None)
        update = next(
            value for value in (allocated, tracked, grown, saved) if value is not None
        )
        return UpdateMemory(update, saved, tracked, grown, self._state())

    def saved(self, batch: Drawn) -> SavedTensors:
        """Counts what one update saves for backward."""
        modules = self.pipeline.learner.modules().values()
        excluded: list[Tensor] = [*tensors(batch)]
        for module in modules:
            excluded += [*module.parameters(), *module.buffers()]
        counter = SavedTensors(self.stack, excluded)
        counter.measure(lambda: self.measured.advance(batch))
        return counter

    def tracked(self, batch: Drawn) -> MemoryPeak:
        """Tracks one update."""
        return track_update(
            self.pipeline, self.stack, lambda: self.measured.advance(batch)
        )

    def _largest(self, values: Iterable[int | None]) -> int | None:
        sizes = [value for value in values if value is not None]
        return max(sizes, default=None)

    def _grow(self, batch: Drawn) -> int | None:
        """Returns by how much the process grows in an update, with the gradients of before.

        None if the kernel does not allow the high-water mark to be reset.
        """
        # An update frees the gradients of the previous one, so they belong to it.
        gradients = gradient_bytes()
        release_free_memory()
        try:
            reset_peak_host_memory()
            start = resident_memory()
        except OSError:
            return None
        self.measured.advance(batch)
        return peak_host_memory() - start + gradients

    def _allocate(self, batch: Drawn) -> int:
        """Returns the allocator's peak over its state before the update, without gradients."""
        device = self.pipeline.device
        gradients = gradient_bytes()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        self.measured.advance(batch)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - start + gradients

    def _state(self) -> int:
        """Returns the bytes of all tensors on the device now, without gradients."""
        sizes = _storages(living_tensors(), self.pipeline.device)
        return sum(sizes.values()) - gradient_bytes()


def return_freed_memory() -> None:
    """Makes the C library return freed blocks to the kernel immediately, where it can.

    Call it before anything is allocated. A block that was once part of the heap is reused, and
    then the size of the process shows an earlier peak.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, SMALLEST_MMAP)
        mallopt(M_TRIM_THRESHOLD, 0)


def release_free_memory() -> None:
    """Returns the free pages of the heap to the kernel, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def gradient_bytes() -> int:
    """Returns the bytes of the gradients of all leaves, each storage once."""
    gradients = [tensor.grad for tensor in living_tensors() if tensor.is_leaf]
    return sum(
        _storages(gradient for gradient in gradients if gradient is not None).values()
    )


def _storages(
    values: Iterable[Tensor], device: torch.device | None = None
) -> Mapping[tuple[torch.device, int], int]:
    """Returns the size of every storage, on one device if it is given."""
    sizes: dict[tuple[torch.device, int], int] = {}
    for tensor in values:
        if device is None or tensor.device == device:
            storage = tensor.untyped_storage()
            sizes[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sizes
