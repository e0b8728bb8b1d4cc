"""Two tasks whose weights are learned from their uncertainty (Kendall, Gal and Cipolla 2018)."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from runner.api import DatasetConfig, DatasetSource, GradientLearner, GradientLearnerConfig, Loss, Mean, Objective


class TwoTasksConfig(GradientLearnerConfig):
    """Recognizes a digit, and estimates the centre of its ink, with one body and two heads."""

    kind, learns_from = "example_two_tasks", "example_digits_and_centres"
    implementation = "TwoTasks"
    objective = Objective("accuracy", "maximize", margin=0.01, unit="share")
    hidden: int = 128


class Heads(nn.Module):
    def __init__(self, pixels, hidden):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU())
        self.label, self.centre = nn.Linear(hidden, 10), nn.Linear(hidden, 2)
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, image):
        x = self.body(image)
        return self.label(x), self.centre(x), self.log_variance


class TwoTasks(GradientLearner):
    def build(self, config, shapes, context):
        return Heads(*shapes["image"], config.hidden)

    def loss(self, batch, noise, progress):
        logits, centre, log_variance = self.slots.forward(batch["image"])
        label, count = batch["label"], len(batch["label"])
        losses = torch.stack(
            [
                cross_entropy(logits, label, reduction="sum"),
                (centre - batch["centre"]).square().sum() / 2,
            ]
        )
        weights = (-log_variance).exp()
        total = (weights * losses).sum() + count * log_variance.sum() / 2
        correct = (logits.detach().argmax(-1) == label).sum()
        logged = {"accuracy": Mean(correct, count)}
        for number, task in enumerate(("label", "centre")):
            logged[f"{task}_loss"] = Mean(losses[number].detach(), count)
            logged[f"{task}_weight"] = Mean(weights[number].detach(), 1)
        return Loss(total, count, logged)


class CentresConfig(DatasetConfig):
    """Handwritten digits of 8 x 8 pixels with their labels and the centres of their ink."""

    kind, provides, in_memory = "example_digits_and_centres", "example_digits_and_centres", True
    implementation = "Centres"
    headline = ("accuracy", "centre_loss")


class Centres(DatasetSource):
    def datasets(self, config):
        image, label = map(torch.from_numpy, load_digits(return_X_y=True))
        share = (image / image.sum(1, keepdim=True)).view(-1, 8, 8).float()
        position = torch.arange(8) - 3.5
        centre = torch.stack([(share.sum(2) * position).sum(1), (share.sum(1) * position).sum(1)], dim=1)
        data = {"image": image.float() / 16, "label": label, "centre": centre}
        return {name: rows[360:] for name, rows in data.items()}, {name: rows[:360] for name, rows in data.items()}
