"""What whole trainings say, with trainings that take no time."""

import contextlib
import math
import re
import sys
import time
import types
from collections import Counter
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import tiny

from runner.api import Objective
from runner.child.spawn import Cause, ChildError
from runner.compare.verdict import Outcome
from runner.plugin.registry import Registry
from runner.system.errors import DivergedError, RunnerError, UsageError
from runner.verify.statistical import NOT_BEGUN, TrainingOrder, Trainings, affordable, statistical

MODULE = sys.modules["runner.verify.statistical"]
REFERENCE, CHANGED = TrainingOrder({"seed": 42, "name": "reference"}), TrainingOrder({"seed": 42, "name": "changed"})

RECORDER = """
from pathlib import Path
from runner.api import Exact, Stage, StageConfig

class RecorderConfig(StageConfig):
    "Writes down what every update is given."
    kind = "recorder"
    phase = 1
    wraps = frozenset({"update"})

    def contract(self, setting):
        return Exact()

    def implementation(self):
        return Recorder

class Recorder(Stage):
    def attach(self, pipeline):
        def recorded(step):
            def update(batch, *rest):
                with Path(__file__).with_suffix(".txt").open("a") as file:
                    file.write(f"{pipeline.learner.context.batch_size} {len(batch['reward'])}\\n")
                return step(batch, *rest)
            return update
        pipeline.slots.wrap("update", recorded)
"""


def judged(learnt, seconds_left=math.inf, direction="maximize", seeds=8):
    """The verdict if ``learnt(name, seed)`` is what a training learns, and how many pairs it took."""
    sign = 1 if direction == "maximize" else -1
    trained = []

    def run(trainings, wanted):
        trained.extend(wanted)
        return [
            {"before": {"return": -100.0}, "after": {"return": -100.0 + sign * learnt(each.recipe["name"], seed)}}
            for each in trainings
            for seed in wanted
        ]

    def none_is_over(trainings, wanted):
        return False

    trainings = types.SimpleNamespace(run=run, are_over=none_is_over, seconds_left=seconds_left, say=lambda _: None)
    return statistical(REFERENCE, CHANGED, Objective("return", direction), trainings, seeds), trained


def gains(share, spread=0.002):
    """A change that keeps this share of what the reference learns, which itself differs much from seed to seed."""

    def learnt(name, seed):
        own = 1000.0 * (1 + 0.3 * math.sin(7 * seed))
        return own * (share + spread * math.sin(13 * seed)) if name == "changed" else own

    return learnt


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
@pytest.mark.parametrize(
    ("share", "outcome", "pairs"), [(1.0, "PASS", 8), (1.2, "PASS", 8), (0.98, "PASS", 8), (0.85, "FAIL", 5)]
)
def test_it_is_clear_after_few_seeds_that_differ_from_the_recipes_own(share, outcome, pairs, direction):
    verdict, trained = judged(gains(share), direction=direction, seeds=20)
    assert verdict.outcome is Outcome(outcome)
    assert trained == list(range(43, 43 + pairs))
    assert verdict.evidence["metric"] == "return"


def test_what_noise_hides_is_inconclusive():
    verdict, trained = judged(lambda name, seed: 1000.0 + (seed % 2 * 400 - 250 if name == "changed" else 0))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert trained == list(range(43, 51))


def test_a_training_that_collapses_with_the_change_alone_is_no_pass_and_is_told():
    verdict, trained = judged(lambda name, seed: 400.0 if (name, seed) == ("changed", 46) else 1000.0 + seed)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert trained == list(range(43, 51))
    assert verdict.evidence["collapses"] == 1
    assert "1 of 8 lost 5" in verdict.summary
    verdict, _ = judged(lambda name, seed: 400.0 if seed == 46 else 1000.0 + seed)
    assert verdict.outcome is Outcome.PASS
    assert "fewer than 1 in 3.2 do, with 95%" in verdict.summary


def test_a_reference_that_learns_nothing_judges_nobody():
    verdict, _ = judged(lambda name, seed: -5.0 + seed / 100)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "the reference learns nothing: return does not improve" in verdict.summary


def test_nothing_is_begun_once_the_budget_is_spent():
    verdict, trained = judged(gains(1.0), seconds_left=-1.0)
    assert (verdict.outcome, verdict.summary, trained) == (Outcome.INCONCLUSIVE, NOT_BEGUN, [])


def test_what_was_trained_within_the_budget_is_judged_after_it(monkeypatch):
    """A stage and the whole recipe may want the same trainings, and the first of them may use the budget up."""

    class Learning(Answering):
        def answer(self, *_):
            return {"before": {"return": 0.0}, "after": {"return": 1000.0}}

    monkeypatch.setattr(MODULE, "Child", lambda module, recipe, **settings: Learning())
    trainings, objective = Trainings([], math.inf, lambda _: None), Objective("return", "maximize")
    first = statistical(REFERENCE, CHANGED, objective, trainings, 8)
    trainings.budget = -math.inf
    assert statistical(REFERENCE, CHANGED, objective, trainings, 8) == first
    assert first.outcome is Outcome.PASS
    assert statistical(REFERENCE, REFERENCE._replace(batch_size=4), objective, trainings, 8).summary == NOT_BEGUN


def timed(whole, updating, budget, cores=2):
    """Trainings of length 100 take so many seconds, of which so many grow with it; by a clock of their own."""

    def run(orders, seeds):
        share = orders[0].recipe["train"]["updates"] / 100
        seconds = {"whole_seconds": whole + (share - 1) * updating, "updating_seconds": share * updating}
        trainings.seconds_left -= sum(seconds["whole_seconds"] for _ in orders for _ in seeds) / cores
        return [seconds for _ in orders for _ in seeds]

    trainings = types.SimpleNamespace(
        run=run, seconds_left=budget, budget=budget, said=[], are_over=lambda *_: False, give_up=lambda: None
    )
    trainings.say = trainings.said.append
    return trainings


def length_of(trainings, changes=1):
    orders = (order._replace(recipe={**order.recipe, "train": {"updates": 100}}) for order in (REFERENCE, CHANGED))
    return affordable(*orders, "updates", 100, 8, changes, trainings)


@given(
    whole=st.floats(1, 1e4),
    share=st.floats(0.01, 0.99),
    budget=st.floats(0, 1e6),
    changes=st.integers(1, 4),
)
def test_trainings_are_as_long_as_the_budget_has_room_for(whole, share, budget, changes):
    trainings = timed(whole, share * whole, budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "usable_cores", lambda: 2)
        steps = length_of(trainings, changes)
    needed = (whole + (steps / 100 - 1) * share * whole) * 8 * (1 + changes) / 2
    longer = needed + share * whole / 100 * 8 * (1 + changes) / 2
    assert 10 <= steps <= 100
    assert steps == 10 or needed <= 0.9 * trainings.seconds_left * (1 + 1e-9)
    assert steps == 100 or longer > 0.9 * trainings.seconds_left * (1 - 1e-9)
    assert bool(trainings.said) is (steps < 100)


def test_a_budget_that_is_said_to_be_enough_is(monkeypatch):
    monkeypatch.setattr(MODULE, "usable_cores", lambda: 2)
    trainings = timed(200.0, 150.0, 1000.0)
    assert length_of(trainings) < 100
    (enough,) = re.findall(r"--budget (\d+) for all 100", trainings.said[0])
    assert length_of(timed(200.0, 150.0, float(enough))) == 100
    assert length_of(timed(200.0, 150.0, float(enough) - 61)) < 100


def test_a_pilot_of_the_shortest_length_is_not_trained_again(monkeypatch):
    begun = []

    class Learning(Answering):
        def answer(self, *_):
            return {"before": {"return": 0.0}, "after": {"return": 1000.0}, "updating_seconds": 100.0}

    def child(module, recipe, **settings):
        begun.append((recipe["name"], recipe["seed"], recipe["train"]["updates"]))
        return Learning()

    monkeypatch.setattr(MODULE, "Child", child)
    orders = [order._replace(recipe={**order.recipe, "train": {"updates": 100}}) for order in (REFERENCE, CHANGED)]
    trainings = Trainings([], 60.0, lambda _: None)
    steps = affordable(*orders, "updates", 100, 8, 1, trainings)
    shorter = (order.of_length("updates", steps) for order in orders)
    assert statistical(*shorter, Objective("return", "maximize"), trainings, 8).outcome is Outcome.PASS
    assert steps == 10
    assert sorted(begun) == [(name, seed, 10) for name in ("changed", "reference") for seed in range(43, 51)]


@pytest.mark.parametrize(
    ("cause", "may_diverge", "expected"),
    [
        (Cause.DIVERGED, True, DivergedError),
        (Cause.DIVERGED, False, RunnerError),
        (Cause.INVALID, False, UsageError),
        (Cause.CRASHED, False, RunnerError),
    ],
)
def test_a_training_that_fails_says_why(cause, may_diverge, expected, monkeypatch):
    def child(module, recipe, **settings):
        if (recipe["name"] == "changed") is may_diverge:
            raise ChildError(cause, "in its own words")
        return Answering()

    monkeypatch.setattr(MODULE, "Child", child)
    trainings = Trainings([], math.inf, lambda _: None)
    with pytest.raises(RunnerError, match="in its own words") as caught:
        trainings.run([REFERENCE, CHANGED], [1])
    assert type(caught.value) is expected


def test_what_was_begun_leaves_cores_to_others_and_is_not_trained_again(monkeypatch):
    begun, ended, free = [], Event(), Event()

    class Waiting(Answering):
        def answer(self, timeout, stop):
            while not free.wait(0.01):
                if stop():
                    ended.set()
                    raise ChildError(Cause.STOPPED, "it was stopped")
            return {}

    def child(module, recipe, **settings):
        begun.append((recipe["name"], recipe["seed"]))
        return Waiting()

    monkeypatch.setattr(MODULE, "Child", child)
    monkeypatch.setattr(MODULE, "usable_cores", lambda: 3)
    with Trainings([], math.inf, lambda _: None) as trainings:
        with trainings.beside(2):
            trainings.begin([REFERENCE, CHANGED], [43, 44])
            free.wait(0.1)
            assert begun == [("reference", 43)]
            with trainings.beside(0):  # the others do not wait for the first
                until = time.monotonic() + 10
                while len(begun) < 3 and time.monotonic() < until:
                    free.wait(0.01)
            assert len(begun) == 3
        free.set()
        trainings.run([REFERENCE, CHANGED], [43, 44])
        assert sorted(begun) == [(name, seed) for name in ("changed", "reference") for seed in (43, 44)]
        free.clear()
        trainings.begin([REFERENCE], [45])
        while ("reference", 45) not in begun:
            free.wait(0.01)
    assert ended.wait(10)
    assert not trainings.are_over([REFERENCE], [45])


class Answering(contextlib.nullcontext):
    """A child process that has trained."""

    def __enter__(self):
        return self

    def answer(self, *_):
        return {}


def test_a_margin_may_have_a_unit():
    def learnt(name, seed):
        return 1000.0 + seed % 3 - (2.0 if name == "changed" else 0.0)

    in_points = Objective("return", "maximize", margin=5.0, unit="points")
    strict = Objective("return", "maximize", margin=1.0, unit="points")

    def run(trainings, wanted):
        return [
            {"before": {"return": 0.0}, "after": {"return": learnt(each.recipe["name"], seed)}}
            for each in trainings
            for seed in wanted
        ]

    trainings = types.SimpleNamespace(run=run, seconds_left=math.inf, say=lambda _: None)
    assert statistical(REFERENCE, CHANGED, in_points, trainings, 8).outcome is Outcome.PASS
    assert statistical(REFERENCE, CHANGED, strict, trainings, 8).outcome is Outcome.FAIL


def test_a_batch_size_that_a_stage_has_chosen_goes_beside_the_recipe(tmp_path):
    """It is trained with, and what the recipe says of its batches (updates for each step of a simulation) stays."""
    plugin = tmp_path / "recorder.py"
    plugin.write_text(RECORDER)
    recipe = tiny("marl_baseline", "optimization.recorder=on", registry=Registry([plugin]))
    trainings = Trainings([plugin], math.inf, lambda _: None)
    values = recipe.values(masked=False)
    trainings.run([TrainingOrder(values), TrainingOrder(values, 4)], [1])
    lines = plugin.with_suffix(".txt").read_text().splitlines()
    updates = Counter(tuple(map(int, line.split())) for line in lines)
    assert set(updates) == {(16, 16), (16, 4)}
    assert updates[16, 4] == pytest.approx(4 * updates[16, 16], abs=4)
