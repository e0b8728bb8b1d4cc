"""A learner of several blocks, and wrong ways to compute blocks or parts of a batch together."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from tiny_learners import ClassifierLearner
from torch import nn
from torch.utils.checkpoint import checkpoint

from runner.api import Context, GradientLearnerConfig, Loss
from runner.plugins.stages.activation_checkpointing import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
)
from runner.plugins.stages.block_segments import divide, postpone
from runner.plugins.stages.gradient_accumulation import (
    GradientAccumulation,
    GradientAccumulationConfig,
)


class TowerConfig(GradientLearnerConfig):
    """Blocks with dropout, statistics and a second input."""

    kind: ClassVar[str] = "tiny_tower"
    implementation = "TowerLearner"
    learns_from: ClassVar[str] = "images"

    depth: int = 5
    """Number of blocks."""
    dropout: float = 0.2
    """Share of activations."""
    norm: bool = True
    """Whether blocks have running statistics."""
    peeks: str = ""
    """A use of the result of a block that only the next one may use."""

    def draws(self) -> bool:
        return self.dropout > 0


class TowerBlock(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(6) if config.norm else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(6, 6), norm, nn.Tanh(), nn.Dropout(config.dropout))

    def forward(self, x: Any, condition: Any, *, scale: float) -> Any:
        return x + scale * self.layers(x + condition)


class Tower(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.peeks = config.peeks
        self.first = nn.Linear(2, 6)
        self.blocks = nn.ModuleList(TowerBlock(config) for _ in range(config.depth))
        self.head = nn.Linear(6, 2)

    def forward(self, image: Any) -> Any:
        condition = self.first(image.mean((2, 3)))
        x = condition.tanh()
        for number, block in enumerate(self.blocks):
            x = block(x, condition * number, scale=1 / (1 + number))
            if number == 0:
                x = self.peek(x)
        return self.head(x)

    def peek(self, x: Any) -> Any:
        if self.peeks == "add":
            return x + 1
        if self.peeks == "function":
            return torch.relu(x)
        if self.peeks == "method":
            return x.square()
        if self.peeks == "item":
            return x[:, :6]
        if self.peeks == "skip":
            return torch.zeros(6, 6)
        return x


class TowerLearner(ClassifierLearner):
    def build(self, config: Any, shapes: Mapping[str, tuple[int, ...]], context: Context) -> nn.Module:
        return Tower(config)

    def blocks(self) -> Sequence[nn.Module]:
        return list(self.module.blocks)


# --- segments that are wrong ------------------------------------------------------------------------------------------


class WrongSegments(ActivationCheckpointing):
    """Computes the blocks of a segment in a wrong way."""

    def attach(self, pipeline):
        for group in divide(pipeline.learner.blocks(), 2)[:-1]:
            postpone(group, self.wrong)


class SkippedBlock(WrongSegments):
    def wrong(self, forward):
        (forwards,) = forward.args

        def compute(x, calls):
            return forwards[-1](x, *calls[-1].inputs, **calls[-1].named)

        return compute


class OtherMasks(WrongSegments):
    def wrong(self, forward):
        def compute(x, calls):
            return checkpoint(forward, x, calls, use_reentrant=False, preserve_rng_state=False)

        return compute


class WithoutGradient(WrongSegments):
    def wrong(self, forward):
        def compute(x, calls):
            with torch.no_grad():
                result = forward(x, calls)
            return x + (result - x).detach()

        return compute


class WrittenTwice(WrongSegments):
    def wrong(self, forward):
        def compute(x, calls):
            return checkpoint(forward, x, calls, use_reentrant=False)

        return compute


class SkippedBlockConfig(ActivationCheckpointingConfig):
    """Leaves out a block."""

    kind: ClassVar[str] = "segments_skipped_block"
    implementation = "SkippedBlock"


class OtherMasksConfig(ActivationCheckpointingConfig):
    """Draws other masks in the backward pass."""

    kind: ClassVar[str] = "segments_other_masks"
    implementation = "OtherMasks"


class WithoutGradientConfig(ActivationCheckpointingConfig):
    """Sends no gradient through blocks."""

    kind: ClassVar[str] = "segments_without_gradient"
    implementation = "WithoutGradient"


class WrittenTwiceConfig(ActivationCheckpointingConfig):
    """Moves running statistics a second time."""

    kind: ClassVar[str] = "segments_written_twice"
    implementation = "WrittenTwice"


# --- parts of a batch that are wrong ----------------------------------------------------------------------------------


class MissingPart(GradientAccumulation):
    """Leaves out the last part once there are several."""

    def accumulated(self, batch, noise, progress, **options):
        size = self.source.size(batch)
        part = self.config.part_size(size, progress.epochs)
        if part < size:
            rows = slice(0, size - part)
            batch = self.source.take(batch, rows)
            noise = self._part_of_noise(noise, size, rows)
        return super().accumulated(batch, noise, progress, **options)


class MeanOfMeans(GradientAccumulation):
    """Weights parts of different sizes equally."""

    def accumulated(self, batch, noise, progress, **options):
        size = self.source.size(batch)
        parts = list(self.source.split(batch, self.config.part_size(size, progress.epochs)))
        losses = [self.whole(part, {}, progress, lambda count: count * len(parts), **options) for part in parts]
        return Loss.total(losses)


class FirstNoise(GradientAccumulation):
    """Gives the random numbers of the first part to all of them."""

    def _part_of_noise(self, noise, size, rows):
        return super()._part_of_noise(noise, size, slice(0, rows.stop - rows.start))


class MissingPartConfig(GradientAccumulationConfig):
    """Leaves out the last part."""

    kind: ClassVar[str] = "parts_missing"
    implementation = "MissingPart"


class MeanOfMeansConfig(GradientAccumulationConfig):
    """Averages means."""

    kind: ClassVar[str] = "parts_mean_of_means"
    implementation = "MeanOfMeans"


class FirstNoiseConfig(GradientAccumulationConfig):
    """Repeats random numbers."""

    kind: ClassVar[str] = "parts_first_noise"
    implementation = "FirstNoise"
