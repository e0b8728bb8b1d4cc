"""Convolution as one product of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .backend import PlainBackend
from .geometry import ConvGeometry
from .key import ConvKey
from .workspace import Workspace, bytes_of, take


class Im2Col(PlainBackend):
    """Copies the pixels beneath the kernel into the columns of a matrix, and multiplies it by the
    weights.

    It takes the memory of the kernel's area times the input. A kernel of one pixel without stride
    and padding needs no copy.
    """

    name: ClassVar[str] = "im2col"

    def workspace_bytes(self, key: ConvKey) -> int:
        """Returns the bytes of the columns."""
        # The pixels are the columns already.
        if _is_pointwise(key.kernel, key.geometry):
            return 0
        # A transposed convolution is computed as the gradient of a plain one, whose input is
        # its output.
        channels, size = (
            (key.k, (key.h, key.w)) if key.transposed else (key.c, key.y_size[2:])
        )
        return bytes_of(
            [_columns_shape(key.n, channels, key.kernel, size)], key.itemsize
        )

    def convolve(
        self, x: Tensor, w: Tensor, geometry: ConvGeometry, workspace: Workspace
    ) -> Tensor:
        """Returns the output of a plain convolution."""
        size = geometry.output_size(x.shape[2:], w.shape[2:])
        columns = _columns(x, w.shape, geometry, workspace)
        weights = _by_group(w.flatten(1), geometry.groups, 0)
        y = weights @ _by_group(columns, geometry.groups, 1)
        return y.view(x.shape[0], w.shape[0], *size)

    def data_gradient(
        self,
        gradient: Tensor,
        w: Tensor,
        geometry: ConvGeometry,
        size: Sequence[int],
        workspace: Workspace,
    ) -> Tensor:
        """Returns the gradient of a plain convolution's input."""
        weights = _by_group(w.flatten(1), geometry.groups, 0).transpose(1, 2)
        gradients = _by_group(gradient.flatten(2), geometry.groups, 1)
        if _is_pointwise(w.shape[2:], geometry):
            return (weights @ gradients).view(*size)
        shape = _columns_shape(size[0], size[1], w.shape[2:], gradient.shape[2:])
        (columns,) = take(workspace, [shape], gradient)
        torch.matmul(weights, gradients, out=_by_group(columns, geometry.groups, 1))
        return torch.nn.functional.fold(
            columns,
            (size[2], size[3]),
            (w.shape[2], w.shape[3]),
            geometry.dilation,
            geometry.padding,
            geometry.stride,
        )

    def weight_gradient(
        self,
        gradient: Tensor,
        x: Tensor,
        geometry: ConvGeometry,
        size: Sequence[int],
        workspace: Workspace,
    ) -> Tensor:
        """Returns the gradient of a plain convolution's weight."""
        columns = _by_group(_columns(x, size, geometry, workspace), geometry.groups, 1)
        gradients = _by_group(gradient.flatten(2), geometry.groups, 1)
        # One product with samples and pixels as its inner dimension.
        return torch.einsum("ngkp,ngcp->gkc", gradients, columns).reshape(*size)


def _columns(
    x: Tensor, w_size: Sequence[int], geometry: ConvGeometry, workspace: Workspace
) -> Tensor:
    """Returns the columns [N, C * R * S, P * Q] of an input."""
    kernel = w_size[2], w_size[3]
    if _is_pointwise(kernel, geometry):
        return x.flatten(2)
    size = geometry.output_size(x.shape[2:], kernel)
    (columns,) = take(
        workspace, [_columns_shape(x.shape[0], x.shape[1], kernel, size)], x
    )
    torch.ops.aten.im2col.out(
        x, kernel, geometry.dilation, geometry.padding, geometry.stride, out=columns
    )
    return columns


def _columns_shape(
    n: int, channels: int, kernel: Sequence[int], size: Sequence[int]
) -> tuple[int, int, int]:
    return n, channels * kernel[0] * kernel[1], size[0] * size[1]


def _by_group(matrix: Tensor, groups: int, axis: int) -> Tensor:
    """Splits an axis of channels into groups and channels of a group."""
    return matrix.reshape(*matrix.shape[:axis], groups, -1, *matrix.shape[axis + 1 :])


def _is_pointwise(kernel: Sequence[int], geometry: ConvGeometry) -> bool:
    """Returns whether the columns are the input itself."""
    return (
        tuple(kernel) == (1, 1)
        and geometry.stride == (1, 1)
        and geometry.padding == (0, 0)
    )
