"""Contrastive pre-training (SimCLR, Chen et al. 2020) and a linear probe of what it has learned."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, normalize

from runner.api import DatasetConfig, DatasetSource, GradientLearner, GradientLearnerConfig, Loss, Mean, Objective


class ContrastiveConfig(GradientLearnerConfig):
    """Recognizes which two views are of the same image, among all images of the batch."""

    kind, learns_from, couples_samples = "example_contrastive", "example_views", True
    implementation = "Contrastive"
    temperature: float = 0.2


class ProbeConfig(GradientLearnerConfig):
    """A linear classifier of the outputs of an encoder, which is not trained."""

    kind, learns_from = "example_probe", "example_views"
    implementation = "Probe"
    objective = Objective("accuracy", "maximize", margin=0.01, unit="share")


def encoder():
    """Returns a network from images [B, 1, 8, 8] to features [B, 128]."""
    convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU())


class Contrastive(GradientLearner):
    def build(self, config, shapes, context):
        projection = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32))
        return nn.Sequential(encoder(), projection)

    def noise(self, batch, generator):
        """Draws what moves, turns and scales two views of every image: [2, B, 2, 3]."""
        size = 2, len(batch["image"]), 2, 3
        return {"change": torch.randn(size, generator=generator, device=self.device) / 6}

    def loss(self, batch, noise, progress):
        views = []
        for change in noise["change"]:
            matrix = torch.eye(2, 3, device=self.device) + change
            grid = affine_grid(matrix, list(batch["image"].shape), align_corners=False)
            views.append(grid_sample(batch["image"], grid, align_corners=False))
        code = normalize(self.slots.forward(torch.cat(views)), dim=-1)
        likeness = code @ code.T / self.config.temperature
        likeness = likeness.masked_fill(torch.eye(len(code), dtype=torch.bool, device=self.device), -1e9)
        target = torch.arange(len(code), device=self.device).roll(len(code) // 2)
        correct = (likeness.detach().argmax(-1) == target).sum()
        total = cross_entropy(likeness, target, reduction="sum")
        return Loss(total, len(code), {"recognized": Mean(correct, len(code))})


class Probe(GradientLearner):
    def build(self, config, shapes, context):
        return nn.Sequential(encoder().requires_grad_(False), nn.Linear(128, 10))

    def loss(self, batch, noise, progress):
        logits, label = self.slots.forward(batch["image"]), batch["label"]
        correct = (logits.detach().argmax(-1) == label).sum()
        loss = cross_entropy(logits, label, reduction="sum")
        return Loss(loss, len(label), {"accuracy": Mean(correct, len(label))})


class ViewsConfig(DatasetConfig):
    """Handwritten digits of 8 x 8 pixels; only the probe sees labels, of few of them."""

    kind, provides, in_memory = "example_views", "example_views", True
    implementation = "Views"
    headline = ("accuracy", "recognized", "loss")
    labelled: int = 1437


class Views(DatasetSource):
    def datasets(self, config):
        image, label = map(torch.from_numpy, load_digits(return_X_y=True))
        data = {"image": image.float().view(-1, 1, 8, 8) / 16, "label": label}
        train = {name: rows[360 : 360 + config.labelled] for name, rows in data.items()}
        return train, {name: rows[:360] for name, rows in data.items()}
