"""Gradients that micro-batches add up, next to those of earlier losses."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from runner.api import DatasetConfig, DatasetSource, GradientLearner, GradientLearnerConfig, Loss
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.training.pipeline import assemble
from runner.training.step import Step

ROWS = 16


class SequencesConfig(DatasetConfig):
    """Sequences of different lengths, so that micro-batches have other counts than the first."""

    kind, provides, in_memory, implementation = "accumulated_rows", "accumulated_rows", True, "Sequences"


class Sequences(DatasetSource):
    def datasets(self, config):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(ROWS, 6, 4, generator=generator)
        lengths = torch.randint(1, 7, (ROWS, 1), generator=generator)
        samples = {"x": x, "mask": (torch.arange(6) < lengths).float(), "row": torch.arange(ROWS)}
        return samples, samples


class NetConfig(GradientLearnerConfig):
    """Computes several losses before one step."""

    kind, learns_from, implementation = "accumulated_net", "accumulated_rows", "Net"
    losses: str = "penalty first"


class SharedConfig(NetConfig):
    """Two roles have the same parameters."""

    kind, implementation = "accumulated_shared", "Shared"
    roles: ClassVar = {"model": {"kind": "sgd", "lr": 0.1}, "also": {"kind": "sgd", "lr": 0.1}}


class Module(nn.Module):
    def __init__(self, is_sparse):
        super().__init__()
        self.rows = nn.Embedding(ROWS, 4, sparse=is_sparse)
        self.head = nn.Linear(4, 1)

    def forward(self, x, row):
        return self.head(x * self.rows(row)[:, None])[..., 0]


class Net(GradientLearner):
    def build(self, config, shapes, context):
        return Module("sparse" in config.losses)

    def loss(self, batch, noise, progress):
        errors = (self.slots.forward(batch["x"], batch["row"]) - 1).square() * batch["mask"]
        return Loss(errors.sum(), batch["mask"].sum())

    def penalty(self):
        weights = [self.module.rows(torch.arange(2)), *self.module.head.parameters()]
        if self.config.losses != "sparse after dense":
            return sum(weight.square().sum() for weight in weights)
        return self.module.rows.weight.square().sum()

    def update(self, batch, noise, progress):
        self.slots.zero_grad(self.model.optimizer)
        if self.config.losses == "several losses":
            self.slots.forward_backward(batch, noise, progress)
        else:
            self.slots.backward(self.penalty())
        return self.slots.forward_backward(batch, noise, progress).outputs()


class Shared(Net):
    def __init__(self, config, shapes, context):
        super().__init__(config, shapes, context)
        self.role("also", nn.ModuleList([self.module.head]))


def gradients_of(folder, *sets):
    """Returns the gradients after an update."""
    path = folder / "net.yaml"
    path.write_text(
        "{name: net, device: cpu, model: {kind: accumulated_net}, data: {kind: accumulated_rows}, "
        "optimizer: {kind: sgd, lr: 0.1}, train: {updates: 2, batch_size: 8}}"
    )
    pipeline = assemble(load(path, sets, Registry([__file__])), [__file__])
    Step(pipeline)()
    return {name: gradient.to_dense() for name, gradient in pipeline.learner.gradients().items()}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("micro_batch", [3, 8])
@pytest.mark.parametrize("losses", ["penalty first", "several losses", "sparse gradients", "sparse after dense"])
def test_gradients_of_earlier_losses_stay(losses, micro_batch, tmp_path):
    sets = ("optimization.gradient_accumulation.micro_batch=" + str(micro_batch), f"model.losses={losses}")
    torch.testing.assert_close(gradients_of(tmp_path, *sets), gradients_of(tmp_path, *sets[1:]))


def test_parameters_of_two_roles_are_scaled_once(tmp_path):
    sets = ("optimization.gradient_accumulation.micro_batch=3", "model.kind=accumulated_shared")
    torch.testing.assert_close(gradients_of(tmp_path, *sets), gradients_of(tmp_path, *sets[1:]))
