"""Base classes of the algorithms for convolutions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from .geometry import ConvGeometry
from .key import ConvKey, format_of
from .workspace import Workspace, new_workspace

TOLERANCE = {"float64": 1e-13, "float32": 1e-6, "bfloat16": 2e-2, "float16": 4e-3}
"""Largest relative L2 error to a float64 reference, by type."""
RELAXED_TOLERANCE = {"tf32": 2e-3, "bf16": 2e-2}
"""The same in float32 where torch may round the factors of products."""


class Backend(ABC):
    """An algorithm for all three directions of a convolution.

    The functions are pure: they depend on their arguments alone and keep nothing. ``refusal``
    must be None for what they are called with.
    """

    name: ClassVar[str]
    """The name in recipes."""
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float64", "bfloat16", "float16")
    """Types of tensors that it computes."""
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    """Types of devices on which it computes."""
    float32_tolerance: ClassVar[float] = TOLERANCE["float32"]
    """Largest relative L2 error in float32."""

    def refusal(self, key: ConvKey) -> str | None:
        """Returns why this convolution cannot be computed; None if it can."""
        problem = key.geometry.problem(key.x_size, key.w_size)
        if problem is not None:
            return problem
        if key.device_type not in self.devices:
            return (
                f"'{self.name}' computes on {' and '.join(self.devices)}, not on "
                f"'{key.device_type}'"
            )
        if key.dtype not in self.dtypes:
            return f"'{self.name}' computes {', '.join(self.dtypes)}, not {key.dtype}"
        return self.geometry_refusal(key)

    def geometry_refusal(self, key: ConvKey) -> str | None:
        """Returns why a possible geometry is not one of this algorithm; None if it is."""
        return None

    def tolerance(self, key: ConvKey) -> float:
        """Returns the largest relative L2 error to a float64 reference that counts as correct."""
        if key.dtype != "float32":
            return TOLERANCE[key.dtype]
        # Torch may be allowed to round the factors of float32 products, and then so may others.
        convolution, product = key.math.split("/")[:2]
        relaxed = RELAXED_TOLERANCE.get(convolution, 0.0)
        if product != "highest":
            relaxed = max(
                relaxed, RELAXED_TOLERANCE["tf32" if product == "high" else "bf16"]
            )
        return max(self.float32_tolerance, relaxed)

    def workspace_bytes(self, key: ConvKey) -> int:
        """Returns the bytes of intermediate results of this class; those inside of libraries are
        unknown.
        """
        return 0

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        w: Tensor,
        geometry: ConvGeometry,
        workspace: Workspace = new_workspace,
    ) -> Tensor:
        """Returns the output [N, K, P, Q] of an input [N, C, H, W]."""

    @abstractmethod
    def backward_data(
        self,
        gradient: Tensor,
        w: Tensor,
        geometry: ConvGeometry,
        size: Sequence[int],
        workspace: Workspace = new_workspace,
    ) -> Tensor:
        """Returns the gradient of the input, which has this size, from that of the output."""

    @abstractmethod
    def backward_weight(
        self,
        gradient: Tensor,
        x: Tensor,
        geometry: ConvGeometry,
        size: Sequence[int],
        workspace: Workspace = new_workspace,
    ) -> Tensor:
        """Returns the gradient of the weight, which has this size, from that of the output."""

    def backward(
        self,
        gradient: Tensor,
        x: Tensor,
        w: Tensor,
        geometry: ConvGeometry,
        workspace: Workspace = new_workspace,
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients of input and weight."""
        return (
            self.backward_data(gradient, w, geometry, x.shape, workspace),
            self.backward_weight(gradient, x, geometry, w.shape, workspace),
        )


class PlainBackend(Backend):
    """An algorithm that is written for plain convolutions; transposed ones follow from it.

    A transposed convolution is the gradient of a plain one by its input. Its gradient by its
    input is the plain convolution, and that by its weight is the plain one's with input and
    gradient exchanged.
    """

    def forward(
        self,
        x: Tensor,
        w: Tensor,
        geometry: ConvGeometry,
        workspace: Workspace = new_workspace,
    ) -> Tensor:
        """Returns the output [N, K, P, Q] of an input [N, C, H, W]."""
        if geometry.transposed:
            channels = w.shape[1] * geometry.groups
            pixels = geometry.output_size(x.shape[2:], w.shape[2:])
            size = (x.shape[0], channels, *pixels)
            y = self.data_gradient(x, w, geometry.swapped(), size, workspace)
        else:
            y = self.convolve(x, w, geometry, workspace)
        # Later layers are faster with the format that torch would have returned.
        return y.contiguous(memory_format=format_of(x))

    def backward_data(
        self,
        gradient: Tensor,
        w: Tensor,
        geometry: ConvGeometry,
        size: Sequence[int],
        workspace: Workspace = new_workspace,
    ) -> Tensor:
        """Returns the gradient of the input, which has this size, from that of the output."""
        if geometry.transposed:
            x = self.convolve(gradient, w, geometry.swapped(), workspace)
        else:
            x = self.data_gradient(gradient, w, geometry, size, workspace)
        return x.contiguous(memory_format=format_of(gradient))

    def backward_weight(
        self,
        gradient: Tensor,
        x: Tensor,
        geometry: ConvGeometry,
        size: Sequence[int],
        workspace: Workspace = new_workspace,
    ) -> Tensor:
        """Returns the gradient of the weight, which has this size, from that of the output."""
        if geometry.transposed:
            return self.weight_gradient(
                x, gradient, geometry.swapped(), size, workspace
            )
        return self.weight_gradient(gradient, x, geometry, size, workspace)

    @abstractmethod
    def convolve(
        self, x: Tensor, w: Tensor, geometry: ConvGeometry, workspace: Workspace
    ) -> Tensor:
        """Returns the output of a plain convolution."""

    @abstractmethod
    def data_gradient(
        self,
        gradient: Tensor,
        w: Tensor,
        geometry: ConvGeometry,
        size: Sequence[int],
        workspace: Workspace,
    ) -> Tensor:
        """Returns the gradient of a plain convolution's input."""

    @abstractmethod
    def weight_gradient(
        self,
        gradient: Tensor,
        x: Tensor,
        geometry: ConvGeometry,
        size: Sequence[int],
        workspace: Workspace,
    ) -> Tensor:
        """Returns the gradient of a plain convolution's weight."""
