"""Convolution with fewer products (Winograd 1980; Lavin and Gray 2015, arXiv:1509.09308)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from .backend import PlainBackend
from .geometry import ConvGeometry
from .key import ConvKey
from .workspace import Workspace, bytes_of, take

KERNEL = 3


class Winograd(PlainBackend):
    """F(2x2, 3x3): 16 products for 4 outputs of a kernel of 3 x 3, where the definition has 36.

    Tiles of 4 x 4 inputs and the kernel are transformed by constant matrices, multiplied element
    by element with the sum over channels, and transformed back. Sums of the transforms round more
    than the definition does. F(4x4, 3x3) is not offered: with 512 channels its error in float32
    was 5.5e-6, above the tolerance.
    """

    name: ClassVar[str] = "winograd"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float64")
    float32_tolerance: ClassVar[float] = 5e-6
    outputs: ClassVar[int] = 2
    """Height and width of the outputs of a tile."""
    input_matrix: ClassVar[tuple[tuple[float, ...], ...]] = (
        (1, 0, -1, 0),
        (0, 1, 1, 0),
        (0, -1, 1, 0),
        (0, 1, 0, -1),
    )
    kernel_matrix: ClassVar[tuple[tuple[float, ...], ...]] = (
        (1, 0, 0),
        (1 / 2, 1 / 2, 1 / 2),
        (1 / 2, -1 / 2, 1 / 2),
        (0, 0, 1),
    )
    output_matrix: ClassVar[tuple[tuple[float, ...], ...]] = (
        (1, 1, 1, 0),
        (0, 1, -1, -1),
    )

    def geometry_refusal(self, key: ConvKey) -> str | None:
        """Returns that the matrices are made for one kernel."""
        if key.kernel != (KERNEL, KERNEL):
            return f"'{self.name}' computes kernels of 3 x 3, not {key.kernel[0]} x {key.kernel[1]}"
        if key.stride != (1, 1) or key.dilation != (1, 1):
            return f"'{self.name}' computes stride 1 and dilation 1, not {key.geometry}"
        return None

    def workspace_bytes(self, key: ConvKey) -> int:
        """Returns the bytes of the tiles, and of their transforms and products."""
        size = (key.h, key.w) if key.transposed else key.y_size[2:]
        channels = key.w_size[1] * key.groups
        outputs = key.w_size[0]
        # The gradient of the input is a convolution whose outputs are the input's pixels.
        if (key.direction == "backward_data") != (
            key.transposed and key.direction != "backward_weight"
        ):
            size = key.y_size[2:] if key.transposed else (key.h, key.w)
            channels = key.w_size[0]
            outputs = key.w_size[1] * key.groups
        count = key.n * self._tiles(size[0]) * self._tiles(size[1])
        if key.direction == "backward_weight":
            return bytes_of(self._weight_shapes(channels, outputs, count), key.itemsize)
        return bytes_of(self._shapes(channels, outputs, count), key.itemsize)

    def convolve(
        self, x: Tensor, w: Tensor, geometry: ConvGeometry, workspace: Workspace
    ) -> Tensor:
        """Returns the output of a plain convolution."""
        return self._convolve(x, w, geometry.padding, geometry.groups, workspace)

    def data_gradient(
        self,
        gradient: Tensor,
        w: Tensor,
        geometry: ConvGeometry,
        size: Sequence[int],
        workspace: Workspace,
    ) -> Tensor:
        """Returns the gradient of a plain convolution's input: a convolution with the kernel
        turned around.
        """
        # Within a group, input and output channels change places.
        grouped = w.reshape(geometry.groups, -1, *w.shape[1:]).transpose(1, 2)
        flipped = grouped.flatten(0, 1).flip(2, 3)
        padding = KERNEL - 1 - geometry.padding[0], KERNEL - 1 - geometry.padding[1]
        return self._convolve(gradient, flipped, padding, geometry.groups, workspace)

    def weight_gradient(
        self,
        gradient: Tensor,
        x: Tensor,
        geometry: ConvGeometry,
        size: Sequence[int],
        workspace: Workspace,
    ) -> Tensor:
        """Returns the gradient of a plain convolution's weight, by the transposed matrices in
        reverse order.
        """
        n, k, height, width = gradient.shape
        c = x.shape[1]
        rows = self._tiles(height)
        columns = self._tiles(width)
        shapes = self._weight_shapes(c, k, n * rows * columns)
        tiles, inputs, pixels, gradients = take(workspace, shapes, x)
        self._transform_inputs(x, geometry.padding, rows, columns, tiles, inputs)

        # Zeros complete the last tiles, and add nothing to the gradient.
        m = self.outputs
        padded = F.pad(gradient, (0, columns * m - width, 0, rows * m - height))
        blocks = padded.view(n, k, rows, m, columns, m).permute(3, 5, 1, 0, 2, 4)
        pixels.view(m, m, k, n, rows, columns).copy_(blocks)
        torch.mm(
            _square(self.output_matrix, x).T,
            pixels.flatten(1),
            out=gradients.flatten(1),
        )

        grouped_inputs = _by_group(inputs, geometry.groups).transpose(2, 3)
        products = _by_group(gradients, geometry.groups) @ grouped_inputs
        w = _square(self.kernel_matrix, x).T @ products.flatten(1)
        return w.view(KERNEL, KERNEL, *size[:2]).permute(2, 3, 0, 1).contiguous()

    def _convolve(
        self,
        x: Tensor,
        w: Tensor,
        padding: Sequence[int],
        groups: int,
        workspace: Workspace,
    ) -> Tensor:
        """Returns a convolution with this padding, which may be negative."""
        n, c, height, width = x.shape
        k = w.shape[0]
        p = height + 2 * padding[0] - KERNEL + 1
        q = width + 2 * padding[1] - KERNEL + 1
        rows = self._tiles(p)
        columns = self._tiles(q)
        tiles, inputs, products = take(
            workspace, self._shapes(c, k, n * rows * columns), x
        )
        self._transform_inputs(x, padding, rows, columns, tiles, inputs)
        flat_weights = w.permute(2, 3, 0, 1).reshape(KERNEL * KERNEL, -1)
        kernels = _square(self.kernel_matrix, x) @ flat_weights
        kernels = kernels.view(-1, groups, k // groups, w.shape[1])

        torch.matmul(
            kernels, _by_group(inputs, groups), out=_by_group(products, groups)
        )
        pixels = _square(self.output_matrix, x) @ products.flatten(1)
        m = self.outputs
        y = pixels.view(m, m, k, n, rows, columns).permute(3, 2, 4, 0, 5, 1)
        return y.reshape(n, k, rows * m, columns * m)[:, :, :p, :q].contiguous()

    def _transform_inputs(
        self,
        x: Tensor,
        padding: Sequence[int],
        rows: int,
        columns: int,
        tiles: Tensor,
        inputs: Tensor,
    ) -> None:
        """Writes the tiles of an input, and their transforms."""
        m = self.outputs
        side = m + KERNEL - 1
        n, c, height, width = x.shape
        bottom = rows * m + KERNEL - 1 - height - padding[0]
        right = columns * m + KERNEL - 1 - width - padding[1]
        padded = F.pad(x, (padding[1], right, padding[0], bottom))
        windows = padded.unfold(2, side, m).unfold(3, side, m)
        tiles.view(side, side, c, n, rows, columns).copy_(
            windows.permute(4, 5, 1, 0, 2, 3)
        )
        torch.mm(_square(self.input_matrix, x), tiles.flatten(1), out=inputs.flatten(1))

    def _tiles(self, length: int) -> int:
        return -(-length // self.outputs)

    def _shapes(self, c: int, k: int, count: int) -> list[tuple[int, int, int]]:
        """Returns the shapes of tiles, their transforms and the products."""
        area = (self.outputs + KERNEL - 1) ** 2
        return [(area, c, count), (area, c, count), (area, k, count)]

    def _weight_shapes(self, c: int, k: int, count: int) -> list[tuple[int, int, int]]:
        """Returns the shapes of both kinds of tiles and of their transforms, inputs first."""
        area = (self.outputs + KERNEL - 1) ** 2
        return [
            (area, c, count),
            (area, c, count),
            (self.outputs**2, k, count),
            (area, k, count),
        ]


def _square(matrix: tuple[tuple[float, ...], ...], like: Tensor) -> Tensor:
    """Returns the matrix that transforms rows and columns of a flattened tile."""
    return _kronecker(matrix, like.dtype, like.device)


# The matrix is small, and computing it for each call takes longer than using it.
@cache
def _kronecker(
    matrix: tuple[tuple[float, ...], ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    factor = torch.tensor(matrix, dtype=torch.float64)
    return torch.kron(factor, factor).to(device, dtype)


def _by_group(matrices: Tensor, groups: int) -> Tensor:
    """Splits the channels of matrices [tile, channels, count] into groups."""
    return matrices.reshape(len(matrices), groups, -1, matrices.shape[2])
