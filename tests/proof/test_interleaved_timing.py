import itertools
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from runner.proof.interleaved_timing import clock
from runner.proof.ratios import Effect
from runner.proof.subject import Subject
from runner.proof.warm_up import warm_up
from runner.system.stopwatch import Stopwatch

CPU = torch.device("cpu")
MODULE = sys.modules["runner.proof.interleaved_timing"]  # the package has a function of that name


@dataclass
class Script:
    """A clock that shows what a test wants: every step takes the next of these seconds, the last one for ever."""

    durations: list[float]
    now: float = 0.0
    calls: list[str] = field(default_factory=list)

    def perf_counter(self):
        return self.now

    def step(self, *_):
        self.now += self.durations.pop(0) if len(self.durations) > 1 else self.durations[0]


@pytest.fixture
def scripted(monkeypatch):
    def use(durations):
        script = Script(durations)
        monkeypatch.setattr(MODULE.time, "perf_counter", script.perf_counter)
        return script

    return use


@pytest.fixture
def short_blocks(monkeypatch):
    """What is timed are moments: how long they are is no matter of these tests."""
    monkeypatch.setattr(MODULE, "BLOCK_SECONDS", 0.005)
    monkeypatch.setattr(sys.modules["runner.proof.warm_up"], "WINDOW_SECONDS", 0.005)


def test_the_first_call_stands_apart_and_warming_up_ends_when_steps_are_no_longer_faster(scripted):
    script = scripted([30.0, 5.0, 3.0, 2.0, 1.0, 0.5, 0.05])
    found = warm_up(script.step, Stopwatch(CPU))
    assert found.first_s == 30.0
    assert found.steady
    assert found.steady_s == pytest.approx(0.05)
    assert found.seconds == pytest.approx(11.5 + 0.05 * (found.steps - 5))
    assert found.overhead_s == pytest.approx(30 + 11.5 - 0.05 * 6, rel=1e-3)


def test_what_never_becomes_steady_ends_with_the_time(scripted):
    script = scripted([1.0 * 0.8**i for i in range(60)] + [1e-6])
    found = warm_up(script.step, Stopwatch(CPU), limit_s=2.0)
    assert not found.steady
    assert found.seconds == pytest.approx(2.0, rel=0.6)


def test_blocks_take_turns_and_a_machine_that_becomes_slower_favours_none(scripted, monkeypatch):
    """Every step takes 1 % longer than the one before; the change needs half the time of the baseline at any moment."""
    script = scripted([0.0])
    monkeypatch.setattr(MODULE, "BLOCK_SECONDS", 1e-9)
    speed = [1.0]

    def subject(name, share):
        def step(_):
            script.calls.append(name)
            script.now += share * speed[0]
            speed[0] *= 1.01

        return lambda: Subject(step, {})

    timing = clock(subject("a", 1.0), subject("b", 0.5), [None], rounds=8, seconds=1e9)
    # A block is a step that is not timed and one that is; in the middle, updates are compared.
    assert "".join(script.calls[-104:]) == "aabbbbaabbaaaabbbbbaaabbaa" * 4
    assert timing.ratio.value == pytest.approx(2.0, rel=0.01)
    assert timing.a_a.value == pytest.approx(1 / 1.01**11, rel=0.01)
    assert timing.effect is Effect.FASTER
    assert str(timing).startswith("faster: 2.0")


def test_a_stall_now_and_then_shows_in_the_whole_time_alone(scripted, monkeypatch):
    """The change takes 0.8 of the time, and once in 25 steps 10 seconds more."""
    script = scripted([0.0])
    monkeypatch.setattr(MODULE, "BLOCK_SECONDS", 1e-9)
    steps = itertools.count(1)

    def steady(_):
        script.now += 1.0

    def stalling(_):
        script.now += 0.8 + (10.0 if next(steps) % 25 == 0 else 0.0)

    timing = clock(lambda: Subject(steady, {}), lambda: Subject(stalling, {}), [None], rounds=25, seconds=1e9)
    assert timing.ratio.value == pytest.approx(1 / 0.8)
    assert timing.total == pytest.approx(1 / (0.8 + 10 / 25), rel=0.2)
    assert f"but {timing.total:.2f}x in all, for some stall" in str(timing)
    assert "stall" not in str(clock(*[lambda: Subject(steady, {})] * 2, [None], rounds=5))


def test_no_step_gets_the_batch_of_another_and_rounds_end_with_the_time(scripted):
    script = scripted([1.0])
    seen = []

    def step(batch):
        seen.append(batch)
        script.step()

    letters = (f"{number:x}" for number in itertools.count())
    timing = clock(lambda: Subject(step, {}), lambda: Subject(step, {}), letters, rounds=1000, seconds=40.0)
    compared = {batch: count for batch, count in Counter(seen).items() if count > 1}
    assert set(compared.values()) == {2}  # which both get
    assert len(compared) == timing.compared
    assert 3 <= timing.ratio.rounds <= 12
    assert timing.effect is Effect.UNCLEAR


@pytest.mark.usefixtures("short_blocks")
def test_real_steps_of_a_module_are_timed():
    def build():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        return Subject(lambda batch: model(batch), {"model": model})

    timing = clock(build, build, [torch.ones(2, 4)], rounds=5, seconds=0.0)
    assert timing.ratio.rounds == 5
    assert 0 < timing.baseline_ms < 1e3


def test_nothing_to_time_is_refused():
    build = lambda: Subject(lambda _: None, {})  # noqa: E731
    with pytest.raises(ValueError, match="batches: there is none"):
        clock(build, build, [])
    with pytest.raises(ValueError, match="rounds"):
        clock(build, build, [1], rounds=4)


def test_a_stopwatch_waits_for_the_work():
    assert Stopwatch(CPU).seconds(lambda: time.sleep(0.02)) >= 0.02


@pytest.mark.usefixtures("short_blocks")
def test_what_the_change_sets_for_the_process_stays_with_the_change():
    seen = {"baseline": set(), "changed": set()}

    def build(name, precision=None):
        if precision:
            torch.set_float32_matmul_precision(precision)

        def step(batch):
            seen[name].add(torch.get_float32_matmul_precision())
            assert batch.max() < 2  # a step that writes over its batch harms no other
            batch.add_(2)

        return Subject(step, {})

    given = torch.tensor([0.5, 1.0])
    clock(lambda: build("baseline"), lambda: build("changed", "medium"), [given], rounds=5, seconds=0.0)
    assert seen == {"baseline": {"highest"}, "changed": {"medium"}}
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.equal(given, torch.tensor([0.5, 1.0]))


def test_the_random_numbers_of_the_calling_program_stay(short_blocks):
    weight = torch.nn.Linear(3, 3)

    def build():
        return Subject(lambda batch: {"loss": weight(torch.rand(2, 3)).sum().detach()}, {"weight": weight})

    batches = [torch.rand(2, 3) for _ in range(8)]
    before = torch.get_rng_state(), random.getstate()
    clock(build, build, batches, rounds=5)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
