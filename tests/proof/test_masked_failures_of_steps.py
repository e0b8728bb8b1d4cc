"""Failures of numbers that a change hides: NaN, very small numbers, few digits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from runner.proof.masked_failures import same_digits, same_small_numbers, unmasked
from runner.proof.modes import NarrowTypes
from runner.proof.subject import Subject
from runner.proof.trajectory import Update
from runner.proof.verdict import Outcome

SIZES = st.integers(1, 6)
SEEDS = st.integers(0, 10**6)
CONTRACTS = st.sampled_from(["Exact", "Close"])


class Training:
    """A network of two layers; each method is one place at which a test makes it wrong."""

    def __init__(self, seed, inputs=3, hidden=4):
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(inputs, hidden), nn.Linear(hidden, 1)
        self.model = nn.Sequential(self.first, nn.Tanh(), self.last)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def output(self, value):
        return value

    def logged(self, loss):
        return loss

    def gradients(self):
        pass

    def parameters(self):
        pass

    def step(self, batch):
        loss = (self.output(self.model(batch["x"])) - batch["y"]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.gradients()
        self.optimizer.step()
        self.parameters()
        return {"loss": self.logged(loss.detach())}

    @property
    def subject(self):
        return Subject(self.step, {"model": self.model, "optimizer": self.optimizer})


class OutputWithoutNan(Training):
    def output(self, value):
        return value.nan_to_num()


class LogWithoutNan(Training):
    def logged(self, loss):
        return loss.nan_to_num()


class GradientsWithoutNan(Training):
    def gradients(self):
        for parameter in self.model.parameters():
            parameter.grad.nan_to_num_()


class ParametersWithoutNan(Training):
    def parameters(self):
        for parameter in self.model.parameters():
            parameter.data.nan_to_num_(nan=0.1)


class SkippedSteps(Training):
    """Skips an update as a gradient scaler does."""

    def gradients(self):
        if not all(bool(parameter.grad.isfinite().all()) for parameter in self.model.parameters()):
            for parameter in self.model.parameters():
                parameter.grad = None


MASKING = (OutputWithoutNan, LogWithoutNan, GradientsWithoutNan, ParametersWithoutNan)


def batch_of(seed, rows, inputs):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, inputs, generator=generator), "y": torch.randn(rows, 1, generator=generator)}


def builds(kind, *arguments):
    return (lambda: Training(*arguments).subject), (lambda: kind(*arguments).subject)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(MASKING), SEEDS, SIZES, SIZES, SIZES, CONTRACTS)
def test_nan_that_is_replaced_fails(kind, seed, rows, inputs, hidden, contract):
    start = Update(batch_of(seed, rows, inputs))
    verdict = unmasked(*builds(kind, seed, inputs, hidden), start, contract)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert "a failure is hidden: update 1" in verdict.summary


@settings(max_examples=15, deadline=None)
@given(SEEDS, SIZES, SIZES, SIZES, CONTRACTS)
def test_nan_that_reaches_what_it_should_passes(seed, rows, inputs, hidden, contract):
    start = Update(batch_of(seed, rows, inputs))
    assert unmasked(*builds(Training, seed, inputs, hidden), start, contract)
    assert same_small_numbers(*builds(Training, seed, inputs, hidden), start, contract)
    assert same_digits(*builds(Training, seed, inputs, hidden), [start], contract)


@pytest.mark.parametrize(("contract", "outcome"), [("Close", Outcome.PASS), ("Exact", Outcome.FAIL)])
def test_an_update_that_is_skipped_is_close_and_not_exact(contract, outcome):
    verdict = unmasked(*builds(SkippedSteps, 0), Update(batch_of(0, 4, 3)), contract)
    assert verdict.outcome is outcome, verdict


class SmallToZero(Training):
    """Sets gradients below a limit to zero."""

    limit = 0.0

    def gradients(self):
        for parameter in self.model.parameters():
            parameter.grad.masked_fill_(parameter.grad.abs() < self.limit, 0)


@settings(max_examples=50, deadline=None)
@given(st.floats(-22, -14), SEEDS, CONTRACTS)
def test_small_gradients_that_become_zero_fail(exponent, seed, contract):
    kind = type("Flushing", (SmallToZero,), {"limit": 10**exponent})
    verdict = same_small_numbers(*builds(kind, seed), Update(batch_of(seed, 4, 3)), contract)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert "times as large, not the same: update 1" in verdict.summary


def test_subnormal_gradients_that_become_zero_are_not_exact():
    limit = {"limit": torch.finfo(torch.float32).smallest_normal}
    kind = type("Flushing", (SmallToZero,), limit)
    verdict = same_small_numbers(*builds(kind, 0), Update(batch_of(0, 4, 3)), "Exact")
    assert verdict.outcome is Outcome.FAIL, verdict
    assert "1e-39 times as large" in verdict.summary


class FewDigits(Training):
    """Rounds the gradients of the first layer, a thousandth of the others, to 16 bits."""

    dtype = torch.bfloat16

    def gradients(self):
        for parameter in self.first.parameters():
            if parameter.dtype == torch.float32:
                parameter.grad.copy_(parameter.grad.to(self.dtype))


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([torch.bfloat16, torch.float16]), SEEDS)
def test_gradients_of_few_digits_fail_beside_larger_ones(dtype, seed):
    kind = type("Rounded", (FewDigits,), {"dtype": dtype})
    verdict = same_digits(*builds(kind, seed, 4, 8), [Update(batch_of(seed, 5, 4))], "Close")
    assert verdict.outcome is Outcome.FAIL, verdict
    assert "has fewer digits than the baseline's" in verdict.summary
    assert "first" not in verdict.summary
    assert "'model.0." in verdict.summary


class NearKink(Training):
    """A ReLU whose input is zero for one batch, up to the rounding of each training."""

    shift = 0.0

    def __init__(self, seed, inputs=3, hidden=4):
        super().__init__(seed, inputs, hidden)
        self.model = nn.Sequential(self.first, nn.ReLU(), self.last)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def step(self, batch):
        # The first unit of the first sample is at its kink where the batch says so.
        pre_activation = self.first(batch["x"])
        shifts = torch.zeros_like(pre_activation)
        if batch["kink"].any():
            shifts[0, 0] = self.shift - pre_activation[0, 0].detach()
        loss = (self.last(torch.relu(pre_activation + shifts)) - batch["y"]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach()}


@pytest.mark.parametrize(("kinks", "outcome"), [((1, 0, 0), Outcome.PASS), ((1, 1, 0), Outcome.FAIL)])
@pytest.mark.parametrize("seed", range(5))
def test_a_decision_that_rounding_makes_otherwise_in_one_update_is_no_loss_of_digits(kinks, outcome, seed):
    shifted = type("Shifted", (NearKink,), {"shift": 1e-7})
    updates = [
        Update(batch_of(seed + number, 4, 3) | {"kink": torch.tensor([bool(kink)])})
        for number, kink in enumerate(kinks)
    ]
    verdict = same_digits(lambda: NearKink(seed).subject, lambda: shifted(seed).subject, updates, "Close")
    assert verdict.outcome is outcome, verdict


class Decides(Training):
    """Decides by numbers of 16 bits, which no result shows."""

    def gradients(self):
        assert self.first.weight.grad.bfloat16().norm() < math.inf


@pytest.mark.parametrize("contract", ["Exact", "Close"])
def test_a_narrow_type_that_no_result_shows_is_inconclusive(contract):
    verdict = same_digits(*builds(Decides, 0), [Update(batch_of(0, 4, 3))], contract)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "rounded to torch.bfloat16 (test_masked_failures_of_steps.py:" in verdict.summary


def test_numbers_that_keep_their_digits_in_a_narrow_type_are_not_rounded():
    mask = torch.tensor([0.0, 1.0, 0.5])
    with NarrowTypes() as types:
        _ = mask.half() * 2
    assert types.places == {}
    with NarrowTypes() as types:
        _ = (mask / 3).half()
    assert [*types.places] == ["torch.float16"]
