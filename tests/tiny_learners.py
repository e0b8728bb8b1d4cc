"""Three small learners of both storeys, each with data and a recipe of its own: a plugin file for tests."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from runner.api import (
    Batch,
    Context,
    DatasetConfig,
    DatasetSource,
    GradientLearner,
    GradientLearnerConfig,
    Learner,
    LearnerConfig,
    Loss,
    Mean,
    Objective,
    Progress,
)

LOSS = Objective("loss", "minimize")
RECIPES = {
    "images": "model: {kind: tiny_classifier}\ndata: {kind: tiny_images}\n"
    "optimizer: {kind: adamw, lr: 1e-2, max_grad_norm: 1.0}\ntrain: {updates: 4, batch_size: 6, ema: 0.9}\n",
    "tokens": "model: {kind: tiny_tagger}\ndata: {kind: tiny_tokens}\n"
    "optimizer: {kind: adam, lr: 1e-2}\ntrain: {samples: 24, batch_size: 6}\n",
    "gan": "model: {kind: tiny_gan}\ndata: {kind: tiny_points}\ntrain: {updates: 4, batch_size: 6}\n",
}


# --- a classifier -----------------------------------------------------------------------------------------------------


class Images(DatasetConfig):
    """Random images of two classes."""

    kind: ClassVar[str] = "tiny_images"
    implementation = "ImagesSource"
    provides: ClassVar[str] = "images"
    objective: ClassVar[Objective | None] = LOSS


class ImagesSource(DatasetSource):
    def datasets(self, config: Any) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(0)
        label = torch.arange(48) % 2
        image = torch.randn(48, 2, 6, 6, generator=generator) + label.view(-1, 1, 1, 1)
        return ({"image": image[:36], "label": label[:36]}, {"image": image[36:], "label": label[36:]})


class Classifier(GradientLearnerConfig):
    """Convolutions."""

    kind: ClassVar[str] = "tiny_classifier"
    implementation = "ClassifierLearner"
    learns_from: ClassVar[str] = "images"


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(wide, 4, 3, padding=1), nn.ReLU()) for wide in (2, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, image: Any) -> Any:
        for block in self.blocks:
            image = block(image)
        return self.head(image.mean((2, 3)))


class ClassifierLearner(GradientLearner):
    def build(self, config: Any, shapes: Mapping[str, tuple[int, ...]], context: Context) -> nn.Module:
        return Convolutions()

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        logits = self.slots.forward(batch["image"] + noise.get("blur", 0.0))
        right = (logits.argmax(1) == batch["label"]).sum()
        total = functional.cross_entropy(logits, batch["label"], reduction="sum")
        return Loss(total, len(logits), {"accuracy": Mean(right, len(logits))})

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        return {"blur": 0.1 * torch.randn(batch["image"].shape, generator=generator)}


# --- a tagger of tokens, with dropout and sequences of different lengths ----------------------------------------------


class Tokens(DatasetConfig):
    """Random sequences."""

    kind: ClassVar[str] = "tiny_tokens"
    implementation = "TokensSource"
    provides: ClassVar[str] = "tokens"
    objective: ClassVar[Objective | None] = LOSS
    shapes_vary: ClassVar[bool] = True


class TokensSource(DatasetSource):
    def datasets(self, config: Any) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(2, 9, (32,), generator=generator).tolist()
        sequences = [torch.randint(1, 7, (length,), generator=generator) for length in lengths]
        return sequences[:24], sequences[24:]

    def collate(self, samples: Sequence[Any]) -> Batch:
        return {"token": nn.utils.rnn.pad_sequence(list(samples), batch_first=True)}


class Tagger(GradientLearnerConfig):
    """An embedding and two layers with dropout."""

    kind: ClassVar[str] = "tiny_tagger"
    implementation = "TaggerLearner"
    learns_from: ClassVar[str] = "tokens"

    dropout: float = 0.2
    """Share of activations."""

    def draws(self) -> bool:
        return self.dropout > 0


class TaggerLearner(GradientLearner):
    def build(self, config: Any, shapes: Mapping[str, tuple[int, ...]], context: Context) -> nn.Module:
        hidden = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(config.dropout))
        return nn.Sequential(nn.Embedding(7, 8), hidden, nn.Linear(8, 2))

    def blocks(self) -> Sequence[nn.Module]:
        return [self.module[1]]

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        token = batch["token"]
        logits = self.slots.forward(token)
        held = token > 0
        losses = functional.cross_entropy(logits.transpose(1, 2), token % 2, reduction="none")
        return Loss((losses * held).sum(), held.sum())


# --- two networks against each other ----------------------------------------------------------------------------------


class Points(DatasetConfig):
    """Points on a circle."""

    kind: ClassVar[str] = "tiny_points"
    implementation = "PointsSource"
    provides: ClassVar[str] = "points"


class PointsSource(DatasetSource):
    def datasets(self, config: Any) -> tuple[Any, Any]:
        angle = torch.linspace(0, 6, 36)
        points = torch.stack([angle.cos(), angle.sin()], 1)
        return {"point": points[:24]}, {"point": points[24:]}


class Gan(LearnerConfig):
    """A generator and a discriminator."""

    kind: ClassVar[str] = "tiny_gan"
    implementation = "GanLearner"
    learns_from: ClassVar[str] = "points"
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "generator": {"kind": "adam", "lr": 1e-2},
        "discriminator": {"kind": "adam", "lr": 1e-2, "max_grad_norm": 1.0},
    }
    losses_are_means: ClassVar[bool] = True
    slots: ClassVar[frozenset[str]] = frozenset({"discriminator_loss", "generator_loss"})
    objective: ClassVar[Objective | None] = LOSS


class GanLearner(Learner):
    story = ("discriminator_loss", "generator_loss")
    compilable = ("discriminator_loss", "generator_loss")

    def __init__(self, config: Any, shapes: Mapping[str, tuple[int, ...]], context: Context) -> None:
        super().__init__(config, shapes, context)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(context.seed)
            self.maker = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
            self.judge = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        self.generator = self.role("generator", self.maker, every=2)
        self.discriminator = self.role("discriminator", self.judge)

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        return {"z": torch.randn(len(batch["point"]), 3, generator=generator)}

    def discriminator_loss(self, real: Any, z: Any) -> Any:
        with self.slots.precision():
            real, fake = self.judge(real), self.judge(self.maker(z).detach())
        return functional.softplus(-real.to(z.dtype)).mean() + functional.softplus(fake.to(z.dtype)).mean()

    def generator_loss(self, z: Any) -> Any:
        with self.slots.precision():
            fake = self.judge(self.maker(z))
        return functional.softplus(-fake.to(z.dtype)).mean()

    def update(self, batch: Batch, noise: Batch, progress: Progress) -> dict[str, Any]:
        self.discriminator.zero_grad()
        loss = self.slots.discriminator_loss(batch["point"], noise["z"])
        self.slots.backward(loss)
        self.discriminator.step()
        losses = {"d_loss": loss.detach()}
        if progress.updates % 2:
            self.generator.zero_grad()
            with self.discriminator.frozen():
                loss = self.slots.generator_loss(noise["z"])
                self.slots.backward(loss)
            self.generator.step()
            losses["g_loss"] = loss.detach()
        return losses

    def predict(self, inputs: Any) -> Any:
        return self.judge(inputs["point"])

    @torch.no_grad()
    def metrics(self, batch: Batch) -> Mapping[str, Mean]:
        real = batch["point"]
        z = torch.randn(len(real), 3)
        return {"loss": Mean(self.slots.discriminator_loss(real, z.to(real)) * len(real), len(real))}


class Silent(Gan):
    """The same networks, but its update calls no slot."""

    kind: ClassVar[str] = "tiny_silent"
    implementation = "SilentLearner"


class SilentLearner(GanLearner):
    def configure_optimizers(self) -> None:
        self.own = {name: torch.optim.Adam(role.module.parameters()) for name, role in self.roles.items()}

    def optimizers(self) -> Any:
        return iter(self.own.items())

    def update(self, batch: Batch, noise: Batch, progress: Progress) -> dict[str, Any]:
        loss = self.discriminator_loss(batch["point"], noise["z"]) + self.generator_loss(noise["z"])
        for optimizer in self.own.values():
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.own.values():
            optimizer.step()
        return {"loss": loss.detach()}

    def discriminator_loss(self, real: Any, z: Any) -> Any:
        return functional.softplus(-self.judge(real)).mean()

    def generator_loss(self, z: Any) -> Any:
        return functional.softplus(-self.judge(self.maker(z))).mean()
