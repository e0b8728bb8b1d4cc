"""Fully connected layers that classify images."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from torch import nn

from .image_classifier import ImageClassifier

if TYPE_CHECKING:
    from .config import MlpConfig


class FullyConnected(ImageClassifier):
    """Classifies images with fully connected layers."""

    module: nn.Sequential

    def network(self, config: MlpConfig, classes: int) -> nn.Module:
        """Returns linear layers with a nonlinearity between each two."""
        activation = {"tanh": nn.Tanh, "relu": nn.ReLU}[config.activation]
        features = [prod(self.shape), *config.widths, classes]
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(features):
            layers += [nn.Linear(inputs, outputs, bias=config.bias), activation()]
        return nn.Sequential(*layers[:-1])
