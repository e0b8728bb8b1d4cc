"""Time that is measured is the time of the work, whoever does it and whenever somebody looks."""

import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import Loop, batches

from runner.proof import Subject, clock, warm_up

MODULE = sys.modules["runner.proof.interleaved_timing"]
SECONDS = st.floats(0.1, 10.0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Blocks and warm-ups are a few steps long."""
    monkeypatch.setattr(MODULE, "BLOCK_SECONDS", 1e-9)
    monkeypatch.setattr(warm_up, "WINDOW_SECONDS", 1e-9)


class Script:
    """A clock that moves when work is done."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class Debt:
    """A state in which work waits until it is read."""

    def __init__(self, script, seconds):
        self.script = script
        self.seconds = seconds
        self.steps = 0

    def state_dict(self):
        self.script.now += self.seconds * self.steps
        self.steps = 0
        return {"weight": torch.zeros(2)}

    def load_state_dict(self, state):
        pass


def timed_by(script, own_seconds, later_seconds):
    """A subject whose step takes some time at once, and some when its state is read."""

    def build():
        debt = Debt(script, later_seconds)

        def step(batch):
            script.now += own_seconds
            debt.steps += 1

        return Subject(step, {"model": debt})

    return build


def clocked(baseline, candidate):
    return clock(baseline, candidate, [None], rounds=5, seconds=0.0)


@settings(max_examples=50, deadline=None)
@given(baseline=SECONDS, own=SECONDS, later=SECONDS)
def test_work_that_waits_until_a_state_is_read_counts(baseline, own, later):
    script = Script()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", script.perf_counter)
        timing = clocked(timed_by(script, baseline, 0.0), timed_by(script, own, later))
    # Less than a twentieth is taken for noise.
    counted = later if later > 0.05 * own else 0.0
    assert timing.ratio.value == pytest.approx(baseline / (own + counted), rel=1e-6)


@settings(max_examples=10, deadline=None)
@given(own=SECONDS, later=SECONDS)
def test_a_baseline_that_leaves_work_for_later_is_not_slower_than_itself(own, later):
    script = Script()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", script.perf_counter)
        timing = clocked(*[timed_by(script, own, later)] * 2)
    assert timing.ratio.value == pytest.approx(1.0)


def slowed(when):
    """A loop that replaces the clock by one which runs slowly."""

    def build():
        original = time.perf_counter
        start = original()
        subject = Loop()()
        calls = []

        def replace():
            time.perf_counter = lambda: start + (original() - start) / 100

        def step(batch):
            calls.append(None)
            if when == "in each step" or (when == "after some steps" and len(calls) == 20):
                replace()
            return subject.step(batch)

        if when == "while it is built":
            replace()
        return Subject(step, subject.state)

    return build


@pytest.mark.parametrize("when", ["while it is built", "in each step", "after some steps"])
def test_a_replaced_clock_is_named_and_put_back(when):
    original = time.perf_counter
    timing = clock(Loop(), slowed(when), batches(6), rounds=8, seconds=0.0)
    assert timing.caught == "'time.perf_counter', by which time is measured, was replaced"
    assert timing.effect == "invalid"
    assert time.perf_counter is original


class Lazy(torch.Tensor):
    """A tensor that may compute itself when it is used."""


def test_a_result_of_another_class_is_no_result():
    def build(kind=torch.Tensor):
        subject = Loop()()
        return Subject(lambda batch: {"loss": subject.step(batch)["loss"].as_subclass(kind)}, subject.state)

    timing = clock(build, lambda: build(Lazy), batches(6), rounds=5, seconds=0.0)
    assert timing.caught == "updates return a Lazy in place of a tensor, which may be computed only when it is read"
    both = clock(lambda: build(Lazy), lambda: build(Lazy), batches(6), rounds=5, seconds=0.0)
    assert both.caught == ""
