"""Convolution as a product in the frequency domain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import torch
from scipy.fft import next_fast_len
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from .backend import PlainBackend
from .geometry import ConvGeometry, Pair
from .key import ConvKey
from .workspace import Workspace


class Fft(PlainBackend):
    """Multiplies the Fourier transforms of input and kernel. Its cost depends little on the size
    of the kernel.

    Images are padded to a length whose transform is fast. The circular convolution of that length
    is the plain one where it is used: no sum reaches beyond the padded image.
    """

    name: ClassVar[str] = "fft"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float64")
    float32_tolerance: ClassVar[float] = 5e-6

    def geometry_refusal(self, key: ConvKey) -> str | None:
        """Returns that strides and dilations would compute what is then thrown away."""
        if key.stride != (1, 1) or key.dilation != (1, 1):
            return f"'fft' computes stride 1 and dilation 1, not {key.geometry}"
        return None

    def workspace_bytes(self, key: ConvKey) -> int:
        """Returns the bytes of the three spectra."""
        size = (key.h, key.w) if not key.transposed else key.y_size[2:]
        height, width = _lengths(size, key.geometry)
        bins = height * (width // 2 + 1)
        outer, inner, *_ = key.w_size
        return 2 * key.itemsize * bins * (key.n * key.c + key.n * key.k + outer * inner)

    def convolve(
        self, x: Tensor, w: Tensor, geometry: ConvGeometry, workspace: Workspace
    ) -> Tensor:
        """Returns the output of a plain convolution: y[i] is the sum of x[i + r] w[r]."""
        lengths = _lengths(x.shape[2:], geometry)
        inputs = _spectrum(_padded(x, geometry), lengths, geometry.groups, 1)
        weights = _spectrum(w, lengths, geometry.groups, 0)
        # The conjugate of the weights makes it a correlation, which deep learning calls
        # convolution.
        y = _inverse(inputs @ weights.mH, lengths, 1)
        height, width = geometry.output_size(x.shape[2:], w.shape[2:])
        return y[:, :, :height, :width].contiguous()

    def data_gradient(
        self,
        gradient: Tensor,
        w: Tensor,
        geometry: ConvGeometry,
        size: Sequence[int],
        workspace: Workspace,
    ) -> Tensor:
        """Returns the gradient of a plain convolution's input: x[j] is the sum of y[j - r] w[r]."""
        lengths = _lengths(size[2:], geometry)
        gradients = _spectrum(gradient, lengths, geometry.groups, 1)
        weights = _spectrum(w, lengths, geometry.groups, 0)
        x = _inverse(gradients @ weights, lengths, 1)
        # The result is that of the padded input; the gradient of the padding is not needed.
        first_row, first_column = geometry.padding
        rows = slice(first_row, first_row + size[2])
        columns = slice(first_column, first_column + size[3])
        return x[:, :, rows, columns].contiguous()

    def weight_gradient(
        self,
        gradient: Tensor,
        x: Tensor,
        geometry: ConvGeometry,
        size: Sequence[int],
        workspace: Workspace,
    ) -> Tensor:
        """Returns the weight gradient of a plain convolution: w[r] is the sum of x[i + r] y[i]."""
        lengths = _lengths(x.shape[2:], geometry)
        gradients = _spectrum(gradient, lengths, geometry.groups, 1)
        inputs = _spectrum(_padded(x, geometry), lengths, geometry.groups, 1)
        w = _inverse(gradients.mH @ inputs, lengths, 0)
        return w[:, :, : size[2], : size[3]].contiguous()


def _padded(x: Tensor, geometry: ConvGeometry) -> Tensor:
    rows, columns = geometry.padding
    return F.pad(x, (columns, columns, rows, rows))


# The search of SciPy takes longer than the transform of a small image.
@cache
def _fast_length(length: int) -> int:
    return int(next_fast_len(length, real=True))


def _lengths(size: Sequence[int], geometry: ConvGeometry) -> Pair:
    """Returns the transform lengths for a plain convolution's input of this height and width."""
    height, width = (
        _fast_length(length + 2 * pad)
        for length, pad in zip(size, geometry.padding, strict=True)
    )
    return height, width


def _spectrum(tensor: Tensor, lengths: Pair, groups: int, axis: int) -> Tensor:
    """Returns a matrix for every frequency and group, [bins, groups, rows, columns].

    Args:
        tensor: [rows, columns, height, width], with one of the first two also over the groups.
        lengths: Of the transform.
        groups: Number of groups.
        axis: Which of the first two contains the groups.
    """
    spectrum = torch.fft.rfft2(tensor, lengths).flatten(2)
    rows, columns, bins = spectrum.shape
    shape = (groups, -1, columns, bins) if axis == 0 else (rows, groups, -1, bins)
    matrices: Tensor = spectrum.view(shape).movedim(axis, 0).movedim(-1, 0)
    return matrices


def _inverse(spectrum: Tensor, lengths: Pair, axis: int) -> Tensor:
    """Returns the tensor of whose spectrum these are the matrices; the groups go into this axis."""
    merged = spectrum.movedim(0, -1).movedim(0, axis).flatten(axis, axis + 1)
    result: Tensor = torch.fft.irfft2(
        merged.reshape(*merged.shape[:2], lengths[0], -1), lengths
    )
    return result
