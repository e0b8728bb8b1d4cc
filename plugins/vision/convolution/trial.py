"""Fresh inputs for a convolution, its work with chosen backends, and the rounding errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .backend import Backend
from .function import convolve
from .key import ConvKey, Direction
from .plan import ConvPlan, Needs
from .workspace import Workspace


class Sample(NamedTuple):
    """Tensors of one convolution.

    Attributes:
        x: Input.
        w: Weight.
        gradient: Gradient of the output.
    """

    x: Tensor
    w: Tensor
    gradient: Tensor

    def double(self) -> Sample:
        """Returns the tensors in float64."""
        return Sample(*(tensor.double() for tensor in self))


class Sampler:
    """Draws tensors for a convolution, without a trace in torch's random numbers.

    Args:
        key: The convolution.
        device: Where the tensors are.
        seed: Of the random numbers.
    """

    def __init__(self, key: ConvKey, device: torch.device, seed: int = 0) -> None:
        self.key = key
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def draw(self) -> Sample:
        """Returns tensors that nothing has computed with before."""
        key = self.key
        x = self._normal(key.x_size)
        gradient = self._normal(key.y_size)
        if key.layout == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)
            gradient = gradient.contiguous(memory_format=torch.channels_last)
        return Sample(x, self._normal(key.w_size), gradient)

    def _normal(self, size: tuple[int, ...]) -> Tensor:
        values = torch.randn(size, generator=self._generator, device=self.device)
        return values.to(self.key.torch_dtype)


@dataclass(frozen=True)
class Work:
    """A timed function.

    Attributes:
        name: Of the backend, or of the plan.
        call: Computes with a sample.
    """

    name: str
    call: Callable[[Sample], object]


def compute(
    backend: Backend,
    key: ConvKey,
    direction: Direction,
    sample: Sample,
    workspace: Workspace,
) -> Tensor:
    """Returns the result of one direction."""
    x, w, gradient = sample
    if direction == "forward":
        return backend.forward(x, w, key.geometry, workspace)
    if direction == "backward_data":
        return backend.backward_data(gradient, w, key.geometry, key.x_size, workspace)
    return backend.backward_weight(gradient, x, key.geometry, key.w_size, workspace)


def rounding_error(result: Tensor, reference: Tensor) -> float:
    """Returns the relative L2 error; infinite if the sizes differ or a number is not finite."""
    if result.shape != reference.shape:
        return float("inf")
    error = (result.double() - reference).norm() / reference.norm()
    # NaN compares as not larger than any limit.
    return float(error.nan_to_num(float("inf")))


def direction_work(
    backend: Backend, key: ConvKey, direction: Direction, workspace: Workspace
) -> Work:
    """Returns the work of one direction."""
    return Work(
        backend.name, lambda sample: compute(backend, key, direction, sample, workspace)
    )


def backward_work(backend: Backend, key: ConvKey, workspace: Workspace) -> Work:
    """Returns the work of both gradients, which a backend may compute together."""

    def call(sample: Sample) -> object:
        return backend.backward(
            sample.gradient, sample.x, sample.w, key.geometry, workspace
        )

    return Work(backend.name, call)


def step_work(
    plan: ConvPlan,
    key: ConvKey,
    needs: Needs,
    backends: Mapping[str, Backend],
    workspace: Workspace,
) -> Work:
    """Returns the work of a training step, as a network calls it."""

    def choose(part: ConvKey) -> Backend:
        return backends[getattr(plan, part.direction)]

    def call(sample: Sample) -> object:
        # Leaves of this call alone: gradients must not accumulate over the calls of a block.
        x = sample.x.detach().requires_grad_(needs.data)
        w = sample.w.detach().requires_grad_(needs.weight)
        with torch.set_grad_enabled(any(needs)):
            y = convolve(x, w, key.geometry, choose, None, workspace)
        leaves = [leaf for leaf in (x, w) if leaf.requires_grad]
        return torch.autograd.grad(y, leaves, sample.gradient) if leaves else y

    return Work("/".join(plan), call)
