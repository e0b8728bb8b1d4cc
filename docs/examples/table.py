"""Regression or classification of the rows of a CSV file."""

import csv

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from runner.api import (
    DatasetConfig,
    DatasetSource,
    GradientLearner,
    GradientLearnerConfig,
    Loss,
    Mean,
    RecipePath,
    UsageError,
)


class TableNetConfig(GradientLearnerConfig):
    """Two layers; a softmax for a target of text, squared errors for one of numbers."""

    kind, learns_from = "example_table_net", "example_rows"
    implementation = "TableNet"
    hidden: int = 64


class TableNet(GradientLearner):
    def build(self, config, shapes, context):
        self.classes = context.sizes["classes"]
        self.scale = context.tables["scale"].to(self.device)
        outputs = max(1, self.classes)
        return nn.Sequential(nn.Linear(*shapes["x"], config.hidden), nn.ReLU(), nn.Linear(config.hidden, outputs))

    def loss(self, batch, noise, progress):
        output, target, count = self.slots.forward(batch["x"]), batch["target"], len(batch["x"])
        if self.classes:
            correct = (output.detach().argmax(-1) == target).sum()
            return Loss(cross_entropy(output, target, reduction="sum"), count, {"accuracy": Mean(correct, count)})
        error = output[:, 0] - target
        absolute = error.detach().abs().sum() * self.scale
        return Loss(error.square().sum(), count, {"absolute_error": Mean(absolute, count)})

    def inputs(self, batch):
        return batch["x"]


class TableConfig(DatasetConfig):
    """A CSV file with a header; every fifth row is held out. Numbers are scaled, texts one-hot."""

    kind, provides, in_memory = "example_table", "example_rows", True
    implementation = "Table"
    headline = ("accuracy", "absolute_error", "loss")
    file: RecipePath
    target: str

    def is_synthetic(self):
        return "synthetic" in self.file.stem


class Table(DatasetSource):
    def datasets(self, config):
        with config.file.open(newline="") as file:
            rows = list(csv.DictReader(file))
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        if config.target not in columns:
            raise UsageError(f"data.target: no column '{config.target}'; {config.file.name} has: {', '.join(columns)}")
        held_out = torch.arange(len(rows)) % 5 == 0
        target = self.numbers(columns.pop(config.target))
        self.tables = {"scale": torch.ones(())}
        if target.is_floating_point():
            self.sizes = {"classes": 0}
            self.tables = {"scale": target[~held_out].std()}
            target = (target - target[~held_out].mean()) / target[~held_out].std()
        else:
            self.sizes = {"classes": int(target.max()) + 1}
        features = [self.features(values, ~held_out) for values in columns.values()]
        data = {"x": torch.cat(features, dim=1), "target": target}
        train, evaluated = ({name: tensor[part] for name, tensor in data.items()} for part in (~held_out, held_out))
        return train, evaluated

    def numbers(self, values):
        """Returns numbers of type float32 [N], or numbers of classes of type int64 [N]."""
        try:
            return torch.tensor([float(value) for value in values])
        except ValueError:
            classes = sorted(set(values))
            return torch.tensor([classes.index(value) for value in values])

    def features(self, values, train):
        column = self.numbers(values)
        if column.is_floating_point():
            return ((column - column[train].mean()) / column[train].std().clamp(min=1e-6))[:, None]
        return nn.functional.one_hot(column).float()
