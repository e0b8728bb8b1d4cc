"""Copies batches to the GPU while it computes earlier ones."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from runner.api import (
    Batch,
    Exact,
    Pipeline,
    Progress,
    Setting,
    Stage,
    StageConfig,
    State,
    Statistical,
    map_tensors,
    tensors,
)

if TYPE_CHECKING:
    import torch


class AsyncTransferConfig(StageConfig):
    """Samples ahead and copies from pinned memory on a separate stream, so that the GPU does not
    wait for the bus.

    It samples ahead only as far as updates do not change the samples, according to the source, so
    every batch has the same content as without the stage. Where batches depend on the results of
    updates (prioritized replay), one is sampled before the last ``depth - 1`` updates are finished;
    the stage then no longer promises the same bits.

    When it helps: batches that live in host memory, and a GPU.
    When it hurts: nothing to do on a CPU, or when the data are on the GPU already.
    """

    kind: ClassVar[str] = "async_transfer"
    implementation = "AsyncTransfer"
    phase: ClassVar[int] = 2
    unplanned: ClassVar[str] = "batches on their way are on the device, too"
    claims: ClassVar[frozenset[str]] = frozenset({"next_batch", "transfer"})

    depth: Annotated[int, Field(ge=2, le=8)] = 2
    """Number of batches on the device: the one in use and those on their way."""

    def contract(self, setting: Setting) -> Exact | Statistical:
        """Returns ``Exact``, or ``Statistical`` if batches depend on updates that are not finished
        when they are sampled.
        """
        return Statistical() if setting.data.depends_on_feedback else Exact()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason if there is nothing to transfer."""
        if setting.device.type == "cpu":
            return "nothing to do on a CPU: batches are where they are used"
        if setting.data.resident(setting.device.type):
            return "the data are on the GPU already: nothing to transfer"
        return None


class AsyncTransfer(Stage):
    """Replaces the step that draws and transfers."""

    def attach(self, pipeline: Pipeline) -> None:
        """Makes the stream and the buffers."""
        import torch

        self.slots = pipeline.slots
        self.source = pipeline.source
        self.device = pipeline.device
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.lanes = [Lane(self.device) for _ in range(self.config.depth)]
        self.waiting: deque[Lane] = deque()
        self.started = 0
        pipeline.slots.replace("next_batch", self.next_batch)

    def load_state_dict(self, state: State) -> None:
        """Discards batches that were sampled ahead: the source samples them again."""
        super().load_state_dict(state)
        self.waiting.clear()

    def next_batch(self, batch_size: int, progress: Progress) -> Batch | None:
        """Returns the oldest batch, after starting the transfers of as many others as allowed."""
        import torch

        if not self.waiting and not self._start(batch_size, progress):
            return None
        # Beyond ``ahead``, a sample would depend on updates that are not finished.
        while len(self.waiting) < self.config.depth and self.source.ahead():
            if not self._start(batch_size, progress):
                break
        return self.waiting.popleft().finish(torch.cuda.current_stream(self.device))

    def _start(self, batch_size: int, progress: Progress) -> bool:
        batch = self.slots.draw(batch_size, progress)
        if batch is None:
            return False
        lane = self.lanes[self.started % len(self.lanes)]
        lane.start(batch, self.stream)
        self.waiting.append(lane)
        self.started += 1
        return True


class Lane:
    """A persistent pinned buffer and its copy on the device."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device = device
        self.pinned: Batch = {}
        self.resident: Batch = {}
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.used = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def start(self, batch: Batch, stream: torch.cuda.Stream) -> None:
        """Starts to copy a batch; the lane's previous batch must no longer be needed."""
        import torch

        def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(tensor, device="cpu").pin_memory()

        def resident_like(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(tensor, device=self.device)

        # The previous copy may still read the pinned buffer.
        self.copied.synchronize()
        shapes = [tensor.shape for tensor in tensors(batch)]
        if [tensor.shape for tensor in tensors(self.pinned)] != shapes:
            self.pinned = map_tensors(pinned_like, batch)
            self.resident = map_tensors(resident_like, batch)
        for pinned, tensor in zip(tensors(self.pinned), tensors(batch), strict=True):
            pinned.copy_(tensor)
        # The copy on the device was returned ``depth`` batches ago: all work that reads it is
        # queued by now.
        self.used.record(torch.cuda.current_stream(self.device))
        stream.wait_event(self.used)
        with torch.cuda.stream(stream):
            for resident, pinned in zip(tensors(self.resident), tensors(self.pinned), strict=True):
                resident.copy_(pinned, non_blocking=True)
            self.copied.record(stream)

    def finish(self, consumer: torch.cuda.Stream) -> Batch:
        """Returns the batch on the device, for work that is queued on ``consumer`` later."""
        consumer.wait_event(self.copied)
        return self.resident
