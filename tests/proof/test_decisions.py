"""Decisions of a candidate that are made at other numbers than the baseline's."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from runner.proof.decisions import WIDTH, DecisionSearch
from runner.proof.masked_failures import same_decisions, same_digits
from runner.proof.subject import Subject
from runner.proof.subject_states import saved
from runner.proof.trajectory import Update
from runner.proof.verdict import Outcome

SEEDS = st.integers(0, 10**6)
WIDTHS = st.integers(2, 9)
LIMITS = st.floats(0.1, 2.0)
"""Norms above which gradients are clipped."""


class Clipping:
    """A training that clips gradients, with the norm that decides in some type.

    Args:
        seed: Of the parameters.
        width: Of the hidden layer.
        limit: Of the norm.
        dtype: Type of the norm for the decision.
        branches: Whether Python code branches; otherwise a tensor selects the factor.
    """

    def __init__(self, seed, width, limit, dtype, *, branches):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.limit = limit
        self.dtype = dtype
        self.branches = branches

    def step(self, batch):
        loss = (self.model(batch["x"]) - batch["y"]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        is_large = norm.to(self.dtype or norm.dtype) > self.limit
        # A step of the factor at the limit, as of a rule that skips or damps an update.
        damped = 0.5 * self.limit / norm
        if self.branches:
            factor = damped if is_large else torch.ones_like(norm)
        else:
            factor = torch.where(is_large, damped, torch.ones_like(norm))
        for gradient in gradients:
            gradient.mul_(factor)
        self.optimizer.step()
        return {"loss": loss.detach()}

    @property
    def subject(self):
        return Subject(self.step, {"model": self.model, "optimizer": self.optimizer})


def batch_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(5, 3, generator=generator), "y": torch.randn(5, 1, generator=generator)}


def found(seed, width, limit, dtype, *, branches, is_exact):
    """The result of a search, where the baseline decides with all digits."""

    def baseline():
        return Clipping(seed, width, limit, None, branches=branches).subject

    def candidate():
        return Clipping(seed, width, limit, dtype, branches=branches).subject

    search = DecisionSearch(baseline, candidate, is_exact=is_exact)
    states = saved(search.reference.subject)
    return search.first_difference(Update(batch_of(seed), states, 0))


def rounded_limit(limit, dtype):
    """The number above which a comparison in 16 bits exceeds the limit: halfway to the next one."""
    nearest = torch.tensor(limit, dtype=dtype)
    following = (nearest.view(torch.int16) + 1).view(dtype)
    return (float(nearest) + float(following)) / 2


@settings(max_examples=8)
@given(SEEDS, WIDTHS, LIMITS, st.sampled_from([torch.bfloat16, torch.float16]), st.booleans(), st.booleans())
def test_a_decision_by_numbers_of_16_bits_is_found(seed, width, limit, dtype, branches, is_exact):
    assume(abs(rounded_limit(limit, dtype) / limit - 1) > 2 * WIDTH)
    difference = found(seed, width, limit, dtype, branches=branches, is_exact=is_exact)
    assert difference is not None
    assert "times as large" in str(difference)


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize(("distance", "is_found"), [(WIDTH / 10, False), (2 * WIDTH, True)])
def test_a_decision_is_found_from_a_distance_on(distance, is_found, is_exact):
    limit = rounded_limit(1.1, torch.float16) * (1 - distance)
    difference = found(3, 4, limit, torch.float16, branches=True, is_exact=is_exact)
    assert (difference is not None) == is_found


@settings(max_examples=8)
@given(SEEDS, WIDTHS, LIMITS, st.booleans(), st.booleans())
def test_the_same_decision_is_no_difference(seed, width, limit, branches, is_exact):
    # In a comparison in float64, float32 decides otherwise next to the limit only.
    dtype = None if is_exact else torch.float32
    assert found(seed, width, limit, dtype, branches=branches, is_exact=is_exact) is None


class Unclipped(Clipping):
    """Leaves gradients as they are above a norm that this batch never has.

    Args:
        seed: Of the parameters.
        width: Of the hidden layer.
        norm: Above which nothing is changed.
    """

    def __init__(self, seed, width, norm):
        super().__init__(seed, width, 0.1, None, branches=False)
        self.norm = norm

    def step(self, batch):
        if batch["y"].norm() > self.norm:
            self.limit = 1e9
        output = super().step(batch)
        self.limit = 0.1
        return output


@settings(max_examples=8)
@given(SEEDS, WIDTHS, st.floats(20.0, 1000.0), st.sampled_from(["Exact", "Close"]))
def test_a_branch_that_no_training_takes_is_found(seed, width, norm, contract):
    def baseline():
        return Clipping(seed, width, 0.1, None, branches=False).subject

    def candidate():
        return Unclipped(seed, width, norm).subject

    start = Update(batch_of(seed), saved(baseline()), 0)
    verdict = same_decisions(baseline, candidate, start, contract)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert "next to a decision, with a batch" in verdict.summary


@settings(max_examples=8)
@given(SEEDS, WIDTHS, LIMITS, st.sampled_from(["Exact", "Close"]))
def test_a_further_branch_with_the_same_result_is_no_difference(seed, width, limit, contract):
    def baseline():
        return Clipping(seed, width, limit, None, branches=False).subject

    def candidate():
        return Clipping(seed, width, limit, None, branches=True).subject

    start = Update(batch_of(seed), saved(baseline()), 0)
    assert same_decisions(baseline, candidate, start, contract)


@pytest.mark.parametrize("contract", ["Exact", "Close"])
def test_rounded_numbers_that_decide_fail(contract):
    def baseline():
        return Clipping(0, 4, 0.3, None, branches=True).subject

    def candidate():
        return Clipping(0, 4, 0.3, torch.bfloat16, branches=True).subject

    start = Update(batch_of(0), saved(baseline()), 0)
    verdict = same_digits(baseline, candidate, [start], contract)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert "rounded to torch.bfloat16 (test_decisions.py:" in verdict.summary
    assert verdict.reproduction is not None


@pytest.mark.parametrize("contract", ["Exact", "Close"])
def test_rounded_numbers_that_nothing_depends_on_stay_inconclusive(contract):
    class Logging(Clipping):
        def step(self, batch):
            self.seen = batch["x"].bfloat16()
            return super().step(batch)

    def baseline():
        return Clipping(0, 4, 0.3, None, branches=True).subject

    def candidate():
        return Logging(0, 4, 0.3, None, branches=True).subject

    start = Update(batch_of(0), saved(baseline()), 0)
    verdict = same_digits(baseline, candidate, [start], contract)
    assert verdict.outcome is Outcome.INCONCLUSIVE, verdict
