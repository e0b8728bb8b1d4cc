"""Memory of one update of a pipeline by slot and module, from real tensors."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from runner.memory.kinds import Holder, Kind, by_kind
from runner.memory.tracker import EXISTING, UpdateTracker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.memory.call_stack import CallStack
    from runner.training.pipeline import Assembly


@dataclass(frozen=True)
class MemorySample:
    """Memory of the update after one operator.

    Attributes:
        seconds: Time since the start of the update. Tracking slows every operator, so only the
            order and the rough proportions are those of an update that is not tracked.
        bytes: Update memory.
        slot: The innermost slot.
    """

    seconds: float
    bytes: int
    slot: str


@dataclass(frozen=True)
class MemoryPeak:
    """The most memory that one update held.

    Attributes:
        total: Bytes of all tensors at the peak.
        resident: Bytes of the tensors that exist between two updates, without gradients.
        kinds: Bytes at the peak by kind.
        holders: Bytes at the peak that the update had allocated, by slot and module.
        slot: The innermost slot that was running at the peak.
        samples: Update memory over the time of the update.
    """

    total: int
    resident: int
    kinds: Mapping[Kind, int]
    holders: Mapping[Holder, int]
    slot: str
    samples: Sequence[MemorySample]

    @property
    def update(self) -> int:
        """Update memory: what an update holds at its peak beyond what is resident anyway."""
        return self.total - self.resident


def track_update(
    pipeline: Assembly,
    stack: CallStack,
    update: Callable[[], object],
) -> MemoryPeak:
    """Runs one update and returns its peak.

    Everything that exists before is state: parameters, buffers, gradients and optimizers as what
    they are, all other tensors (batch, averages, caches) as other state.

    Args:
        pipeline: The assembled pipeline, between two updates.
        stack: The stack whose labels are on the pipeline's slots.
        update: Makes the update.
    """
    gc.collect()
    samples: list[MemorySample] = []

    def take_sample(total: int) -> None:
        seconds = time.perf_counter() - started
        samples.append(MemorySample(seconds, total - resident, stack.holder.slot))

    tracker = UpdateTracker(pipeline.device, stack, take_sample)
    with stack.watching(), tracker:
        _label_state(tracker, pipeline)
        # Gradients of the previous update are freed in this one, so they are not state.
        resident = tracker.total - tracker.bytes_of(Kind.gradients)
        tracker.reset_peak()
        started = time.perf_counter()
        # Without it, an update that only frees memory would have no peak.
        take_sample(tracker.total)
        update()

    holders: Counter[Holder] = Counter()
    for (_, holder), size in tracker.usage.items():
        if holder != EXISTING:
            holders[holder] += size
    return MemoryPeak(
        total=tracker.peak,
        resident=resident,
        kinds=by_kind(tracker.usage),
        holders=+holders,
        slot=max(samples, key=lambda sample: sample.bytes).slot,
        samples=tuple(samples),
    )


def _label_state(tracker: UpdateTracker, pipeline: Assembly) -> None:
    """Labels everything that exists, and leaves no reference to it."""
    tensors = living_tensors()
    optimizers = [optimizer for _, optimizer in pipeline.learner.optimizers()]
    # Later labels decide the kind of a storage that several objects share.
    tracker.label_existing(tensors)
    tracker.label_state(pipeline.learner.modules(), optimizers)
    for tensor in tensors:
        if tensor.is_leaf and tensor.requires_grad:
            tracker.follow_gradient(tensor)
    tracker.hold_existing()


def living_tensors() -> list[Tensor]:
    """Returns all tensors that Python references and that have real memory.

    The fake tensors of a compiler are left out.
    """
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    tensors = [
        tensor
        for tensor in tensors
        if not isinstance(tensor, FakeTensor | FunctionalTensor)
    ]
    return [
        tensor
        for tensor in tensors
        if tensor.layout == torch.strided and not tensor.is_meta
    ]
