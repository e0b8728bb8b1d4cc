"""Blocks that are computed again start from the buffers of their first forward."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from runner.plugins.stages.activation_checkpointing import _checkpointed, _recomputed
from runner.plugins.stages.block_segments import postpone

WIDTH = 4


class Rebound(nn.Module):
    """Assigns another tensor to a buffer that scales its output."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        self.scale = 0.9 * self.scale + x.detach().abs().mean(0)
        return x.square() * self.scale


class WrittenPastVersions(Rebound):
    """Writes in a way that torch does not count."""

    def forward(self, x):
        self.scale.data.mul_(0.9).add_(x.detach().abs().mean(0))
        return x.square() * self.scale.clone()


class Late(nn.Module):
    """Registers a buffer in its first forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("always", torch.ones(()))

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.ones(WIDTH))
        self.scale = self.scale + x.detach().abs().mean(0)
        return x.square() * self.scale


class Tied(nn.Module):
    """Reads through one module what it writes through another."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Module(), nn.Module()
        scale = torch.ones(WIDTH)
        self.left.register_buffer("scale", scale)
        self.right.register_buffer("scale", scale)

    def forward(self, x):
        self.left.scale.add_(x.detach().abs().mean(0))
        return x.square() * self.right.scale.clone()


class Absent(nn.Module):
    """Has a buffer that is None at first."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, x):
        self.scale = x.detach().abs().mean(0) if self.scale is None else 2 * self.scale
        return x.square() * self.scale


BLOCKS = {
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm by hooks": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "statistics": lambda: nn.BatchNorm1d(WIDTH),
    "cumulative statistics": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "rebound": Rebound,
    "past versions": WrittenPastVersions,
    "late": Late,
    "tied": Tied,
    "absent": Absent,
}


def by_block(blocks):
    for block in blocks:
        block.forward = _checkpointed(block)


def by_segment(blocks):
    postpone(blocks, partial(_recomputed, blocks))


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.spectral_norm")
@pytest.mark.parametrize("change", [by_block, by_segment])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_is_computed_again_from_the_buffers_at_its_start(kind, backwards, calls, change):
    results = []
    for wrap in (list, change):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), BLOCKS[kind](), nn.Tanh()) for _ in range(2)]
        wrap(blocks)
        for _ in range(2):
            loss = 0.0
            for _ in range(calls):
                x = torch.randn(8, WIDTH)
                for block in blocks:
                    x = block(x)
                loss = loss + x.square().sum()
            for number in range(backwards):
                loss.backward(retain_graph=number + 1 < backwards)
        gradients = [parameter.grad for block in blocks for parameter in block.parameters()]
        results.append([*gradients, *(buffer for block in blocks for buffer in block.buffers())])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


def test_buffers_keep_their_memory():
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    buffers = dict(block.named_buffers())
    block.forward = _checkpointed(block)
    block(torch.randn(8, WIDTH)).sum().backward()
    assert all(buffer is buffers[name] for name, buffer in block.named_buffers())
