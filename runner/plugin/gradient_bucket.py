"""Gradients of one type that several processes add up together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


class Summing(Protocol):
    """A group of processes in which tensors can be added up.

    Attributes:
        count: Number of processes.
    """

    count: int

    def sum_in_place(self, tensor: Tensor) -> None:
        """Replaces a tensor by its sum over all processes."""

    def gather(self, value: Value) -> list[Value]:
        """Returns the values of all processes."""

    def exchange(self, operation: Callable[[], Value]) -> Value:
        """Calls an operation of torch in which all processes take part."""


@dataclass(frozen=True)
class GradientBucket:
    """The gradients of parameters with one type and device, one after the other.

    Attributes:
        parameters: The parameters.
        shapes: Shapes of the gradients; complex numbers are pairs of real ones.
        flat: [sum of the sizes + number of parameters]: the gradients of this process, zeros for a
            parameter without one, and then for each parameter 1 if it has a gradient here, else 0.
        processes: The processes that have such a bucket.
    """

    parameters: Sequence[Tensor]
    shapes: Sequence[torch.Size]
    flat: Tensor
    processes: Summing

    @classmethod
    def of(cls, parameters: Sequence[Tensor], processes: Summing) -> GradientBucket:
        """Returns copies of the gradients of parameters with one type and device."""
        pieces = []
        flags = []
        for parameter in parameters:
            gradient = parameter.grad
            flags.append(0.0 if gradient is None else 1.0)
            values = torch.zeros_like(parameter) if gradient is None else gradient
            pieces.append(real_pairs(values.detach()))
        shapes = [piece.shape for piece in pieces]
        flattened = [piece.reshape(-1) for piece in pieces]
        flattened.append(flattened[0].new_tensor(flags))
        return cls(parameters, shapes, torch.cat(flattened), processes)

    def sum(self) -> None:
        """Adds up gradients and flags over all processes, which the slot ``sum_gradients`` does."""
        self.processes.sum_in_place(self.flat)

    @property
    def gradients(self) -> Tensor:
        """The gradients as one vector, without the flags; it shares the memory of ``flat``."""
        return self.flat[: -len(self.parameters)]

    @property
    def flags(self) -> Tensor:
        """The flags, in the memory of ``flat``."""
        return self.flat[-len(self.parameters) :]

    def views(self) -> list[Tensor]:
        """Returns the gradients in their shapes, in the memory of ``flat``."""
        pieces = torch.split(self.gradients, [shape.numel() for shape in self.shapes])
        return [
            piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)
        ]


def real_pairs(tensor: Tensor) -> Tensor:
    """Returns complex numbers as pairs, which share the memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
