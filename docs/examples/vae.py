"""A variational autoencoder (Kingma and Welling 2014) of scikit-learn's digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from runner.api import DatasetConfig, DatasetSource, GradientLearner, GradientLearnerConfig, Loss, Mean


class VaeConfig(GradientLearnerConfig):
    """Encodes images as normal distributions of latent variables, and decodes samples of them."""

    kind, learns_from = "example_vae", "example_unlabelled"
    implementation = "Vae"
    hidden: int = 128
    latent: int = 8
    beta: float = 1.0


class Autoencoder(nn.Module):
    def __init__(self, pixels, hidden, latent):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, pixels))

    def forward(self, image, noise):
        mean, log_variance = self.encoder(image).chunk(2, dim=-1)
        latent = mean + (log_variance / 2).exp() * noise
        return self.decoder(latent), mean, log_variance


class Vae(GradientLearner):
    def build(self, config, shapes, context):
        return Autoencoder(*shapes["image"], config.hidden, config.latent)

    def noise(self, batch, generator):
        size = len(batch["image"]), self.config.latent
        return {"latent": torch.randn(size, generator=generator, device=self.device)}

    def loss(self, batch, noise, progress):
        image = batch["image"]
        logits, mean, log_variance = self.slots.forward(image, noise["latent"])
        error = binary_cross_entropy_with_logits(logits, image, reduction="sum")
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum() / 2
        count = len(image)
        parts = {"error": Mean(error.detach(), count), "divergence": Mean(divergence.detach(), count)}
        return Loss(error + self.config.beta * divergence, count, parts)

    def inputs(self, batch):
        return batch["image"]

    @torch.no_grad()
    def predict(self, inputs):
        """Returns reconstructions of images, from the means of their latent variables."""
        with self.evaluating():
            noise = torch.zeros(len(inputs), self.config.latent, device=self.device)
            return self.slots.forward(inputs, noise)[0].sigmoid()


class UnlabelledConfig(DatasetConfig):
    """Handwritten digits of 8 x 8 pixels, without their labels."""

    kind, provides, in_memory = "example_unlabelled", "example_unlabelled", True
    implementation = "Unlabelled"


class Unlabelled(DatasetSource):
    def datasets(self, config):
        image = torch.from_numpy(load_digits().data).float() / 16
        return {"image": image[360:]}, {"image": image[:360]}
