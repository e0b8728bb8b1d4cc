"""What whole trainings say, with trainings that take no time."""

import math
import types

import pytest

from runner.child.outcome import Cause, ChildError
from runner.compare.verdict import Outcome
from runner.system.errors import DivergedError, RunnerError, UsageError
from runner.verify.statistical import NOT_BEGUN, _why, statistical

REFERENCE, CHANGED = {"seed": 42, "name": "reference"}, {"seed": 42, "name": "changed"}


def judged(learnt, deadline=math.inf, direction="maximize", seeds=8):
    """The verdict if ``learnt(name, seed)`` is what a training learns, and how many pairs it took."""
    sign = 1 if direction == "maximize" else -1
    trained = []

    def run(recipes, wanted):
        trained.extend(wanted)
        return [
            {"before": {"return": -100.0}, "after": {"return": -100.0 + sign * learnt(recipe["name"], seed)}}
            for recipe in recipes
            for seed in wanted
        ]

    trainings = types.SimpleNamespace(run=run, deadline=deadline, say=lambda _: None)
    return statistical(REFERENCE, CHANGED, ("return", direction), 0.05, trainings, seeds), trained


def gains(share, spread=0.002):
    """A change that keeps this share of what the reference learns, which itself differs much from seed to seed."""

    def learnt(name, seed):
        own = 1000.0 * (1 + 0.3 * math.sin(7 * seed))
        return own * (share + spread * math.sin(13 * seed)) if name == "changed" else own

    return learnt


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
@pytest.mark.parametrize(("share", "outcome"), [(1.0, "PASS"), (1.2, "PASS"), (0.98, "PASS"), (0.9, "FAIL")])
def test_it_is_clear_after_few_seeds_that_differ_from_the_recipes_own(share, outcome, direction):
    verdict, trained = judged(gains(share), direction=direction)
    assert verdict.outcome is Outcome(outcome)
    assert trained == [43, 44, 45]
    assert verdict.evidence["metric"] == "return"


def test_what_noise_hides_is_inconclusive():
    verdict, trained = judged(lambda name, seed: 1000.0 + (seed % 2 * 400 - 250 if name == "changed" else 0))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert trained == list(range(43, 51))


def test_a_reference_that_learns_nothing_judges_nobody():
    verdict, _ = judged(lambda name, seed: -5.0 + seed / 100)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "the reference learns nothing: return does not improve" in verdict.summary


def test_nothing_is_begun_after_the_deadline():
    verdict, trained = judged(gains(1.0), deadline=-math.inf)
    assert (verdict.outcome, verdict.summary, trained) == (Outcome.INCONCLUSIVE, NOT_BEGUN, [])


def test_a_change_with_which_training_diverges_fails():
    def run(recipes, seeds):
        raise DivergedError("step 12: slot 'critic_step': 'critic_loss' is nan")

    trainings = types.SimpleNamespace(run=run, deadline=math.inf)
    verdict = statistical(REFERENCE, CHANGED, ("return", "maximize"), 0.05, trainings, 8)
    assert verdict.outcome is Outcome.FAIL
    assert "diverged: step 12: slot 'critic_step'" in verdict.summary


@pytest.mark.parametrize(
    ("cause", "may_diverge", "expected"),
    [
        (Cause.DIVERGED, True, DivergedError),
        (Cause.DIVERGED, False, RunnerError),
        (Cause.INVALID, False, UsageError),
        (Cause.CRASHED, False, RunnerError),
    ],
)
def test_a_training_that_fails_says_why(cause, may_diverge, expected):
    error = _why(ChildError(cause, "in its own words"), may_diverge)
    assert type(error) is expected
    assert "in its own words" in str(error)
