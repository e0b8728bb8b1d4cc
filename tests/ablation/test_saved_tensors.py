"""Bytes that autograd holds for backward, against formulas."""

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from runner.ablation.saved_tensors import SavedTensors
from runner.memory.call_stack import CallStack

FLOAT = 4
SAVES_OUTPUT = (nn.ReLU, nn.Tanh, nn.Sigmoid)
SAVES_INPUT = (nn.GELU, nn.SiLU, nn.Softplus)


class Chain:
    """Random chain of linear layers and activations, with what it saves by the formulas of autograd.

    A linear layer saves its input, an activation its input or its output. The loss, a mean of
    squares, saves its input.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.rows = draw.randint(1, 40)
        self.widths = [draw.randint(1, 60) for _ in range(draw.randint(2, 7))]
        self.activations = [draw.choice(SAVES_OUTPUT + SAVES_INPUT) for _ in self.widths[1:]]
        torch.manual_seed(seed)
        pairs = zip(self.widths, self.widths[1:], self.activations, strict=False)
        self.layers = [nn.Sequential(nn.Linear(a, b), act()) for a, b, act in pairs]
        self.network = nn.Sequential(*self.layers)
        self.batch = torch.randn(self.rows, self.widths[0])

    @property
    def saved(self) -> int:
        """Bytes by the formula: every activation's output, and the inputs of those that save them."""
        outputs = sum(self.widths[1:])
        pairs = zip(self.widths[1:], self.activations, strict=True)
        inputs = sum(width for width, activation in pairs if activation in SAVES_INPUT)
        return FLOAT * self.rows * (outputs + inputs)

    def measure(self, forward) -> SavedTensors:
        parameters = [*self.network.parameters()]
        counter = SavedTensors(CallStack.of({"net": self.network}), [self.batch, *parameters])
        counter.measure(lambda: forward(self.batch).square().sum().backward())
        return counter


@pytest.mark.parametrize("seed", range(60))
def test_a_chain_of_layers_saves_what_the_formula_says(seed):
    chain = Chain(seed)
    counter = chain.measure(chain.network)
    assert counter.peak == chain.saved
    assert counter.held == 0
    assert sum(counter.peak_holders.values()) == counter.peak
    assert {holder.module for holder in counter.peak_holders} <= chain_modules(chain)
    assert chain.measure(chain.network).peak == counter.peak


def chain_modules(chain):
    names = {name for name, _ in chain.network.named_modules() if name.count(".") == 1}
    return {f"net.{name}" for name in names} | {"(no module)"}


@pytest.mark.parametrize("seed", range(60))
def test_a_checkpointed_segment_holds_only_its_input(seed):
    chain = Chain(seed)

    def forward(x):
        for layer in chain.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    counter = chain.measure(forward)
    # The first segment's input is the batch; the last output is saved by the loss.
    assert counter.peak == FLOAT * chain.rows * sum(chain.widths[1:])
    assert counter.held == 0


@pytest.mark.parametrize("copies", [1, 2, 5])
def test_a_storage_counts_once(copies):
    weight = torch.ones(1000, requires_grad=True)
    counter = SavedTensors(CallStack({}), [weight])

    def update():
        base = weight.exp()
        views = [base[:500] * base[500:] for _ in range(copies)]
        torch.stack(views).sum().backward()

    assert counter.measure(update) == 1000 * FLOAT


def test_an_error_in_the_update_leaves_no_hooks():
    counter = SavedTensors(CallStack({}), [])
    with pytest.raises(ZeroDivisionError):
        counter.measure(lambda: 1 / 0)
    weight = torch.ones(10, requires_grad=True)
    (weight.exp() * 2).sum().backward()
    assert counter.peak == 0
