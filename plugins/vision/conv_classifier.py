"""The classifier with plain, strided and transposed convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from .classifier import GROUPS
from .convolution.modules import Convolution, Convolve, TransposedConvolution
from .convolution.native import convolution
from .image_classifier import ConvolutionalClassifier

if TYPE_CHECKING:
    from .config import ConvClassifierConfig


class ConvBlock(nn.Sequential):
    """A convolution, its normalisation and a ReLU.

    Args:
        conv: The convolution.
        norm: ``group`` or ``batch``.
    """

    def __init__(self, conv: Convolution | TransposedConvolution, norm: str) -> None:
        channels = conv.out_channels
        layer = (
            nn.BatchNorm2d(channels)
            if norm == "batch"
            else nn.GroupNorm(GROUPS, channels)
        )
        super().__init__(conv, layer, nn.ReLU())


class SkipNet(nn.Module):
    """A convolutional network from images [B, C, H, W] to logits [B, classes].

    Args:
        shape: Channels, height and width of an image.
        width: Channels of the first convolution.
        classes: Number of classes.
        norm: ``group`` or ``batch``.
        convolve: The slot ``conv`` of a learner.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        width: int,
        classes: int,
        norm: str = "group",
        convolve: Convolve = convolution,
    ) -> None:
        super().__init__()

        def conv(inputs: int, outputs: int, stride: int = 1) -> Convolution:
            return Convolution(
                inputs, outputs, 3, stride, padding=1, bias=False, convolve=convolve
            )

        up = TransposedConvolution(
            2 * width, width, 2, 2, bias=False, convolve=convolve
        )
        self.blocks = nn.ModuleList(
            [
                ConvBlock(conv(shape[0], width), norm),
                ConvBlock(conv(width, 2 * width, stride=2), norm),
                ConvBlock(conv(2 * width, 2 * width), norm),
                ConvBlock(up, norm),
            ]
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Returns the logits."""
        first, down, same, up = self.blocks
        fine = first(image)
        coarse = same(down(fine))
        # An odd height or width is one pixel smaller than what two halves are enlarged to.
        enlarged = up(coarse)[:, :, : fine.shape[2], : fine.shape[3]]
        features = torch.cat((fine, enlarged), 1)
        logits: Tensor = self.head(F.adaptive_avg_pool2d(features, 1).flatten(1))
        return logits


class ConvClassifier(ConvolutionalClassifier):
    """Classifies images with ``SkipNet``."""

    module: SkipNet
    sensitive: ClassVar[tuple[str, ...]] = ("blocks.0", "head")

    def network(self, config: ConvClassifierConfig, classes: int) -> nn.Module:
        """Returns the network with the skip connection."""
        return SkipNet(self.shape, config.width, classes, config.norm, self.conv_slot)
