"""The image classifier in torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import Batch, Context, GradientLearner, Loss, Mean, Progress, Prunable

from .config import ClassesResponse
from .convolution.modules import Convolution, Convolve
from .convolution.native import convolution
from .convolution.plan_file import no_plans
from .convolution.workspace import new_workspace

if TYPE_CHECKING:
    from .config import ClassifierConfig, ImageRequest

GROUPS = 8
POOLED = 4
"""Height and width that are left for the last layer, about."""


class ResidualBlock(nn.Module):
    """Two convolutions that are added to a shortcut; their initial output is zero."""

    def __init__(self, inputs: int, outputs: int, stride: int, convolve: Convolve = convolution) -> None:
        super().__init__()
        self.conv1 = Convolution(inputs, outputs, 3, stride, padding=1, bias=False, convolve=convolve)
        self.norm1 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = Convolution(outputs, outputs, 3, padding=1, bias=False, convolve=convolve)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity() if same else Convolution(inputs, outputs, 1, stride, bias=False, convolve=convolve)
        )
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] to [B, outputs, H / stride, W / stride]."""
        residual = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(self.shortcut(x) + residual)

    def prunable(self) -> Iterator[Prunable]:
        """Channels between the convolutions, in the groups that are normalised together."""
        norm = self.norm1
        yield Prunable("ff", norm.num_groups, [(self.conv1, 1), (norm, 1)], [self.conv2], [(norm, "num_groups")])


class ResidualNet(nn.Module):
    """A residual network from images [B, C, H, W] to logits [B, classes]."""

    def __init__(
        self, shape: tuple[int, ...], widths: list[int], classes: int, convolve: Convolve = convolution
    ) -> None:
        super().__init__()
        channels, height, width = shape
        stem = Convolution(channels, widths[0], 3, padding=1, bias=False, convolve=convolve)
        self.stem = nn.Sequential(stem, nn.GroupNorm(GROUPS, widths[0]), nn.ReLU())
        pairs = [(widths[0], widths[0], 1), *((a, b, 2) for a, b in pairwise(widths))]
        self.blocks = nn.ModuleList()
        for inputs, outputs, stride in pairs:
            self.blocks.append(ResidualBlock(inputs, outputs, stride, convolve))
            self.blocks.append(ResidualBlock(outputs, outputs, 1, convolve))
        for _ in widths[1:]:
            height, width = (height + 1) // 2, (width + 1) // 2
        kernel = (max(1, height // POOLED), max(1, width // POOLED))
        self.pool = nn.AvgPool2d(kernel)
        self.head = nn.Linear(widths[-1] * (height // kernel[0]) * (width // kernel[1]), classes)

    def forward(self, image: Tensor) -> Tensor:
        """The logits."""
        x = self.stem(image)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.pool(x).flatten(1))
        return logits


class Classifier(GradientLearner):
    """Softmax cross-entropy on images in [0, 1]."""

    module: ResidualNet
    sensitive: ClassVar[tuple[str, ...]] = ("stem", "head")
    conv = staticmethod(convolution)
    conv_workspace = staticmethod(new_workspace)
    conv_plans = staticmethod(no_plans)

    def build(self, config: ClassifierConfig, shapes: Mapping[str, tuple[int, ...]], context: Context) -> nn.Module:
        """The network."""
        self.shift, self.shape = config.shift, shapes["image"]
        return ResidualNet(shapes["image"], config.widths, context.sizes["classes"], self.conv_slot)

    @property
    def conv_slot(self) -> Convolve:
        """The slot ``conv``, as it is when it is called."""
        slots = self.slots
        # Copies of the network share a function; they would copy the slots, and the learner with them.
        return lambda *inputs: slots.conv(*inputs)

    def prunable(self) -> Iterator[Prunable]:
        """Yields the channels inside of the blocks."""
        for block in self.module.blocks:
            yield from cast(ResidualBlock, block).prunable()

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Draws shifts in pixels, down and to the right; none in evaluation."""
        if not (self.shift and self.module.training):
            return {}
        size = len(batch["image"]), 2
        shift = torch.randint(2 * self.shift + 1, size, generator=generator, device=generator.device)
        return {"shift": shift}

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Cross-entropy and accuracy; without noise, images stay where they are."""
        image, label = batch["image"], batch["label"]
        logits = self.slots.forward(shifted(image, noise["shift"], self.shift) if noise else image)
        correct = (logits.detach().argmax(-1) == label).sum()
        return Loss(
            F.cross_entropy(logits, label, reduction="sum"), len(label), {"accuracy": Mean(correct, len(label))}
        )

    def inputs(self, batch: Batch) -> Any:
        """The images."""
        return batch["image"]

    def refused(self, request: ImageRequest) -> str | None:
        """Returns that images have another size than those of the training."""
        channels, height, width = self.shape
        rows = [len(row) for channel in request.image for row in channel]
        if [len(channel) for channel in request.image] == [height] * channels and set(rows) == {width}:
            return None
        return f"image: should be {channels} x {height} x {width} numbers: channels, rows, columns"

    def example_request(self) -> Mapping[str, Any]:
        """Returns an image of a vertical bar."""
        channels, height, width = self.shape
        row = [1.0 if width // 3 <= column < width - width // 3 else 0.0 for column in range(width)]
        rows = [row if 0 < number < height - 1 else [0.0] * width for number in range(height)]
        return {"image": [rows] * channels}

    def requested(self, requests: Sequence[ImageRequest]) -> Tensor:
        """The images."""
        return torch.tensor([request.image for request in requests], device=self.device)

    def answered(self, requests: Sequence[ImageRequest], outputs: Tensor) -> Sequence[ClassesResponse]:
        """Their classes."""
        shares = outputs.float().softmax(-1).clamp(max=1).tolist()
        return [ClassesResponse(label=row.index(max(row)), probabilities=row) for row in shares]


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
