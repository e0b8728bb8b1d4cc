"""What computes: the learner, its data and the stage in torch."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.checkpoint import checkpoint

from runner.api import DatasetSource, GradientLearner, Loss, Mean, Stage


class Mlp(GradientLearner):
    def build(self, config, shapes, context):
        return nn.Sequential(nn.Linear(*shapes["image"], config.hidden), nn.ReLU(), nn.Linear(config.hidden, 10))

    def loss(self, batch, noise, progress):
        logits, label = self.slots.forward(batch["image"]), batch["label"]
        right = (logits.detach().argmax(-1) == label).sum()
        loss = nn.functional.cross_entropy(logits, label, reduction="sum")
        return Loss(loss, len(label), {"accuracy": Mean(right, len(label))})


class Digits(DatasetSource):
    def datasets(self, config):
        image, label = map(torch.from_numpy, load_digits(return_X_y=True))
        data = {"image": image.float() / 16, "label": label}
        train = {name: tensor[config.held_out :] for name, tensor in data.items()}
        return train, {name: tensor[: config.held_out] for name, tensor in data.items()}


class Recompute(Stage):
    def attach(self, pipeline):
        pipeline.slots.wrap("forward", lambda step: lambda *inputs: checkpoint(step, *inputs, use_reentrant=False))
