"""ConvGeometry of a convolution: what it does to sizes, and which geometries are impossible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Pair = tuple[int, int]
"""A number for the height and one for the width."""


class ConvGeometry(NamedTuple):
    """Parameters of ``torch.nn.functional.conv2d`` and ``conv_transpose2d`` that move the kernel.

    Attributes:
        stride: Steps of the kernel.
        padding: Zeros on either side.
        dilation: Distance between the elements of the kernel.
        groups: Number of groups of channels that are convolved separately.
        transposed: Whether this is the transposed convolution.
        output_padding: Additional rows and columns of a transposed convolution's output.
    """

    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    transposed: bool = False
    output_padding: Pair = (0, 0)

    def extent(self, kernel: Sequence[int]) -> Pair:
        """Returns the rows and columns that a kernel with this dilation covers."""
        height, width = kernel
        return self.dilation[0] * (height - 1) + 1, self.dilation[1] * (width - 1) + 1

    def output_size(self, size: Sequence[int], kernel: Sequence[int]) -> Pair:
        """Returns height and width of the output for an input of this height and width."""
        height, width = (
            self._output_length(length, extent, axis)
            for axis, (length, extent) in enumerate(
                zip(size, self.extent(kernel), strict=True)
            )
        )
        return height, width

    def _output_length(self, length: int, extent: int, axis: int) -> int:
        stride = self.stride[axis]
        padding = self.padding[axis]
        if self.transposed:
            return (
                (length - 1) * stride - 2 * padding + extent + self.output_padding[axis]
            )
        return (length + 2 * padding - extent) // stride + 1

    def restoring(self, size: Sequence[int], kernel: Sequence[int]) -> ConvGeometry:
        """Returns the transposed geometry that gives an output the size of this geometry's input.

        With a stride, inputs of several sizes have outputs of one size: 7 and 8 both become 4.
        ``output_padding`` is what the transposed convolution needs to return to the right one.
        """
        plain = self._replace(transposed=True, output_padding=(0, 0))
        restored = plain.output_size(self.output_size(size, kernel), kernel)
        return plain._replace(
            output_padding=(size[0] - restored[0], size[1] - restored[1])
        )

    def swapped(self) -> ConvGeometry:
        """Returns the plain geometry of a transposed one, whose gradient it computes, and vice
        versa.
        """
        return self._replace(transposed=not self.transposed, output_padding=(0, 0))

    def problem(self, x_size: Sequence[int], w_size: Sequence[int]) -> str | None:
        """Returns why tensors of these sizes cannot be convolved; None if they can.

        Args:
            x_size: Batch, channels, height and width of the input.
            w_size: Of the weight: [K, C / groups, R, S], and [C, K / groups, R, S] for a
                transposed convolution.
        """
        for name, size in (("input", x_size), ("weight", w_size)):
            if len(size) != 4:
                return f"the {name} should have 4 dimensions, got {len(size)}"
        if min(*x_size[1:], *w_size) < 1:
            return f"sizes should be positive, got input {list(x_size)} and weight {list(w_size)}"
        return self._problem_of_numbers() or self._problem_of_sizes(x_size, w_size)

    def _problem_of_numbers(self) -> str | None:
        for name in ("stride", "dilation"):
            if min(getattr(self, name)) < 1:
                return f"{name}: {getattr(self, name)} should be at least 1"
        for name in ("padding", "output_padding"):
            if min(getattr(self, name)) < 0:
                return f"{name}: {getattr(self, name)} should not be negative"
        if self.groups < 1:
            return f"groups: {self.groups} should be at least 1"
        if any(self.output_padding) and not self.transposed:
            return "output_padding: only a transposed convolution has one"
        # Torch has the same limit: a larger padding has rows that no input reaches.
        limits = [max(pair) for pair in zip(self.stride, self.dilation, strict=True)]
        if any(
            extra >= limit
            for extra, limit in zip(self.output_padding, limits, strict=True)
        ):
            return (
                f"output_padding: {self.output_padding} should be smaller than the stride "
                f"or the dilation"
            )
        return None

    def _problem_of_sizes(
        self, x_size: Sequence[int], w_size: Sequence[int]
    ) -> str | None:
        channels = x_size[1]
        expected = w_size[0] if self.transposed else w_size[1] * self.groups
        if channels != expected:
            return (
                f"the input has {channels} channels, the weight is made for {expected}"
            )
        if w_size[0] % self.groups:
            return f"groups: {self.groups} does not divide {w_size[0]} channels of the weight"
        height, width = self.output_size(x_size[2:], w_size[2:])
        if min(height, width) < 1:
            kernel = f"{w_size[2]} x {w_size[3]}"
            return f"the output would have {height} x {width} pixels: kernel {kernel}, {self}"
        return None

    def __str__(self) -> str:
        names = ("stride", "padding", "dilation")
        return ", ".join(
            f"{name} {getattr(self, name)[0]}x{getattr(self, name)[1]}"
            for name in names
        )
