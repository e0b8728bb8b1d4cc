"""Activations that wait for the backward pass in the memory of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from pydantic import Field

from runner.api import Batch, Exact, Pipeline, Setting, Stage, StageConfig, UsageError, tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MIB = 2**20


class ActivationOffloadConfig(StageConfig):
    """Moves what autograd keeps for the backward pass to the memory of the host, and back when it is needed.

    Copies are asynchronous: they go to pinned memory on a separate stream, while the GPU computes
    the next layers. Parameters, buffers and the batch stay on the GPU, where they are anyway, and
    so do tensors that are smaller than ``smallest``.

    When it helps: activations do not fit into the memory of the GPU, and a layer computes for
    longer than its activations take on the bus. When it hurts: layers that compute little, a slow
    bus, and little memory of the host. ``activation_checkpointing`` needs no bus.
    """

    kind: ClassVar[str] = "activation_offload"
    implementation = "ActivationOffload"
    phase: ClassVar[int] = 2
    wraps: ClassVar[frozenset[str]] = frozenset({"update"})
    unplanned: ClassVar[str] = "it moves tensors between a GPU and the host, and a plan has one device"

    smallest: Annotated[int, Field(ge=0)] = 65_536
    """Bytes from which a tensor is moved."""

    def contract(self, setting: Setting) -> Exact:
        """Returns ``Exact``: a copy has the same bits."""
        return Exact()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason on a CPU; raises a UsageError with stages that fix where tensors are."""
        if setting.device.type == "cpu":
            return "activations are in the memory of the host already"
        for kind in ("compile", "cuda_graph"):
            if kind in setting.stages:
                problem = f"{kind} decides itself which tensors it keeps"
                raise UsageError(f"activation_offload: {problem}: switch one of the two off")
        return None


class OffloadTarget(Protocol):
    """A place for activations."""

    def store(self, tensor: Tensor) -> Any:
        """Starts to copy a tensor; it may be freed before the copy is complete."""

    def load(self, stored: Any) -> Tensor:
        """Returns a tensor with the values and the strides of the stored one, on its device."""


@dataclass(frozen=True)
class PinnedCopy:
    """A tensor in pinned memory.

    Attributes:
        tensor: The copy.
        device: The device of the original.
        complete: The event after which the copy is complete.
    """

    tensor: Tensor
    device: torch.device
    complete: torch.cuda.Event


class PinnedMemory:
    """Pinned memory of the host, to which a separate stream copies.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def store(self, tensor: Tensor) -> PinnedCopy:
        """Starts the copy of a tensor to the host."""
        import torch

        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self.stream):
            copy.copy_(tensor, non_blocking=True)
            # Without it, the memory could be used again while the copy still reads it.
            tensor.record_stream(self.stream)
            complete = self.stream.record_event()
        return PinnedCopy(copy, tensor.device, complete)

    def load(self, stored: PinnedCopy) -> Tensor:
        """Returns the tensor on its device; the host does not wait for it."""
        import torch

        torch.cuda.current_stream(stored.device).wait_event(stored.complete)
        return stored.tensor.to(stored.device, non_blocking=True)


@dataclass(frozen=True)
class Offloaded:
    """A saved tensor that was moved.

    Attributes:
        stored: The value that the target returned for it.
    """

    stored: Any


class ActivationOffload(Stage):
    """Packs and unpacks what autograd saves in an update."""

    def attach(self, pipeline: Pipeline) -> None:
        """Wraps the update."""
        self.learner = pipeline.learner
        self.target = self.make_target(pipeline.device)
        self.resident: frozenset[int] = frozenset()
        self.moved_bytes = 0
        pipeline.slots.wrap("update", self._offloading)

    def make_target(self, device: torch.device) -> OffloadTarget:
        """Returns the place for the activations of a device."""
        return PinnedMemory(device)

    def closing_notes(self) -> Sequence[str]:
        """Returns how much the last update moved."""
        return (f"{self.moved_bytes / MIB:,.1f} MiB of the last update were moved",)

    def _offloading(self, step: Callable[..., Any]) -> Callable[..., Any]:
        from torch.autograd.graph import saved_tensors_hooks

        def update(batch: Batch, noise: Batch, *arguments: Any) -> Any:
            # Stages and optimizers may replace parameters, so the addresses are read every time.
            self.resident = frozenset(map(_address, self._tensors_that_stay(batch, noise)))
            self.moved_bytes = 0
            with saved_tensors_hooks(self._pack, self._unpack):
                return step(batch, noise, *arguments)

        return update

    def _tensors_that_stay(self, batch: Batch, noise: Batch) -> Iterator[Tensor]:
        """Yields tensors that remain on the device in any case."""
        for module in self.learner.modules().values():
            yield from chain(module.parameters(), module.buffers())
        yield from tensors([batch, noise])

    def _pack(self, tensor: Tensor) -> Any:
        if not self._is_movable(tensor):
            return tensor
        self.moved_bytes += tensor.nbytes
        return Offloaded(self.target.store(tensor))

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Offloaded):
            return self.target.load(packed.stored)
        tensor: Tensor = packed
        return tensor

    def _is_movable(self, tensor: Tensor) -> bool:
        """Returns whether a copy frees memory and has the same strides."""
        import torch

        if tensor.layout != torch.strided or tensor.nbytes < max(1, self.config.smallest):
            return False
        if _address(tensor) in self.resident:
            return False
        # The copy of an expanded tensor would be larger, and kernels would read it differently.
        strides = torch.empty_like(tensor, device="meta").stride()
        return strides == tensor.stride()


def _address(tensor: Tensor) -> int:
    import torch

    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
