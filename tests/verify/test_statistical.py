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
from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome
from runner.system.errors import DivergedError, RunnerError, UsageError
from runner.verify.statistical import affordable, statistical
from runner.verify.time_limit import NOT_BEGUN
from runner.verify.training_pool import Milestone, TrainingOrder, Trainings

MODULE, TRAININGS = (sys.modules[f"runner.verify.{name}"] for name in ("statistical", "training_pool"))
REFERENCE, CHANGED = (TrainingOrder({"seed": 42, "name": name, "train": {}}) for name in ("reference", "changed"))

RECORDER = """
from pathlib import Path
from runner.api import Exact, Stage, StageConfig

class RecorderConfig(StageConfig):
    "Writes down what every update is given."
    kind = "recorder"
    implementation = "Recorder"
    phase = 1
    wraps = frozenset({"update"})

    def contract(self, setting):
        return Exact()

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

    def run(trainings, wanted, length):
        trained.extend(wanted)
        learnt_by = [learnt(each.recipe["name"], seed) for each in trainings for seed in wanted]
        return [Milestone(length, {"return": -100.0}, {"return": -100.0 + sign * gain}, 2, 1) for gain in learnt_by]

    def none_is_over(trainings, wanted, length):
        return False

    trainings = types.SimpleNamespace(run=run, are_over=none_is_over, seconds_left=seconds_left, say=lambda _: None)
    return statistical(REFERENCE, CHANGED, 100, Objective("return", direction), trainings, seeds), trained


def gains(share, spread=0.002):
    """A change that keeps this share of what the reference learns, which itself differs much from seed to seed."""

    def learnt(name, seed):
        own = 1000.0 * (1 + 0.3 * math.sin(7 * seed))
        return own * (share + spread * math.sin(13 * seed)) if name == "changed" else own

    return learnt


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
@pytest.mark.parametrize(
    ("share", "outcome", "pairs"), [(1.0, "PASS", 8), (1.2, "PASS", 8), (0.98, "PASS", 8), (0.85, "FAIL", 8)]
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

    monkeypatch.setattr(TRAININGS, "Child", lambda module, recipe, **settings: Telling(told(100)))
    trainings, objective = Trainings([], math.inf, 100, 20, lambda _: None), Objective("return", "maximize")
    first = statistical(REFERENCE, CHANGED, 100, objective, trainings, 8)
    trainings.budget = -math.inf
    assert statistical(REFERENCE, CHANGED, 100, objective, trainings, 8) == first
    assert first.outcome is Outcome.PASS
    assert statistical(REFERENCE, REFERENCE._replace(batch_size=4), 100, objective, trainings, 8).summary == NOT_BEGUN


class Timed:
    """Trainings that take so many seconds until their first update is over, and so many for 100 steps after that.

    By a clock of their own, on two cores; the first of a kind compiles for a minute.
    """

    def __init__(self, start, growing, budget):
        self.start, self.growing, self.budget, self.seconds_left = start, growing, budget, budget
        self.told, self.said = {}, []
        self.length, self.every, self.most_running = 100, 20, 2
        self.say = self.said.append

    def seconds(self, steps, first=False):
        return self.start + steps * self.growing / 100 + 60.0 * first

    def train(self, name, seed, steps):
        first = not any(kind == name for kind, _ in self.told)
        growing = steps * self.growing / 100
        self.told[name, seed] = Milestone(steps, {}, {}, self.seconds(steps, first), growing)
        self.seconds_left -= self.seconds(steps, first) / 2

    def run(self, orders, seeds, length):
        for name, seed in ((order.recipe["name"], seed) for order in orders for seed in seeds):
            if (name, seed) not in self.told:
                self.train(name, seed, length)

    def newest(self, order, seeds):
        found = ((order.recipe["name"], seed) for seed in seeds)
        return [self.told[each] for each in found if each in self.told]

    def left(self, steps, changes):
        """Seconds for trainings of this length that are not over yet, by the seconds of those that compile nothing."""
        open_seconds = 8 * (1 + changes) * self.seconds(steps)
        return (open_seconds - sum(self.seconds(min(steps, each.done)) for each in self.told.values())) / 2


def length_of(trainings, changes=1):
    return affordable(REFERENCE, CHANGED, "updates", 8, changes, trainings)


@given(
    start=st.floats(1, 1e3),
    growing=st.floats(1, 1e4),
    budget=st.floats(0, 1e6),
    changes=st.integers(1, 4),
    ahead=st.lists(st.sampled_from([20, 40, 60, 80, 100]), min_size=4, max_size=8).map(lambda each: sorted(each)[::-1]),
)
def test_trainings_are_as_long_as_the_budget_has_room_for(start, growing, budget, changes, ahead):
    trainings = Timed(start, growing, budget)
    for number, steps in enumerate(ahead):
        trainings.train(("reference", "changed")[number % 2], 43 + number // 2, steps)
    steps = length_of(trainings, changes)
    assert steps in (20, 40, 60, 80, 100)
    spare = 0.9 * trainings.seconds_left
    assert steps == 20 or trainings.left(steps, changes) <= spare + 1e-6 * budget
    assert steps == 100 or trainings.left(steps + 20, changes) > spare - 1e-6 * budget
    assert bool(trainings.said) is (steps < 100)


def test_where_nothing_was_trained_yet_a_fifth_of_one_pair_says_what_trainings_cost():
    trainings = Timed(10.0, 100.0, 1e6)
    assert length_of(trainings) == 100
    assert {each: told.done for each, told in trainings.told.items()} == {("reference", 43): 20, ("changed", 43): 20}


def test_a_budget_that_is_said_to_be_enough_is():
    trainings = Timed(50.0, 150.0, 1000.0)
    assert length_of(trainings) < 100
    (enough,) = re.findall(r"--budget (\d+) for all 100", trainings.said[0])
    assert length_of(Timed(50.0, 150.0, float(enough))) == 100
    assert length_of(Timed(50.0, 150.0, float(enough) - 61)) < 100


@pytest.mark.parametrize(("budget", "length"), [(1e6, 100), (650.0, 80)])
def test_trainings_end_where_the_budget_is_over_and_none_is_trained_twice(budget, length, monkeypatch):
    """What has gone further counts where the others end, and so does what is trained when that is decided."""
    ended = []

    class Learning(Telling):
        def __init__(self, recipe):
            every = recipe["train"]["evaluate_every"]
            super().__init__(*map(told, dict.fromkeys([*range(every, 100, every), 100])))
            self.recipe = recipe

        def __exit__(self, *_):
            ended.append((self.recipe["name"], self.recipe["seed"], self.done))

    monkeypatch.setattr(TRAININGS, "Child", lambda module, recipe, **settings: Learning(recipe))
    monkeypatch.setattr(MODULE, "_cost", lambda known, steps: steps)  # 622 seconds for 80 of 100 steps, on two cores
    monkeypatch.setattr(TRAININGS, "usable_cores", lambda: 2)
    trainings = Trainings([], budget, 100, 20, lambda _: None)
    trainings.run([REFERENCE, CHANGED], [43], 100)
    trainings.end_at(affordable(REFERENCE, CHANGED, "updates", 8, 1, trainings))
    verdict = statistical(REFERENCE, CHANGED, trainings.length, Objective("return", "maximize"), trainings, 8)
    assert trainings.length == length
    assert verdict.outcome is Outcome.PASS
    assert len(verdict.evidence["values"]) == 8
    assert {each for each in ended if each[1] == 43} == {("reference", 43, 100), ("changed", 43, 100)}
    assert sorted(each[:2] for each in ended) == [(name, n) for name in ("changed", "reference") for n in range(43, 51)]
    assert {each[2] for each in ended if each[1] > 43} == {length}


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
        return Telling(told(100))

    monkeypatch.setattr(TRAININGS, "Child", child)
    trainings = Trainings([], math.inf, 100, 20, lambda _: None)
    with pytest.raises(RunnerError, match="in its own words") as caught:
        trainings.run([REFERENCE, CHANGED], [1], 100)
    assert type(caught.value) is expected


def test_a_training_that_ends_too_soon_is_an_error(monkeypatch):
    monkeypatch.setattr(TRAININGS, "Child", lambda module, recipe, **settings: Telling(told(20), told(40)))
    with pytest.raises(RunnerError, match="ended before it was evaluated at 60"):
        Trainings([], math.inf, 100, 20, lambda _: None).run([REFERENCE], [1], 60)


def test_what_was_begun_leaves_cores_to_others_and_is_not_trained_again(monkeypatch):
    begun, ended, free = [], Event(), Event()

    class Waiting(Telling):
        def receive(self, stop):
            while not free.wait(0.01):
                if stop():
                    ended.set()
                    raise ChildError(Cause.STOPPED, "it was stopped")
            return super().receive(stop)

    def child(module, recipe, **settings):
        begun.append((recipe["name"], recipe["seed"]))
        return Waiting(told(100))

    monkeypatch.setattr(TRAININGS, "Child", child)
    monkeypatch.setattr(TRAININGS, "usable_cores", lambda: 3)
    with Trainings([], math.inf, 100, 20, lambda _: None) as trainings:
        with trainings.reserve_cores(2):
            trainings.begin([REFERENCE, CHANGED], [43, 44])
            free.wait(0.1)
            assert begun == [("reference", 43)]
            with trainings.reserve_cores(0):  # the others do not wait for the first
                until = time.monotonic() + 10
                while len(begun) < 3 and time.monotonic() < until:
                    free.wait(0.01)
            assert len(begun) == 3
        free.set()
        trainings.run([REFERENCE, CHANGED], [43, 44], 100)
        assert sorted(begun) == [(name, seed) for name in ("changed", "reference") for seed in (43, 44)]
        free.clear()
        trainings.begin([REFERENCE], [45])
        while ("reference", 45) not in begun:
            free.wait(0.01)
    assert ended.wait(10)
    assert not trainings.are_over([REFERENCE], [45], 100)


def told(done):
    """What a training tells that learns 1,000 until its end, which is at 100."""
    metrics = {"return": 10.0 * done}
    return {
        "done": done,
        "initial": {"return": 0.0},
        "metrics": metrics,
        "growing_seconds": 1.0 * done,
        "peak_bytes": 1,
    }


class Telling(contextlib.nullcontext):
    """A child process that trains: it tells one thing after the other, and has ended then."""

    def __init__(self, *telling):
        self.telling = list(telling)
        self.done = 0

    def __enter__(self):
        return self

    def receive(self, stop):
        if not self.telling:
            return None
        self.done = self.telling[0]["done"]
        return self.telling.pop(0)


def test_a_margin_may_have_a_unit():
    def learnt(name, seed):
        return 1000.0 + seed % 3 - (2.0 if name == "changed" else 0.0)

    in_points = Objective("return", "maximize", margin=5.0, unit="points")
    strict = Objective("return", "maximize", margin=1.0, unit="points")

    def run(trainings, wanted, length):
        learnt_by = [learnt(each.recipe["name"], seed) for each in trainings for seed in wanted]
        return [Milestone(length, {"return": 0.0}, {"return": gain}, 2, 1) for gain in learnt_by]

    trainings = types.SimpleNamespace(run=run, seconds_left=math.inf, say=lambda _: None)
    assert statistical(REFERENCE, CHANGED, 100, in_points, trainings, 8).outcome is Outcome.PASS
    assert statistical(REFERENCE, CHANGED, 100, strict, trainings, 8).outcome is Outcome.FAIL


def test_a_batch_size_that_a_stage_has_chosen_goes_beside_the_recipe(tmp_path):
    """It is trained with, and what the recipe says of its batches (updates for each step of a simulation) stays."""
    plugin = tmp_path / "recorder.py"
    plugin.write_text(RECORDER)
    recipe = tiny("marl_baseline", "optimization.recorder=on", registry=Registry([plugin]))
    length, values = recipe.length[1], recipe.values(masked=False)
    order, other = TrainingOrder(values), TrainingOrder(values, 4)
    trainings = Trainings([plugin], math.inf, length, length, lambda _: None)
    trainings.run([order, other], [1], length)
    lines = plugin.with_suffix(".txt").read_text().splitlines()
    updates = Counter(tuple(map(int, line.split())) for line in lines)
    assert set(updates) == {(16, 16), (16, 4)}
    assert updates[16, 4] == pytest.approx(4 * updates[16, 16], abs=4)


@pytest.mark.parametrize("name", ["marl_phase2", "digits_classifier", "shakespeare_gpt"])
def test_evaluations_on_the_way_say_how_far_it_is_and_change_nothing(name):
    recipe = tiny(name)
    length, order = recipe.length[1], TrainingOrder(recipe.values(masked=False))
    half = math.ceil(length / 2)
    alone, often = (Trainings([], math.inf, length, every, lambda _: None) for every in (length, half))
    (end,), (other_end,) = (each.run([order], [1], length) for each in (alone, often))
    assert (end.done, end.initial, end.metrics) == (other_end.done, other_end.initial, other_end.metrics)
    assert 0 < end.growing_seconds < end.seconds
    assert often.are_over([order], [1], half)
    (middle,) = often.run([order], [1], half)
    assert half <= middle.done < length
    assert middle.initial == end.initial
    often.end_at(half)
    (ended,) = often.run([order], [2], half)
    assert ended.done < length
    assert not often.are_over([order], [2], length)


@pytest.mark.parametrize(("gigabytes", "most"), [(1, 6), (3, 3), (4, 2), (9, 1), (20, 1)])
def test_no_more_trainings_run_than_fit_into_memory(gigabytes, most, monkeypatch):
    """The first one that is evaluated shows what each takes; those that run already go on."""
    running, largest, said = [], [], []
    first = Event()

    class Large(Telling):
        def receive(self, stop):
            if self.recipe["seed"] != 1:
                assert first.wait(10)
                running.append(self.recipe["seed"])
                largest.append(len(running))
                time.sleep(0.02)
                running.remove(self.recipe["seed"])
            message = super().receive(stop)
            return message and message | {"peak_bytes": gigabytes * 10**9}

        def __exit__(self, *_):
            if self.recipe["seed"] == 1:
                first.set()

    def child(module, recipe, **settings):
        training = Large(told(100))
        training.recipe = recipe
        return training

    monkeypatch.setattr(TRAININGS, "Child", child)
    monkeypatch.setattr(TRAININGS, "usable_cores", lambda: 6)
    with Trainings([], math.inf, 100, 100, said.append, free_memory=lambda: 9_100_000_000) as trainings:
        trainings.run([REFERENCE], [1], 100)
        assert trainings.most_running == most
        trainings.run([REFERENCE], range(2, 20), 100)
    assert max(largest) <= most
    assert any(f"at most {most} run at the same time" in line for line in said) == (most < 6)
