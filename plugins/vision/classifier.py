"""A residual network that classifies images."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, cast

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import Prunable

from .convolution.modules import Convolution, Convolve
from .convolution.native import convolution
from .image_classifier import ConvolutionalClassifier

if TYPE_CHECKING:
    from .config import ClassifierConfig

GROUPS = 8
POOLED = 4
"""Approximate height and width of the input of the last layer."""


class ResidualBlock(nn.Module):
    """Two convolutions that are added to a shortcut; their initial output is zero."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, convolve: Convolve = convolution
    ) -> None:
        super().__init__()
        self.conv1 = Convolution(
            inputs, outputs, 3, stride, padding=1, bias=False, convolve=convolve
        )
        self.norm1 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = Convolution(
            outputs, outputs, 3, padding=1, bias=False, convolve=convolve
        )
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.shortcut = Convolution(
                inputs, outputs, 1, stride, bias=False, convolve=convolve
            )
        # With a residual of zero, a deep network starts as a shallow one.
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [B, outputs, H / stride, W / stride] for [B, inputs, H, W]."""
        residual = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(self.shortcut(x) + residual)

    def prunable(self) -> Iterator[Prunable]:
        """Yields the channels between the convolutions, by group of the normalisation."""
        # Single channels cannot be removed, because the groups would have different sizes.
        norm = self.norm1
        yield Prunable(
            "ff",
            norm.num_groups,
            [(self.conv1, 1), (norm, 1)],
            [self.conv2],
            [(norm, "num_groups")],
        )


class ResidualNet(nn.Module):
    """A residual network from images [B, C, H, W] to logits [B, classes]."""

    def __init__(
        self,
        shape: tuple[int, ...],
        widths: list[int],
        classes: int,
        convolve: Convolve = convolution,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        channels, height, width = shape
        stem = Convolution(
            channels, widths[0], 3, padding=1, bias=False, convolve=convolve
        )
        self.stem = nn.Sequential(stem, nn.GroupNorm(GROUPS, widths[0]), nn.ReLU())
        pairs = [(widths[0], widths[0], 1), *((a, b, 2) for a, b in pairwise(widths))]
        self.blocks = nn.ModuleList()
        for inputs, outputs, stride in pairs:
            self.blocks.append(ResidualBlock(inputs, outputs, stride, convolve))
            self.blocks.append(ResidualBlock(outputs, outputs, 1, convolve))
        for _ in widths[1:]:
            height = (height + 1) // 2
            width = (width + 1) // 2
        kernel = (max(1, height // POOLED), max(1, width // POOLED))
        self.pool = nn.AvgPool2d(kernel)
        pixels = (height // kernel[0]) * (width // kernel[1])
        self.head = nn.Linear(widths[-1] * pixels, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Returns the logits."""
        x = self.stem(image)
        for block in self.blocks:
            x = block(x)
        features = self.pool(x).flatten(1)
        if self.dropout:
            features = F.dropout(features, self.dropout, self.training)
        logits: Tensor = self.head(features)
        return logits


class Classifier(ConvolutionalClassifier):
    """Classifies images with ``ResidualNet``."""

    module: ResidualNet
    sensitive: ClassVar[tuple[str, ...]] = ("stem", "head")

    def network(self, config: ClassifierConfig, classes: int) -> nn.Module:
        """Returns the residual network."""
        return ResidualNet(
            self.shape, config.widths, classes, self.conv_slot, config.dropout
        )

    def prunable(self) -> Iterator[Prunable]:
        """Yields the channels inside of the blocks."""
        for block in self.module.blocks:
            yield from cast(ResidualBlock, block).prunable()
