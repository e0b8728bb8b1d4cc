"""A generative adversarial network on scikit-learn's digits: two optimizers that are not stepped equally often."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import softplus

from runner.api import DatasetConfig, DatasetSource, Learner, LearnerConfig, Mean, Objective


class GanConfig(LearnerConfig):
    """A generator and a discriminator, with the logistic loss and the R1 penalty (Mescheder et al. 2018)."""

    kind, learns_from = "example_gan", "example_pixels"
    implementation = "Gan"
    roles = {name: {"kind": "adam", "lr": 1e-3, "betas": [0.0, 0.99]} for name in ("discriminator", "generator")}
    slots = frozenset({"generate", "judge"})
    objective = Objective("nearest", "minimize")
    latent: int = 16
    r1: float = 0.1


class Gan(Learner):
    story = ("generate", "judge")

    def __init__(self, config, shapes, context):
        super().__init__(config, shapes, context)
        critic = nn.Sequential(nn.Linear(*shapes["image"], 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
        artist = nn.Sequential(nn.Linear(config.latent, 128), nn.ReLU(), nn.Linear(128, *shapes["image"]))
        self.discriminator = self.role("discriminator", critic)
        self.generator = self.role("generator", artist, every=2)

    def noise(self, batch, generator):
        size = 2, len(batch["image"]), self.config.latent  # for the discriminator, and for the generator
        return {"latent": torch.randn(size, generator=generator, device=self.device)}

    def update(self, batch, noise, progress):
        real, fake = batch["image"], self.slots.generate(noise["latent"][0]).detach()
        loss = softplus(self.slots.judge(fake)).mean() + softplus(-self.slots.judge(real)).mean()
        logged, penalty = {"d_loss": loss.detach()}, 0.0
        if progress.updates % 4 == 3:  # lazily: every fourth time, and four times as strong
            real = real.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.slots.judge(real).sum(), real, create_graph=True)
            logged["r1"] = (penalty := slope.square().sum(1).mean()).detach()
        self.discriminator.zero_grad()
        self.slots.backward(loss + 4 * self.config.r1 / 2 * penalty)
        self.discriminator.step()
        if progress.updates % 2 == 1:
            self.generator.zero_grad()
            with self.discriminator.frozen():
                loss = softplus(-self.slots.judge(self.slots.generate(noise["latent"][1]))).mean()
                self.slots.backward(loss)
            self.generator.step()
            logged["g_loss"] = loss.detach()
        return logged

    def generate(self, latent):
        with self.slots.precision():
            return self.generator.module(latent).to(latent.dtype).sigmoid()

    def judge(self, image):
        with self.slots.precision():
            return self.discriminator.module(image).to(image.dtype)

    def inputs(self, batch):
        return torch.randn(len(batch["image"]), self.config.latent, device=self.device)

    def predict(self, inputs):
        return self.slots.generate(inputs).detach()

    def metrics(self, batch):  # how far a held-out image is from the nearest of as many generated ones
        nearest = torch.cdist(batch["image"], self.predict(self.inputs(batch))).amin(1)
        return {"nearest": Mean(nearest.sum(), len(nearest))}


class PixelsConfig(DatasetConfig):
    """Handwritten digits of 8 x 8 pixels, without their labels."""

    kind, provides, in_memory = "example_pixels", "example_pixels", True
    implementation = "Pixels"


class Pixels(DatasetSource):
    def datasets(self, config):
        image = torch.from_numpy(load_digits().data).float() / 16
        return {"image": image[360:]}, {"image": image[:360]}
