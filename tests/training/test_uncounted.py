"""Trainings with entries that look like samples, and with batches in which nothing is counted."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from toy_runs import Notes

from runner.api import BatchLayout, DatasetConfig, DatasetSource, GradientLearner, GradientLearnerConfig, Loss
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.training.loop import Loop
from runner.training.pipeline import assemble
from runner.training.signals import Stop

ROWS, BATCH, WIDTH, CLASSES = 24, 8, 4, 3
UNCOUNTED = -100


class RowsConfig(DatasetConfig):
    """Labelled rows with tables that are as long as a batch."""

    kind = "uncounted_rows"
    implementation = "RowsSource"
    provides = "uncounted_rows"
    table: str = "none"
    blank: int = 0
    """Rows without a label, from the first one on."""


class RowsSource(DatasetSource):
    def __init__(self, config, context):
        super().__init__(config, context)
        if config.table == "declared":
            self.layout = BatchLayout(shared={"table"})

    def datasets(self, config):
        x = torch.randn(2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
        label = x.argmax(1) % CLASSES
        label[: config.blank] = UNCOUNTED
        samples = [{"x": row, "label": target} for row, target in zip(x, label, strict=True)]
        return samples[:ROWS], samples[ROWS:]

    def collate(self, samples):
        batch = torch.utils.data.default_collate(list(samples))
        if self.config.table != "none":
            batch["table"] = TABLES[self.config.table]
        return batch


TABLES = {
    "vector": torch.linspace(0.5, 1.5, BATCH),
    "square": torch.eye(BATCH) + 0.1,
    "declared": torch.linspace(0.5, 1.5, BATCH),
}


class NetConfig(GradientLearnerConfig):
    """Classifies rows; the loss counts those that have a label."""

    kind = "uncounted_net"
    implementation = "Net"
    learns_from = "uncounted_rows"
    counts: str = "tensor"
    is_masked: bool = False
    """Whether losses without a label are multiplied by zero, instead of left out."""


class Net(GradientLearner):
    def build(self, config, shapes, context):
        return nn.Linear(WIDTH, CLASSES)

    def loss(self, batch, noise, progress):
        table = batch.get("table")
        scale = 1.0
        if table is not None:
            assert len(table) == BATCH
            scale = table.sum() / BATCH
        logits = self.slots.forward(batch["x"]) * scale
        has_label = batch["label"] != UNCOUNTED
        if self.config.is_masked:  # zeros times an infinite gradient would be NaN
            losses = cross_entropy(logits, batch["label"].clamp(min=0), reduction="none")
            total = (losses * has_label).sum()
        else:
            total = cross_entropy(logits, batch["label"], ignore_index=UNCOUNTED, reduction="sum")
        counted = has_label.sum()
        return Loss(total, {"tensor": counted, "float": counted.float(), "int": int(counted)}[self.config.counts])


def trained(folder, *sets):
    """Trains without a store; returns the parameters and the last evaluated loss."""
    values = {
        "name": "uncounted",
        "device": "cpu",
        "model": {"kind": "uncounted_net"},
        "data": {"kind": "uncounted_rows"},
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "train": {"updates": 6, "batch_size": BATCH},
    }
    notes = Notes()
    pipeline = assemble(load(values, sets, Registry([NetConfig, RowsConfig])))
    Loop(pipeline, folder, notes, notes, Stop()).run()
    losses = {name: dict(points) for name, points in notes.points.items()}
    return pipeline.learner.module.state_dict(), losses


def assert_same(one, other):
    for name, tensor in one.items():
        assert torch.isfinite(tensor).all()
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("micro_batch", [1, 3, 4])
@pytest.mark.parametrize("table", TABLES)
def test_a_table_as_long_as_the_batch_is_whole_in_every_micro_batch(tmp_path, table, micro_batch):
    sets = (f"data.table={table}",)
    accumulation = f"optimization.gradient_accumulation.micro_batch={micro_batch}"
    expected, expected_losses = trained(tmp_path / "plain", *sets)
    parameters, losses = trained(tmp_path / "parts", *sets, accumulation)
    assert_same(parameters, expected)
    assert losses["eval/loss"] == pytest.approx(expected_losses["eval/loss"], rel=1e-4)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("counts", ["tensor", "float", "int"])
@pytest.mark.parametrize("blank", [ROWS - 2, ROWS])
def test_a_part_in_which_nothing_counts_changes_no_parameter(tmp_path, counts, blank, is_masked):
    sets = (f"data.blank={blank}", f"model.counts={counts}", f"model.is_masked={is_masked}".lower())
    expected, _ = trained(tmp_path / "plain", *sets)
    parameters, losses = trained(tmp_path / "parts", *sets, "optimization.gradient_accumulation.micro_batch=2")
    assert_same(parameters, expected)
    assert all(math.isfinite(loss) for loss in losses["eval/loss"].values())
