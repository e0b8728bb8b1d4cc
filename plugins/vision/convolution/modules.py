"""Layers of a network that convolve through a slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .native import convolution

Convolve = Callable[..., Tensor]
"""The slot ``conv``: x, w, stride, padding, dilation, groups, transposed, output_padding, bias to
y.
"""


class Convolution(nn.Conv2d):
    """A convolution with the parameters of ``torch.nn.Conv2d`` that another function computes.

    Args:
        arguments: Those of ``torch.nn.Conv2d``; the padding is in numbers, and of zeros.
        convolve: The slot ``conv`` of a learner; torch's convolution without one.
        settings: Those of ``torch.nn.Conv2d``, by name.
    """

    def __init__(
        self, *arguments: Any, convolve: Convolve = convolution, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        _check_padding(self)
        self.convolve = convolve

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] to [N, K, P, Q]."""
        return self.convolve(
            x,
            self.weight,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.transposed,
            self.output_padding,
            self.bias,
        )


class TransposedConvolution(nn.ConvTranspose2d):
    """A transposed convolution with the parameters of ``torch.nn.ConvTranspose2d``; see
    ``Convolution``.
    """

    def __init__(
        self, *arguments: Any, convolve: Convolve = convolution, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        _check_padding(self)
        self.convolve = convolve

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """[N, C, H, W] to [N, K, P, Q]; the size follows from ``output_padding``."""
        if output_size is not None:
            raise ValueError(
                "TransposedConvolution: set output_padding instead of output_size"
            )
        return self.convolve(
            x,
            self.weight,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.transposed,
            self.output_padding,
            self.bias,
        )


def _check_padding(layer: nn.Conv2d | nn.ConvTranspose2d) -> None:
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        name = type(layer).__name__
        raise ValueError(
            f"{name}: padding {layer.padding} of '{layer.padding_mode}' should be numbers of zeros"
        )
