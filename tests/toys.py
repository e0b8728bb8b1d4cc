"""Learners and a dataset that train in milliseconds: ``--plugin`` takes this file."""

from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy, softplus
from torch.utils.data import Dataset

from runner.api import (
    DatasetConfig,
    DatasetSource,
    Exact,
    GradientLearner,
    GradientLearnerConfig,
    Learner,
    LearnerConfig,
    Loss,
    Mean,
    Objective,
    Stage,
    StageConfig,
)

WORDS, LENGTH = 16, 6


class ToyConfig(GradientLearnerConfig):
    """Guesses the next word from the one before."""

    kind: ClassVar[str] = "toy"
    implementation = "Toy"
    learns_from: ClassVar[str] = "toy_words"
    objective: ClassVar[Objective | None] = Objective("loss", "minimize", 0.1, "nats")

    dropout: float = 0.25
    """Share of features that is forgotten."""
    frozen: bool = False
    """Whether the embedding stays as it is."""


class MisspeltConfig(ToyConfig):
    """The same, judged by a metric that does not exist."""

    kind: ClassVar[str] = "toy_misspelt"
    objective: ClassVar[Objective | None] = Objective("los", "minimize")


class Toy(GradientLearner):
    def build(self, config, shapes, context):
        embedding = nn.Embedding(WORDS, 8).requires_grad_(not config.frozen)
        return nn.Sequential(embedding, nn.LayerNorm(8), nn.Dropout(config.dropout), nn.Linear(8, WORDS))

    def loss(self, batch, noise, progress):
        words, following = batch["words"][:, :-1], batch["words"][:, 1:]
        loss = cross_entropy(self.slots.forward(words).flatten(0, 1), following.flatten(), reduction="sum")
        return Loss(loss, following.numel())


class UnluckyConfig(ToyConfig):
    """Fails with one seed."""

    kind: ClassVar[str] = "toy_unlucky"
    implementation = "Unlucky"
    seed: int


class Unlucky(Toy):
    def loss(self, batch, noise, progress):
        if self.context.seed == self.config.seed:
            raise RuntimeError("out of luck")
        return super().loss(batch, noise, progress)


class SilentConfig(ToyConfig):
    """Forgets to return what it learnt."""

    kind: ClassVar[str] = "toy_silent"
    implementation = "Silent"


class Silent(Toy):
    def update(self, batch, noise, progress):
        super().update(batch, noise, progress)


class PairConfig(LearnerConfig):
    """A generator and a discriminator."""

    kind: ClassVar[str] = "toy_pair"
    implementation = "Pair"
    learns_from: ClassVar[str] = "toy_words"
    roles: ClassVar = {"generator": {"kind": "adam", "lr": 1e-3}, "discriminator": {"kind": "sgd", "lr": 1e-2}}

    every: int = 50
    """Updates between two steps of the generator."""
    detached: bool = False
    """Whether no gradient reaches the generator."""


class Pair(Learner):
    def __init__(self, config, shapes, context):
        super().__init__(config, shapes, context)
        self.detached = config.detached
        self.generator = self.role("generator", nn.Linear(2, LENGTH), every=config.every)
        self.discriminator = self.role("discriminator", nn.Linear(LENGTH, 1))

    def noise(self, batch, generator):
        return {"latent": torch.randn(len(batch["words"]), 2, generator=generator)}

    def update(self, batch, noise, progress):
        real, fake = batch["words"].float() / WORDS, self.predict(noise["latent"])
        self.discriminator.zero_grad()
        d_loss = (softplus(-self.judge(real)) + softplus(self.judge(fake.detach()))).mean()
        self.slots.backward(d_loss)
        self.discriminator.step()
        found = {"d_loss": d_loss.detach()}
        if (progress.updates + 1) % self.config.every == 0:
            self.generator.zero_grad()
            with self.discriminator.frozen():
                g_loss = softplus(-self.judge(fake.detach() if self.detached else fake)).mean()
                if g_loss.requires_grad:
                    self.slots.backward(g_loss)
            self.generator.step()
            found["g_loss"] = g_loss.detach()
        return found

    def judge(self, rows):
        return self.discriminator.module(rows)

    def inputs(self, batch):
        return batch["words"][:, :2].float()

    def predict(self, inputs):
        return self.generator.module(inputs)

    def metrics(self, batch):
        real = softplus(-self.judge(batch["words"].float() / WORDS))
        return {"real": Mean(real.sum(), len(real))}


class WordsConfig(DatasetConfig):
    """Sentences that count in steps of one, two or three."""

    kind: ClassVar[str] = "toy_words"
    implementation = "Words"
    provides: ClassVar[str] = "toy_words"
    units: ClassVar = DatasetConfig.units | {"tokens"}

    rows: int = 40
    """Sentences to train on."""
    augmented: bool = False
    """Whether a word of every sentence is drawn anew each time."""


class Words(DatasetSource):
    def datasets(self, config):
        starts, steps = torch.arange(config.rows + 10) * 5 % WORDS, torch.arange(config.rows + 10) % 3 + 1
        words = (starts[:, None] + steps[:, None] * torch.arange(LENGTH)) % WORDS
        train, held_out = words[: config.rows], words[config.rows :]
        return Augmented(train) if config.augmented else {"words": train}, {"words": held_out}

    def tokens(self, batch):
        return batch["words"].numel()


class Augmented(Dataset):
    def __init__(self, words):
        self.words = words

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words = self.words[index].clone()
        words[torch.randint(LENGTH, ())] = torch.randint(WORDS, ())
        return {"words": words}


class SpendthriftConfig(StageConfig):
    """Draws from torch's global generator whatever nobody needs.

    When it helps: in tests.
    When it hurts: elsewhere.
    """

    kind: ClassVar[str] = "spendthrift"
    implementation = "Spendthrift"
    phase: ClassVar[int] = 1
    wraps: ClassVar[frozenset[str]] = frozenset({"update"})

    def contract(self, setting):
        return Exact()


class Spendthrift(Stage):
    def attach(self, pipeline):
        def spending(step):
            def update(*arguments):
                output = step(*arguments)
                torch.rand(7)
                return output

            return update

        pipeline.slots.wrap("update", spending)
