"""Errors that are small and the same in every update."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loops import Loop, Net, batches

from runner.proof import Outcome, Subject
from runner.proof.algebra_check import SYSTEMATIC, algebra

BATCHES = batches(6)
OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}


class Larger:
    """Makes a loop whose updates are larger by a share.

    Args:
        loop: The loop.
        share: Of each update; a function of the model may change it instead.
        change: Called with the model and its parameters before the update.
    """

    def __init__(self, loop, share=0.0, change=None):
        self.loop, self.share, self.change, self.updates = loop, share, change, 0

    def __call__(self):
        subject = self.loop()
        model = subject.state["model"]

        def step(batch):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            output = subject.step(batch)
            self.updates += 1
            with torch.no_grad():
                for parameter, old in zip(model.parameters(), before, strict=True):
                    parameter.add_(parameter - old, alpha=self.share)
                    if self.change is not None:
                        self.change(self.updates, parameter, old)
            return output

        return Subject(step, subject.state)


@settings(max_examples=13, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(OPTIMIZERS)), st.floats(1e-5, 1e-2), st.integers(2, 6), st.floats(3.0, 100.0))
def test_the_error_that_is_reported_is_detected(optimizer, rate, count, times):
    loop = Loop(optimizer=OPTIMIZERS[optimizer], options={"lr": rate})
    smallest = algebra(loop, loop, BATCHES[:count]).evidence[SYSTEMATIC]
    assert 0 < smallest < 0.1
    assert algebra(loop, Larger(loop, times * smallest), BATCHES[:count]).outcome is Outcome.FAIL


def decay(_, parameter, old):
    parameter.add_(old, alpha=-1e-7)


def now_and_then_twice(updates, parameter, old):
    if updates % 3 == 0:
        parameter.add_(parameter - old, alpha=1e-4)


def clipped(_, parameter, old):
    parameter.copy_(old + (parameter - old).clamp(-9.999e-3, 9.999e-3))


def nearly_the_old(_, parameter, old):
    parameter.lerp_(old, 1e-5)


@pytest.mark.parametrize("change", [decay, now_and_then_twice, clipped, nearly_the_old])
def test_small_errors_in_every_update_are_detected(change):
    verdict = algebra(Loop(), Larger(Loop(), change=change), BATCHES)
    assert verdict.outcome is Outcome.FAIL, verdict


@pytest.mark.parametrize("options", [{"lr": 1e-2, "foreach": True}, {"lr": 1e-2, "foreach": False}])
def test_correct_changes_pass_with_the_error_that_would_show(options):
    verdict = algebra(Loop(), replace(Loop(), options=options), BATCHES)
    assert verdict, verdict
    assert verdict.summary.startswith("the same algebra over 6 updates in float64, which shows an error above ")


def test_a_state_that_does_not_move_has_no_sensitivity():
    loop = Loop(net=Net, options={"lr": 0.0}, optimizer=torch.optim.SGD)
    verdict = algebra(loop, loop, BATCHES[:2])
    assert verdict
    assert verdict.evidence[SYSTEMATIC] is None
