"""Base class of classifiers of images."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import Batch, Context, GradientLearner, Loss, Mean, Progress

from .config import ClassesResponse
from .convolution.modules import Convolve
from .convolution.native import convolution
from .convolution.plan_file import no_plans
from .convolution.workspace import new_workspace

if TYPE_CHECKING:
    from .config import ImageClassifierConfig, ImageRequest


class ImageClassifier(GradientLearner):
    """Softmax cross-entropy on images in [0, 1]."""

    def build(
        self, config: Any, shapes: Mapping[str, tuple[int, ...]], context: Context
    ) -> nn.Module:
        """Makes the network for images of this size and these classes."""
        settings: ImageClassifierConfig = config
        self.shift = settings.shift
        self.shape = shapes["image"]
        return self.network(config, context.sizes["classes"])

    @abstractmethod
    def network(self, config: Any, classes: int) -> nn.Module:
        """Returns a network from images [B, C, H, W] of ``self.shape`` to logits [B, classes]."""

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Draws shifts in pixels, down and to the right; none in evaluation."""
        if not (self.shift and self.module.training):
            return {}
        size = len(batch["image"]), 2
        shift = torch.randint(
            2 * self.shift + 1, size, generator=generator, device=generator.device
        )
        return {"shift": shift}

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Returns cross-entropy and accuracy; without noise, images are not shifted."""
        image = batch["image"]
        label = batch["label"]
        if noise:
            image = shifted(image, noise["shift"], self.shift)
        logits = self.slots.forward(image)
        count = len(label)
        correct = (logits.detach().argmax(-1) == label).sum()
        accuracy = {"accuracy": Mean(correct, count)}
        weights = self.context.class_weights
        # Held-out losses are those of a training without weights.
        if weights is None or not self.module.training:
            weights = None
        else:
            weights = weights.to(logits.dtype)
        total = F.cross_entropy(logits, label, weights, reduction="sum")
        samples = self.sample_losses(
            lambda: F.cross_entropy(logits, label, weights, reduction="none")
        )
        items = count if weights is None else weights[label].sum()
        return Loss(total, items, accuracy, samples)

    def inputs(self, batch: Batch) -> Any:
        """Returns the images."""
        return batch["image"]

    def refused(self, request: ImageRequest) -> str | None:
        """Returns that images have another size than those of the training."""
        channels, height, width = self.shape
        heights = [len(channel) for channel in request.image]
        widths = {len(row) for channel in request.image for row in channel}
        if heights == [height] * channels and widths == {width}:
            return None
        return f"image: should be {channels} x {height} x {width} numbers: channels, rows, columns"

    def example_request(self) -> Mapping[str, Any]:
        """Returns an image of a vertical bar."""
        channels, height, width = self.shape
        row = [
            1.0 if width // 3 <= column < width - width // 3 else 0.0
            for column in range(width)
        ]
        rows = [
            row if 0 < number < height - 1 else [0.0] * width
            for number in range(height)
        ]
        return {"image": [rows] * channels}

    def requested(self, requests: Sequence[ImageRequest]) -> Tensor:
        """Returns the images."""
        return torch.tensor([request.image for request in requests], device=self.device)

    def answered(
        self, requests: Sequence[ImageRequest], outputs: Tensor
    ) -> Sequence[ClassesResponse]:
        """Returns classes with their names and probabilities."""
        # Rounding can make a probability slightly larger than one, which the response refuses.
        shares = outputs.float().softmax(-1).clamp(max=1).tolist()
        names = self.context.classes
        labels = [row.index(max(row)) for row in shares]
        return [
            ClassesResponse(
                label=label, name=names[label] if names else None, probabilities=row
            )
            for label, row in zip(labels, shares, strict=True)
        ]


class ConvolutionalClassifier(ImageClassifier):
    """A classifier whose convolutions go through the slot ``conv``."""

    conv = staticmethod(convolution)
    conv_workspace = staticmethod(new_workspace)
    conv_plans = staticmethod(no_plans)

    @property
    def conv_slot(self) -> Convolve:
        """Returns a function that calls the slot ``conv``."""
        slots = self.slots
        # Copies of the network share a function; they would copy the slots, and the learner with
        # them.
        return lambda *inputs: slots.conv(*inputs)


def shifted(image: Tensor, shift: Tensor, largest: int) -> Tensor:
    """Moves every image on a background of zeros.

    Args:
        image: [B, C, H, W].
        shift: [B, 2], 0 to ``2 * largest``; ``largest`` leaves an image where it is.
        largest: the width of the background.
    """
    height, width = image.shape[-2:]
    padded = F.pad(image, (largest,) * 4)
    rows = shift[:, :1] + torch.arange(height, device=image.device)
    columns = shift[:, 1:] + torch.arange(width, device=image.device)
    sample = torch.arange(len(image), device=image.device)[:, None, None]
    return padded[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
