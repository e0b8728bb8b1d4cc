"""Batches copied to the GPU while it works on the ones before."""

from collections import deque
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from runner.api import Batch, Config, Contract, Exact, Pipeline, Setting, Stage, Statistical

if TYPE_CHECKING:
    import torch


class AsyncTransfer(Stage):
    """Samples ahead and copies from pinned memory on a stream of its own, so that the GPU does not wait for the bus.

    Looks ahead within one burst of updates only, so every batch holds what it would hold without the stage. With
    prioritized replay a batch is drawn before the priorities of the ``depth - 1`` updates before it are known; the
    stage then no longer promises the same bits.

    When it helps: batches that live in host memory (``data.replay.device: cpu``, datasets) and a GPU.
    When it hurts: nothing to do on a CPU, or when the replay buffer is on the GPU already.
    """

    kind: ClassVar[str] = "async_transfer"
    phase: ClassVar[int] = 2
    contract: Contract = Exact()
    claims: ClassVar[frozenset[str]] = frozenset({"next_batch", "transfer"})

    class Config(Config):
        """How far to look ahead."""

        depth: Annotated[int, Field(ge=2, le=8)] = 2
        """Number of batches on the device: the one in use and those on their way."""

    config: Config

    def inactive(self, setting: Setting) -> str | None:
        """A CPU has nothing to transfer."""
        if setting.device.type == "cpu":
            return "nothing to do on a CPU: batches are where they are used"
        replay = getattr(setting.data, "replay", None)
        self.prioritized = getattr(replay, "kind", None) == "prioritized"
        if self.prioritized:
            self.contract = Statistical(0.05)
        if getattr(replay, "device", None) == "same":
            return "the replay buffer is on the GPU already: nothing to transfer (data.replay.device: same)"
        return None

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces the step that samples and transfers."""
        import torch

        self.slots, self.device = pipeline.slots, pipeline.device
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.lanes = [Lane(self.device) for _ in range(self.config.depth)]
        self.waiting: deque[Lane] = deque()
        self.started = 0
        pipeline.slots.replace("next_batch", self.next_batch)
        if self.prioritized:
            pipeline.note(f"priorities reach the sampler {self.config.depth - 1} update(s) late")

    def next_batch(self, batch_size: int, progress: float, remaining: int) -> Batch:
        """The batch that was started first, after starting as many as may be under way."""
        import torch

        while len(self.waiting) < min(self.config.depth, remaining + 1):
            lane = self.lanes[self.started % len(self.lanes)]
            lane.start(self.slots.sample(batch_size, progress), self.stream)
            self.waiting.append(lane)
            self.started += 1
        return self.waiting.popleft().finish(torch.cuda.current_stream(self.device))


class Lane:
    """One persistent pinned buffer and its copy on the device."""

    def __init__(self, device: "torch.device") -> None:
        import torch

        self.device = device
        self.pinned: Batch = {}
        self.resident: Batch = {}
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.used = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def start(self, batch: Batch, stream: "torch.cuda.Stream") -> None:
        """Begins to copy a batch; the lane's batch from before must no longer be needed."""
        import torch

        self.copied.synchronize()  # the pinned side may still be on its way out
        if {name: tensor.shape for name, tensor in self.pinned.items()} != {n: t.shape for n, t in batch.items()}:
            self.pinned = {name: torch.empty_like(tensor, device="cpu").pin_memory() for name, tensor in batch.items()}
            self.resident = {name: torch.empty_like(tensor, device=self.device) for name, tensor in batch.items()}
        for name, tensor in batch.items():
            self.pinned[name].copy_(tensor)
        # The device side was handed out depth batches ago: all work that reads it is queued by now.
        self.used.record(torch.cuda.current_stream(self.device))
        stream.wait_event(self.used)
        with torch.cuda.stream(stream):
            for name, tensor in self.pinned.items():
                self.resident[name].copy_(tensor, non_blocking=True)
            self.copied.record(stream)

    def finish(self, consumer: "torch.cuda.Stream") -> Batch:
        """The batch on the device, for work that is queued on ``consumer`` from now on."""
        consumer.wait_event(self.copied)
        return self.resident
