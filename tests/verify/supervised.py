"""A small classifier of the first storey with its data, and stages of which some are wrong."""

from typing import ClassVar

import torch
from torch import nn

from runner.api import (
    Close,
    DatasetConfig,
    DatasetSource,
    GradientLearner,
    GradientLearnerConfig,
    Loss,
    Stage,
    StageConfig,
)


class WordNetConfig(GradientLearnerConfig):
    """An embedding and two layers."""

    kind: ClassVar[str] = "word_net"
    implementation = "WordNet"
    learns_from: ClassVar[str] = "words_and_numbers"
    dropout: float = 0.0
    sparse: bool = False
    """Gradients of the embedding are sparse, and it is all that there is."""
    narrow: bool = False
    """The loss is taken in float32, whatever comes."""

    def draws(self):
        return self.dropout > 0


class WordNet(GradientLearner):
    def build(self, config, shapes, context):
        embedding = nn.Embedding(12, 8 if not config.sparse else 3, sparse=config.sparse)
        if config.sparse:
            return embedding
        rest = nn.Linear(8, 8), nn.Tanh(), nn.Dropout(config.dropout), nn.Linear(8, 3)
        return nn.Sequential(embedding, *rest)

    def loss(self, batch, noise, progress):
        logits = self.slots.forward(batch["word"])
        if self.config.narrow:
            logits = logits.float()
        return Loss(nn.functional.cross_entropy(logits, batch["label"], reduction="sum"), len(logits))


class WordsAndNumbersConfig(DatasetConfig):
    """Words at random, whose label is their remainder by three."""

    kind: ClassVar[str] = "words_and_numbers"
    implementation = "WordsAndNumbers"
    provides: ClassVar[str] = "words_and_numbers"


class WordsAndNumbers(DatasetSource):
    def datasets(self, config):
        words = torch.randint(12, (160,), generator=self.context.generator("words", "cpu"))
        rows = {"word": words, "label": words % 3}
        return rows, {name: each[:16] for name, each in rows.items()}


class _Config(StageConfig):
    """Wraps the loss."""

    phase: ClassVar[int] = 1

    def contract(self, setting):
        return Close()


class SameLossConfig(_Config):
    kind: ClassVar[str] = "same_loss"
    implementation = "SameLoss"
    wraps: ClassVar[frozenset[str]] = frozenset({"loss"})


class SameLoss(Stage):
    """Calls the loss through one more function."""

    factor = 1.0

    def attach(self, pipeline):
        pipeline.slots.wrap("loss", lambda step: lambda *args: self.changed(step(*args)))

    def changed(self, loss):
        return loss if self.factor == 1.0 else Loss(self.factor * loss.sum, loss.count, loss.also)


class WrongLossConfig(SameLossConfig):
    kind: ClassVar[str] = "wrong_loss"
    implementation = "WrongLoss"


class WrongLoss(SameLoss):
    factor = 1.001


class RoundAboutConfig(SameLossConfig):
    kind: ClassVar[str] = "round_about"
    implementation = "RoundAbout"


class RoundAbout(SameLoss):
    """Multiplies the loss by 1/41 and by 41, which in float32 are not quite 1."""

    def changed(self, loss):
        return Loss(loss.sum * (1 / 41) * 41, loss.count, loss.also)


class WrongWithoutGradientConfig(_Config):
    kind: ClassVar[str] = "wrong_without_gradient"
    implementation = "WrongWithoutGradient"
    wraps: ClassVar[frozenset[str]] = frozenset({"forward"})


class WrongWithoutGradient(Stage):
    """Trains as it should, and answers wrongly."""

    def attach(self, pipeline):
        def wrapper(step):
            return lambda *inputs: step(*inputs) if torch.is_grad_enabled() else 1.01 * step(*inputs)

        pipeline.slots.wrap("forward", wrapper)
