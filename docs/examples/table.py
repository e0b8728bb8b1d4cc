"""Regression or classification of the rows of a CSV file."""

import csv
import re

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

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


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
        # Spreadsheets write a byte order mark before the first name.
        with config.file.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        if config.target not in columns:
            raise UsageError(f"data.target: no column '{config.target}'; {config.file.name} has: {', '.join(columns)}")
        held_out = torch.arange(len(rows)) % 5 == 0
        target = self.numbers(config.target, columns.pop(config.target))
        self.tables = {"scale": torch.ones(())}
        if target.is_floating_point():
            self.sizes = {"classes": 0}
            self.tables = {"scale": target[~held_out].std()}
            target = (target - target[~held_out].mean()) / target[~held_out].std()
        else:
            self.sizes = {"classes": int(target.max()) + 1}
        features = [self.features(name, values, ~held_out) for name, values in columns.items()]
        data = {"x": torch.cat(features, dim=1), "target": target}
        train, evaluated = ({name: tensor[part] for name, tensor in data.items()} for part in (~held_out, held_out))
        return train, evaluated

    def numbers(self, name, values):
        """Returns numbers of type float32 [N], or numbers of classes of type int64 [N]."""
        is_text = torch.tensor([not NUMBER.fullmatch(value or "") for value in values])
        if not is_text.any():
            return torch.tensor(list(map(float, values)))
        if not is_text.all():
            row = int(is_text.int().argmax())
            raise UsageError(f"data.file: column '{name}' has numbers, and {values[row]!r} in row {row + 1}: fix it")
        classes = sorted(set(values))
        return torch.tensor([classes.index(value) for value in values])

    def features(self, name, values, train):
        column = self.numbers(name, values)
        if column.is_floating_point():
            return ((column - column[train].mean()) / column[train].std().clamp(min=1e-6))[:, None]
        return nn.functional.one_hot(column).float()
