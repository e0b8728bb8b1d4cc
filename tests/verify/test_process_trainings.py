"""The verdict on trainings on several processes; what they learn is made up here."""

import random
from types import SimpleNamespace

import pytest
from running import tiny

from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome
from runner.system.errors import DivergedError, RunnerError
from runner.verify.options import Options
from runner.verify.process_trainings import GroupTrainings, judge_trainings
from runner.verify.time_limit import NOT_BEGUN
from runner.verify.training_pool import Milestone


class Scripted(GroupTrainings):
    """Trainings whose return is known: on several processes, it is smaller by ``loss``."""

    def __init__(self, loss=0.0, error=None, budget=100.0, seconds=1.0):
        group = SimpleNamespace(count=2, rank=0)
        super().__init__(tiny("marl_baseline"), Registry(), group, budget, self.lines.append)
        self.loss = loss
        self.error = error
        self.seconds = seconds

    @property
    def lines(self):
        return self.__dict__.setdefault("_lines", [])

    def run(self, trainings, seeds, length):
        if self.error is not None:
            raise self.error
        milestones = []
        for training in trainings:
            is_divided = training is self.divided
            for seed in seeds:
                noise = random.Random(f"{seed} {is_divided}").uniform(-0.1, 0.1)
                value = 100 + noise - self.loss * is_divided
                metrics = {"return": value}
                milestones.append(Milestone(length, {"return": 0.0}, metrics, self.seconds, self.seconds))
        return milestones


@pytest.mark.parametrize(("loss", "outcome"), [(0.0, Outcome.PASS), (30.0, Outcome.FAIL)])
def test_trainings_may_not_be_worse_by_more_than_the_margin(loss, outcome):
    verdict = judge_trainings(Scripted(loss), Options(steps=60))
    assert verdict.outcome is outcome, verdict
    assert verdict.contract == "Statistical"
    assert verdict.summary.endswith(", after 60 of 120 env_steps")
    assert verdict.evidence["length"] == {"env_steps": 60}


def test_the_budget_limits_the_length():
    # Eight pairs of trainings of a fifth take 8 * (1 / 2 + 1) seconds.
    for budget, length in ((100.0, 120), (30.0, 48), (5.0, 24)):
        trainings = Scripted(budget=budget)
        assert trainings.affordable_length(8) == length
        assert bool(trainings.lines) is (length < 120)


@pytest.mark.parametrize(
    ("error", "outcome", "summary"),
    [
        (DivergedError("seed 43: the loss is NaN"), Outcome.FAIL, "a training on 2 processes diverged: seed 43"),
        (RunnerError("process 1 has ended"), Outcome.INCONCLUSIVE, "process 1 has ended"),
    ],
)
def test_a_training_that_fails_is_named(error, outcome, summary):
    verdict = judge_trainings(Scripted(error=error), Options(steps=60))
    assert (verdict.outcome, verdict.summary[: len(summary)]) == (outcome, summary)


def test_nothing_is_trained_without_a_budget():
    verdict = judge_trainings(Scripted(budget=0.0), Options(budget=0.0))
    assert (verdict.outcome, verdict.summary) == (Outcome.INCONCLUSIVE, NOT_BEGUN)
