"""Learners whose losses depend on progress and noise: a plugin file for tests."""

from typing import ClassVar

import torch
from toys import Pair, PairConfig, Toy, ToyConfig

from runner.api import Loss, Mean, Objective


class AnnealedConfig(ToyConfig):
    """Adds the share of the training that is over to the loss."""

    kind: ClassVar[str] = "toy_annealed"
    implementation = "Annealed"
    rise: float = 100.0
    """By how much the loss of a word is larger at the end."""


class Annealed(Toy):
    def noise(self, batch, generator):
        return {"number": torch.rand((), generator=generator)}

    def loss(self, batch, noise, progress):
        loss = super().loss(batch, noise, progress)
        also = {"fraction": Mean(progress.fraction, 1), "number": Mean(noise["number"], 1)}
        return Loss(loss.sum + self.config.rise * progress.fraction * loss.count, loss.count, also)


class AnnealedPairConfig(PairConfig):
    """Two networks with the same metrics."""

    kind: ClassVar[str] = "toy_annealed_pair"
    implementation = "AnnealedPair"
    objective: ClassVar[Objective | None] = Objective("fraction", "minimize", 0.1, "share")


class AnnealedPair(Pair):
    def metrics(self, batch):
        number = self.held_out_noise(batch)["latent"].sum()
        return {"fraction": Mean(self.context.progress.fraction, 1), "number": Mean(number, 1)}


class LayeredConfig(ToyConfig):
    """Trains every layer at a rate of its own, and unfreezes the embedding on the way."""

    kind: ClassVar[str] = "toy_layered"
    implementation = "Layered"
    rates: tuple[float, float] | None = None
    """Learning rates of embedding and last layer; the recipe's without them."""
    thaw: int = 0
    """Updates before which the embedding is frozen."""
    freeze: int = 10_000
    """Updates from which it is frozen again."""
    own: bool = False
    """Whether the optimizer that is made has only what is trained at first."""
    adds: bool = False
    """Whether a group is added for the embedding when it is unfrozen."""


class Layered(Toy):
    def build(self, config, shapes, context):
        module = super().build(config, shapes, context)
        module[0].requires_grad_(config.thaw == 0)
        return module

    def configure_optimizers(self):
        if self.config.rates is None and not self.config.own:
            super().configure_optimizers()
            return
        groups = [{"params": [*layer.parameters()]} for layer in (self.module[0], self.module[-1])]
        if self.config.rates:
            groups = [group | {"lr": lr} for group, lr in zip(groups, self.config.rates, strict=True)]
        if self.config.own:
            groups = groups[1:]
        settings = self.model.settings
        self.model.optimizer = self.slots.make_optimizer(settings.optimizer(), groups, **settings.settings)
        self.module[1].requires_grad_(False)

    def loss(self, batch, noise, progress):
        if self.module.training and progress.updates in (self.config.thaw, self.config.freeze):
            self.module[0].requires_grad_(progress.updates == self.config.thaw)
            if self.config.adds:
                self.model.optimizer.add_param_group({"params": [*self.module[0].parameters()], "lr": 0.25})
        return super().loss(batch, noise, progress)


class MixtureConfig(ToyConfig):
    """Has one head for each way to count, and one for a sentence in 48."""

    kind: ClassVar[str] = "toy_mixture"
    implementation = "Mixture"
    unused: bool = False
    """Whether there is a head that no sentence ever chooses."""
    late: float = 0.0
    """Share of the training in which the loss of the rare head has a weight of zero."""


class Mixture(Toy):
    def build(self, config, shapes, context):
        heads = torch.nn.ModuleList(torch.nn.Linear(8, 16) for _ in range(4 + config.unused))
        return torch.nn.ModuleDict({"embedding": torch.nn.Embedding(16, 8), "heads": heads})

    def loss(self, batch, noise, progress):
        words, total = batch["words"], 0.0
        step = (words[:, 1] - words[:, 0]) % 16 - 1
        choice = torch.where((words[:, 0] == 3) & (step == 1), 3, step)
        for number in choice.unique().tolist():
            rows = words[choice == number]
            logits = self.module["heads"][number](self.module["embedding"](rows[:, :-1]))
            weight = float(progress.fraction >= self.config.late or number != 3)
            total = total + weight * torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"
            )
        return Loss(total, words[:, 1:].numel())

    def predict(self, inputs):
        return self.module["heads"][0](self.module["embedding"](inputs)).detach()
