"""Random numbers that a step draws in its own way in a training, and like eager code where it is compared."""

import re
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from runner.proof import Close, Exact, Outcome, Subject, verify
from runner.proof.randomness import same_randomness

RATE = 0.4


@dataclass(frozen=True)
class Mask:
    """How a dropout draws where it draws its own numbers."""

    rate: float = RATE
    scale: float | None = None
    fresh_in_backward: bool = False
    fresh_tail: int = 0
    seed: int | None = None
    shape: object = staticmethod(tuple)
    fill: object = staticmethod(lambda numbers: numbers)

    def draw(self, shape, generator):
        numbers = self.fill(torch.rand(self.shape(shape), generator=generator))
        return (numbers.expand(shape) > self.rate).to(torch.get_default_dtype())


class OwnDropout(torch.autograd.Function):
    """Draws like eager code if it is told to, as compiled code does, or else from a generator of its own."""

    @staticmethod
    def forward(context, x, how):
        if inductor.fallback_random:
            forward_mask = backward_mask = torch.empty_like(x).bernoulli_(1 - RATE) / (1 - RATE)
        else:
            seed = int(torch.randint(2**40, ()))
            generator = torch.Generator().manual_seed(seed if how.seed is None else how.seed)
            scale = how.scale or 1 / (1 - how.rate)
            forward_mask = backward_mask = scale * how.draw(x.shape, generator)
            if how.fresh_in_backward:
                backward_mask = scale * how.draw(x.shape, generator)
            if how.fresh_tail:
                backward_mask = forward_mask.clone()
                backward_mask[:, -how.fresh_tail :] = scale * how.draw(x[:, -how.fresh_tail :].shape, generator)
        context.save_for_backward(backward_mask)
        return x * forward_mask

    @staticmethod
    def backward(context, gradient):
        return gradient * context.saved_tensors[0], None


class Net(nn.Module):
    """Two layers with a dropout after each."""

    def __init__(self, how, activation):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(32, 1)
        self.drop = nn.Dropout(RATE) if how is None else partial(self.own, how=how)
        self.activation = activation

    def own(self, x, how):
        return OwnDropout.apply(x, how)

    def forward(self, x):
        hidden = self.drop(self.activation(self.first(x)))
        return self.head(self.drop(self.activation(self.second(hidden))))


def loop(how=None, activation=torch.relu, clip=None, compiled=False):
    def build():
        torch.manual_seed(3)
        model = Net(how, activation)
        run = torch.compile(model, dynamic=False) if compiled else model
        # Without a state, which would be loaded before each of hundreds of updates.
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

        def step(batch):
            optimizer.zero_grad()
            loss = (run(batch["x"]) - batch["y"]).square().mean()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            return {"loss": loss.detach()}

        return Subject(step, {"model": model, "optimizer": optimizer})

    return build


def batches(count=6, rows=32):
    draw = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(rows, 4, generator=draw), "y": torch.randn(rows, 1, generator=draw)} for _ in range(count)
    ]


WRONG = {
    "another mask in the backward pass": (Mask(fresh_in_backward=True), "not the slope of 'loss'"),
    "another mask for the last columns in the backward pass": (Mask(fresh_tail=3), "not the slope of 'loss'"),
    "a higher rate": (Mask(rate=RATE + 0.1), "varies otherwise|its mean"),
    "a lower rate with the scale of the right one": (Mask(rate=RATE - 0.1, scale=1 / (1 - RATE)), "its mean|varies"),
    "the same mask in every update": (Mask(seed=7), "update before|its mean|varies|dimension"),
    "one mask for all rows of a batch": (Mask(shape=lambda shape: (1, shape[1])), "varies|dimension"),
    "one number for a whole row": (Mask(shape=lambda shape: (shape[0], 1)), "its mean|varies|dimension"),
    "groups of four columns": (
        Mask(shape=lambda shape: (shape[0], shape[1] // 4), fill=lambda u: u.repeat_interleave(4, 1)),
        "varies|dimension",
    ),
    "a mask of half the width, twice": (
        Mask(shape=lambda shape: (shape[0], shape[1] // 2), fill=lambda u: u.repeat(1, 2)),
        "varies|dimension",
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_random_numbers_that_only_a_training_draws_are_found(name):
    how, said = WRONG[name]
    verdict = same_randomness(loop(), loop(how), batches(), "Close", 0, seconds=0.0)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert re.search(said, verdict.summary), verdict
    assert verdict.summary.startswith("with the random numbers that it trains with, ")


@pytest.mark.parametrize("options", [{}, {"activation": nn.functional.gelu, "clip": 0.1}])
def test_other_random_numbers_that_do_the_same_pass(options):
    verdict = same_randomness(loop(**options), loop(Mask(), **options), batches(), "Close", 0, seconds=0.0)
    assert verdict, verdict
    assert verdict.evidence["random_updates"] >= 128


def test_clipped_gradients_of_another_mask_are_found():
    changed = loop(Mask(fresh_in_backward=True), clip=0.1)
    verdict = same_randomness(loop(clip=0.1), changed, batches(), "Close", 0, seconds=0.0)
    assert "not the slope" in verdict.summary


def test_other_random_numbers_are_never_exact():
    verdict = same_randomness(loop(), loop(Mask()), batches(), "Exact", 0)
    assert verdict.outcome is Outcome.FAIL
    assert verify(loop(), loop(), batches(4), Exact())


def test_random_numbers_where_the_baseline_draws_none_fail(monkeypatch):
    monkeypatch.setitem(counters["stats"], "unique_graphs", 1)  # that something else has compiled

    def noisy():
        subject = quiet()
        step = subject.step

        def with_noise(batch):
            if not inductor.fallback_random:
                batch["x"] += 0.01 * torch.randn(batch["x"].shape)
            return step(batch)

        return Subject(with_noise, subject.state)

    def quiet():
        torch.manual_seed(3)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            optimizer.zero_grad()
            loss = (model(batch["x"]) - batch["y"]).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Subject(step, {"model": model, "optimizer": optimizer})

    assert verify(quiet, quiet, batches(4), Close())
    assert verify(quiet, noisy, batches(4), Close()).outcome is Outcome.FAIL


def test_a_compiled_dropout_passes_with_its_own_numbers():
    verdict = verify(loop(), loop(compiled=True), batches(4, rows=8), Close())
    assert verdict.outcome is Outcome.PASS, verdict
    assert "its random numbers have the same effect as the baseline's" in verdict.summary
    assert inductor.fallback_random is False
