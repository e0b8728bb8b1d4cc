"""Torch's convolution, with other memory formats and other libraries beneath it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from .backend import Backend
from .geometry import ConvGeometry, Pair
from .key import ConvKey, format_of
from .workspace import Workspace, bytes_of, new_workspace


def convolution(
    x: Tensor,
    w: Tensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    transposed: bool,
    output_padding: Pair,
    bias: Tensor | None = None,
) -> Tensor:
    """Computes a convolution as ``torch.nn`` does: what the slot ``conv`` is without a stage."""
    if transposed:
        return F.conv_transpose2d(
            x, w, bias, stride, padding, output_padding, groups, dilation
        )
    return F.conv2d(x, w, bias, stride, padding, dilation, groups)


class Native(Backend):
    """Torch's choice for tensors as they are."""

    name: ClassVar[str] = "native"

    def settings(self) -> AbstractContextManager[None]:
        """Returns a context in which torch computes."""
        return nullcontext()

    def converted(self, tensor: Tensor) -> Tensor:
        """Returns a tensor in the memory format of this backend."""
        return tensor

    def restored(self, result: Tensor, layout: torch.memory_format) -> Tensor:
        """Returns a result in the memory format in which torch would have returned it."""
        return result

    def forward(
        self,
        x: Tensor,
        w: Tensor,
        geometry: ConvGeometry,
        workspace: Workspace = new_workspace,
    ) -> Tensor:
        """Returns the output [N, K, P, Q] of an input [N, C, H, W]."""
        with self.settings():
            y = convolution(self.converted(x), self.converted(w), *geometry)
        return self.restored(y, format_of(x))

    def backward_data(
        self,
        gradient: Tensor,
        w: Tensor,
        geometry: ConvGeometry,
        size: Sequence[int],
        workspace: Workspace = new_workspace,
    ) -> Tensor:
        """Returns the gradient of the input, which has this size, from that of the output."""
        # Torch reads the size of the input only; an expanded tensor has it without its memory.
        x = gradient.new_empty(1).expand(*size)
        return self.restored(
            self._backward(gradient, x, w, geometry, (True, False))[0],
            format_of(gradient),
        )

    def backward_weight(
        self,
        gradient: Tensor,
        x: Tensor,
        geometry: ConvGeometry,
        size: Sequence[int],
        workspace: Workspace = new_workspace,
    ) -> Tensor:
        """Returns the gradient of the weight, which has this size, from that of the output."""
        w = gradient.new_empty(1).expand(*size)
        x = self.converted(x)
        _, weight = self._backward(gradient, x, w, geometry, (False, True))
        # Gradients have the format of their parameters, which optimizers expect.
        return weight.contiguous()

    def backward(
        self,
        gradient: Tensor,
        x: Tensor,
        w: Tensor,
        geometry: ConvGeometry,
        workspace: Workspace = new_workspace,
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients of input and weight, which torch computes in one call."""
        data, weight = self._backward(
            gradient, self.converted(x), w, geometry, (True, True)
        )
        return self.restored(data, format_of(gradient)), weight

    def _backward(
        self,
        gradient: Tensor,
        x: Tensor,
        w: Tensor,
        geometry: ConvGeometry,
        needed: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        # Without the gradient of the input, the weight is a placeholder of the right size.
        if needed[0]:
            w = self.converted(w)
        with self.settings():
            data, weight, _ = torch.ops.aten.convolution_backward(
                self.converted(gradient),
                x,
                w,
                None,
                geometry.stride,
                geometry.padding,
                geometry.dilation,
                geometry.transposed,
                geometry.output_padding,
                geometry.groups,
                [*needed, False],
            )
        return data, weight


class ChannelsLastKernels(Native):
    """Torch's kernels for images in memory pixel by pixel, with conversions there and back."""

    name: ClassVar[str] = "channels_last"

    def geometry_refusal(self, key: ConvKey) -> str | None:
        """Returns that there is nothing to convert where there is not."""
        return (
            "the input is in this format already"
            if key.layout == "channels_last"
            else None
        )

    def workspace_bytes(self, key: ConvKey) -> int:
        """Returns the bytes of the converted copies."""
        return bytes_of((key.x_size, key.w_size, key.y_size), key.itemsize)

    def converted(self, tensor: Tensor) -> Tensor:
        """Returns a copy in ``channels_last``."""
        return tensor.contiguous(memory_format=torch.channels_last)

    def restored(self, result: Tensor, layout: torch.memory_format) -> Tensor:
        """Returns a copy in the format of the baseline's result."""
        return result.contiguous(memory_format=layout)


class WithoutOneDnn(Native):
    """Torch's loops over products of matrices, with oneDNN switched off.

    The switch is global. While it is off, a convolution of another thread is computed without
    oneDNN, too: its result is rounded otherwise. It is switched on again when the last thread
    leaves.
    """

    name: ClassVar[str] = "onednn_off"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def settings(self) -> AbstractContextManager[None]:
        """Returns a context without oneDNN."""
        return _SWITCH


class _Switch:
    """Switches oneDNN off inside the ``with``, which several threads may enter at a time."""

    # A generator with ``torch.backends.mkldnn.flags`` takes as long as a small convolution. It
    # would also reset determinism and precision to its defaults.
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._is_enabled = True

    def __enter__(self) -> None:
        mkldnn: Any = torch.backends.mkldnn
        # Two threads that each restore what they have found would leave it off for good.
        with self._lock:
            if self._depth == 0:
                self._is_enabled = mkldnn.enabled
                mkldnn.enabled = False
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        mkldnn: Any = torch.backends.mkldnn
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                mkldnn.enabled = self._is_enabled


_SWITCH = _Switch()


class CudnnHeuristic(Native):
    """The algorithm that cuDNN's heuristic selects."""

    name: ClassVar[str] = "cudnn"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    benchmark: ClassVar[bool] = False

    def geometry_refusal(self, key: ConvKey) -> str | None:
        """Returns that torch needs cuDNN."""
        cudnn: Any = torch.backends.cudnn
        return None if cudnn.is_available() else "torch was built without cuDNN"

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Returns a context in which cuDNN selects algorithms this way."""
        # The setting is global, so the caller's value is restored.
        benchmark = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = self.benchmark
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = benchmark


class CudnnBenchmark(CudnnHeuristic):
    """The algorithm that cuDNN measures to be the fastest, once for each shape."""

    name: ClassVar[str] = "cudnn_benchmark"
    benchmark: ClassVar[bool] = True

    def geometry_refusal(self, key: ConvKey) -> str | None:
        """Returns that a measurement may select another algorithm the next time."""
        if "deterministic" in key.math:
            return (
                "a measurement may select another algorithm the next time; deterministic "
                "algorithms are required"
            )
        return super().geometry_refusal(key)
