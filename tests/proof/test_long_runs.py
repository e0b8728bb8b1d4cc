"""Long runs find what is late or rare, and say what they exclude."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loops import Counter, Loop, batches, forward

from runner.proof import Close, Exact, Outcome, Subject, verify
from runner.proof.long_runs import APART, long_run, same_algebra, same_bits
from runner.proof.subject_states import saved
from runner.proof.trajectory import Update
from runner.proof.verdict import excluded

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


def course(updates):
    """A training whose state is given away from time to time."""
    subject = Loop()()
    for number in range(updates):
        batch = BATCHES[number % len(BATCHES)]
        yield Update(batch, saved(subject) if number % APART == 0 else None, number)
        subject.step(batch)


@given(st.integers(3, 10**6))
def test_what_is_excluded_is_the_rule_of_three(updates):
    rate = 1 / int(excluded(updates).split("1 update in ")[1].split()[0].replace(",", ""))
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
    assert verdict.summary == "errors more frequent than 1 update in 50 are ruled out (95 %)"
    assert "more frequent than 1 update in 3 are ruled out" in str(verify(Loop(), Loop(), BATCHES, Exact()))


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
    verdict = same_algebra(Loop(), late(55, period), course(120))
    assert verdict.outcome is Outcome.FAIL
    assert "long run: in float64, update 55, slot 'step': 'loss' differs by" in verdict.summary
    honest = same_algebra(Loop(), Loop(options={"lr": 1e-2, "foreach": True}), course(120))
    assert (honest.outcome, honest.evidence["horizon"]) == (Outcome.PASS, 120)


def test_an_error_that_comes_late_after_a_state_was_loaded_is_found():
    class Fresh(Counter):
        def load_state_dict(self, state):
            self.count = itertools.count(1)

    def build():
        since = Fresh()
        since.load_state_dict({})
        loop = Loop(forward=lambda model, x: forward(model, x) * (1 if next(since.count) < 16 else 1.01))()
        return replace(loop, state={**loop.state, "since": since})

    def moves():
        for update in course(60):
            yield replace(update, states=update.states and {**update.states, "since": {}})

    verdict = same_algebra(Loop(), build, moves())
    assert verdict.outcome is Outcome.FAIL
    assert "update 16, slot 'step': 'loss' differs by" in verdict.summary


def test_an_error_in_float32_alone_is_found_if_it_comes_often():
    def build(every):
        count = itertools.count(1)

        def changed(model, x):
            wrong = x.dtype == torch.float32 and next(count) % every == 0
            return forward(model, x) * (1.001 if wrong else 1)

        return Loop(forward=changed)()

    verdict = same_algebra(Loop(), lambda: build(5), course(120))
    assert verdict.outcome is Outcome.FAIL
    assert "rounds more than the baseline in a long run: outputs in 4 of 24 " in verdict.summary


def test_a_state_that_alone_is_wrong_in_float32_is_found():
    def build():
        subject = Loop()()
        step = subject.step

        def rounded(batch):
            output = step(batch)
            with torch.no_grad():
                for each in subject.state["model"].parameters():
                    if each.dtype == torch.float32:
                        each.copy_(each.bfloat16())
            return output

        subject.__dict__["step"] = rounded
        return subject

    verdict = same_algebra(Loop(), build, course(60))
    assert verdict.outcome is Outcome.FAIL
    assert "in a long run: 'weight' of the state in 6 of 6 single updates off by up to 0.00" in verdict.summary


def crossing(error, *late):
    """A loop whose loss comes close to zero from one state or more, as a difference of what is large does."""

    def build():
        subject = Loop()()

        def step(batch):
            rare = int(subject.state["model"].seen) in (7 * APART, *late)
            loss = subject.step(batch)["loss"] * (1e-6 if rare else 1)
            return {"loss": loss if loss.dtype is torch.float64 else loss + error(rare)}

        return Subject(step, subject.state)

    return build


def lucky(rare):
    return 0.0 if rare else 1e-5


def test_an_output_that_passes_zero_in_a_state_is_measured_by_its_usual_size():
    assert same_algebra(crossing(lucky), crossing(lambda rare: 1e-5), course(120))


@pytest.mark.parametrize("wrong", [1.0, math.nan, math.inf])
def test_an_output_that_passes_zero_may_be_off_by_no_more_than_is_usual(wrong):
    verdict = same_algebra(crossing(lucky), crossing(lambda rare: wrong if rare else 1e-5), course(120))
    assert "rounds more than the baseline in a long run: outputs in 3 of " in verdict.summary


def test_an_output_that_passes_zero_in_two_states_has_no_usual_size_in_both():
    late = 9 * APART
    verdict = same_algebra(crossing(lucky, late), crossing(lambda rare: 1e-5, late), course(120))
    assert "rounds more than the baseline in a long run: outputs in 3 of " in verdict.summary


def test_a_state_from_which_the_baseline_overflows_hides_nothing_in_others():
    overflowing = lambda rare: math.inf if rare else 1e-5  # noqa: E731
    wrong = lambda rare: math.inf if rare else 1e-2  # noqa: E731
    assert same_algebra(crossing(overflowing), crossing(overflowing), course(120))
    verdict = same_algebra(crossing(overflowing), crossing(wrong), course(120))
    assert "rounds more than the baseline in a long run: outputs in " in verdict.summary


def test_an_error_that_comes_of_a_late_state_is_found_in_its_slot():
    def build():
        fitted = lambda model, x: forward(model, x) * (1.001 if float(model.seen) > 90 else 1)  # noqa: E731
        return Loop(forward=fitted)()

    assert verify(Loop(), build, BATCHES, Close())
    verdict = same_algebra(Loop(), build, course(120))
    assert verdict.outcome is Outcome.FAIL
    assert "in a long run, from a state on the way to update " in verdict.summary


def test_a_long_run_in_float64_ends_with_its_time_and_sees_autocast():
    assert same_algebra(Loop(), Loop(), course(120), seconds=0.0).evidence["horizon"] == APART

    def build():
        count = itertools.count()

        def changed(model, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=next(count) > 30):
                return forward(model, x)

        return Loop(forward=changed)()

    verdict = same_algebra(Loop(), build, course(120))
    assert "in a long run, update 32, slot 'step': autocast casts to torch.bfloat16" in verdict.summary


def test_a_baseline_that_is_another_one_in_a_long_run_is_no_measure():
    verdict = same_algebra(late(55), Loop(), course(120))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "not the same in a long run and alone" in verdict.summary
