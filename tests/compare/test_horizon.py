"""Long runs find what is late or rare, and say what they exclude."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loops import Loop, batches, forward

from runner.compare.horizon import long_run, same_algebra, same_bits
from runner.compare.verdict import excluded
from runner.proof import Close, Exact, Outcome, verify

BATCHES = batches(10)


def late(first, period=10**9):
    """Wrong in one update and then once in so many."""

    def build():
        count = itertools.count(1)

        def changed(model, x):
            number = next(count)
            return forward(model, x) * (1.01 if number >= first and (number - first) % period == 0 else 1)

        return Loop(forward=changed)()

    return build


@given(st.integers(3, 10**6))
def test_what_is_excluded_is_the_rule_of_three(updates):
    rate = 1 / int(excluded(updates).split("1 of ")[1].split()[0].replace(",", ""))
    assert (1 - rate) ** updates <= 0.0502 or updates < 60  # the rule is one for many updates
    assert rate >= 3 / updates


def test_an_error_after_a_hundred_updates_is_missed_by_a_short_look_and_found_by_a_long_run():
    assert verify(Loop(), late(121), BATCHES, Exact())
    own = long_run(Loop(), BATCHES, 200)
    verdict = same_bits(own, Loop(), late(121), BATCHES)
    assert verdict.outcome is Outcome.FAIL
    assert "update 121, slot 'step': 'loss' differs" in verdict.summary


def test_a_state_that_alone_is_wrong_is_found_in_its_piece():
    def build(first):
        subject, count = Loop()(), itertools.count(1)
        step = subject.step

        def counted(batch):
            output = step(batch)
            if next(count) == first:
                with torch.no_grad():
                    subject.state["model"].seen += 1
            return output

        subject.__dict__["step"] = counted
        return subject

    own = long_run(Loop(), BATCHES, 200)
    verdict = same_bits(own, Loop(), lambda: build(130), BATCHES)
    assert verdict.outcome is Outcome.FAIL
    assert "updates 101 to 150, slot 'step': 'model.seen' differs" in verdict.summary
    assert same_bits(own, Loop(), lambda: build(0), BATCHES)


def test_a_long_run_says_what_it_excludes():
    verdict = same_bits(long_run(Loop(), BATCHES, 150), Loop(), Loop(), BATCHES)
    assert (verdict.outcome, verdict.evidence) == (Outcome.PASS, {"horizon": 150})
    assert verdict.summary == "an error in more than 1 of 50 updates is excluded with 95 %"
    assert "more than 1 of 3 updates is excluded" in str(verify(Loop(), Loop(), BATCHES, Exact()))


def test_a_long_run_ends_with_its_time_but_makes_a_piece():
    assert len(long_run(Loop(), BATCHES, 10**9, seconds=0.0).outputs) == 50


def test_a_baseline_that_is_not_the_same_twice_is_no_measure():
    numbers = itertools.count()

    def unlike(model, x):
        return forward(model, x) + 1e-6 * next(numbers)

    build = Loop(forward=unlike)
    verdict = same_bits(long_run(build, BATCHES, 60), build, Loop(), BATCHES)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "not the same twice" in verdict.summary


@pytest.mark.parametrize("period", [10**9, 40])
def test_the_algebra_is_compared_for_longer_than_rounding_allows(period):
    assert verify(Loop(), late(55, period), BATCHES, Close())
    verdict = same_algebra(Loop(), late(55, period), BATCHES, 120, math.inf)
    assert verdict.outcome is Outcome.FAIL
    assert "update " in verdict.summary
    honest = same_algebra(Loop(), Loop(options={"lr": 1e-2, "foreach": True}), BATCHES, 120, math.inf)
    assert (honest.outcome, honest.evidence["horizon"]) == (Outcome.PASS, 120)
