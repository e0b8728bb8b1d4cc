"""The rounding of single updates, in outputs that rounding decides."""

import pytest
import torch
from torch import nn

from runner.proof import Outcome, Subject, close

_EPSILON = torch.finfo(torch.float32).eps


def build_noisy(seed, factor=1.0, ulps=0):
    """Makes a training whose output is off by a ten-thousandth in a random direction.

    Args:
        seed: Of the direction.
        factor: Of the output, in float32 alone.
        ulps: Units by which each update of the weights is off.
    """

    def build():
        module = nn.Linear(64, 1)
        with torch.no_grad():
            module.weight.fill_(1.0)

        def step(batch):
            # A long sum, for which more units are allowed.
            total = batch["x"].sum()
            with torch.no_grad():
                module.weight.mul_(1.01)
            weight = module.weight.detach()
            if weight.dtype == torch.float64:
                return {"total": total, "output": weight * 100}
            with torch.no_grad():
                module.weight.mul_(1 + ulps * _EPSILON)
            generator = torch.Generator().manual_seed(1000 * seed + int(batch["number"]))
            direction = torch.randn(64, generator=generator)
            error = 1e-4 * direction / direction.norm() * weight.norm()
            return {"total": total, "output": (weight * factor + error) * 100}

        return Subject(step, {"module": module})

    return build


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("factor", [1.0, 0.9999, 1.0001])
def test_a_common_factor_has_a_direction_and_rounding_has_none(seed, factor):
    batches = [{"x": torch.ones(1024), "number": torch.tensor(number)} for number in range(12)]
    verdict = close(build_noisy(2 * seed), build_noisy(2 * seed + 1, factor, ulps=4), batches)
    expected = Outcome.PASS if factor == 1.0 else Outcome.FAIL
    assert verdict.outcome is expected, verdict
    assert ("all outputs are off by the factor" in verdict.summary) == (factor != 1.0)


class Network(nn.Module):
    """Batch normalization cancels the bias before it: Adam turns the rounding of its gradient into steps."""

    def __init__(self):
        super().__init__()
        blocks = [
            nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for channels in (1, 8)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(8, 4)

    def forward(self, image):
        return self.head(self.blocks(image).mean((2, 3)))


def build_network(seed, memory_format=torch.contiguous_format):
    """Makes a training whose step returns an evaluation after the optimizer's step."""

    def build():
        torch.manual_seed(seed)
        network = Network().to(memory_format=memory_format)
        optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)

        def step(batch):
            network.train()
            loss = nn.functional.cross_entropy(network(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            network.eval()
            with torch.no_grad():
                return network(batch["image"])

        return Subject(step, {"network": network, "optimizer": optimizer})

    return build


def sample_batches(seed, count=12):
    """Images whose brightness depends on their label."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        label = torch.randint(4, (32,), generator=generator)
        noise = torch.randn(32, 1, 6, 6, generator=generator)
        batches.append({"image": noise + label[:, None, None, None], "label": label})
    return batches


@pytest.mark.parametrize("seed", [5, 13, 15])
def test_a_bias_before_batch_normalization_may_round_as_in_the_other_memory_format(seed):
    verdict = close(build_network(seed), build_network(seed, torch.channels_last), sample_batches(seed))
    assert verdict.outcome is Outcome.PASS, verdict
