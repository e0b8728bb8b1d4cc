"""Times two ways to do the same training step, fairly: interleaved, warm, and against the noise of the machine."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runner.compare.ratio import FEWEST_ROUNDS, Effect, Ratio, effect, ratio
from runner.compare.states import clones
from runner.compare.subject import Build
from runner.system.generators import Globals
from runner.system.tree import tensors

BLOCK_SECONDS = 0.1  # as many steps as take so long are a block: long against the clock's and the scheduler's grain
WINDOW_SECONDS = 0.1
STEADY = 0.95
WARM_UP_SECONDS = 20.0
STALLING = 1.1  # by this factor, the whole time and the median of the blocks are apart


@dataclass(frozen=True)
class Stopwatch:
    """Seconds that work takes on a device: by device events on a GPU, by the wall clock on a CPU."""

    device: torch.device

    def seconds(self, work: Callable[[], object]) -> float:
        """Does the work and says how long it took, until the device was done."""
        if self.device.type != "cuda":
            started = time.perf_counter()
            work()
            return time.perf_counter() - started
        with torch.cuda.device(self.device):  # events belong to the current device's stream
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            work()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class WarmUp:
    """What happened until every step took as long as the one before."""

    first_s: float  # wall-clock seconds of the first step alone: compilation, allocation, capture
    seconds: float  # of all steps after the first until it was steady
    steps: int
    steady_s: float  # of one step in the end
    steady: bool  # whether it was steady before the time was over

    @property
    def overhead_s(self) -> float:
        """Seconds spent beyond what as many steady steps take."""
        return max(0.0, self.first_s + self.seconds - (self.steps + 1) * self.steady_s)


def warm_up(step: Callable[[], object], stopwatch: Stopwatch, limit_s: float = WARM_UP_SECONDS) -> WarmUp:
    """Takes steps until they are steady, or for so many seconds by the wall clock.

    Two windows of a tenth of a second in a row are steady if neither is 5 % faster than the best one before them.
    """
    started = time.perf_counter()
    stopwatch.seconds(step)
    first = time.perf_counter() - started
    windows: list[float] = []
    steady, steps, begun = False, 0, time.perf_counter()
    while not steady and time.perf_counter() - begun < limit_s:
        spent, count = 0.0, 0
        while spent < WINDOW_SECONDS:
            spent, count = spent + stopwatch.seconds(step), count + 1
        windows.append(spent / count)
        steps += count
        steady = len(windows) > 2 and min(windows[-2:]) > STEADY * min(windows[:-2])
    return WarmUp(first, time.perf_counter() - begun, steps, windows[-1] if windows else first, steady)


@dataclass(frozen=True)
class Timing:
    """How long two subjects take, and how sure that is."""

    ratio: Ratio  # baseline / changed: above 1, the change is faster
    a_a: Ratio  # the baseline's even blocks against its odd ones: what the machine makes of no change at all
    total: float  # the ratio of all the time that both took: a step that stalls now and then shows here alone
    baseline_ms: float  # of one step: the median over blocks
    changed_ms: float
    baseline_warm_up: WarmUp
    changed_warm_up: WarmUp

    @property
    def effect(self) -> Effect:
        """Faster, slower, or unclear: not beyond the noise of the machine."""
        return effect(self.ratio, self.a_a)

    def __str__(self) -> str:
        apart = not 1 / STALLING < self.total / self.ratio.value < STALLING
        return (
            f"{self.effect}: {self.ratio}, {f'but {self.total:.2f}x in all, for some stall, ' if apart else ''}"
            f"{self.baseline_ms:.3g} ms -> {self.changed_ms:.3g} ms a step in "
            f"{self.ratio.rounds} rounds; A/A {self.a_a}; first step {self.baseline_warm_up.first_s:.3g} s -> "
            f"{self.changed_warm_up.first_s:.3g} s"
        )


def clock(baseline: Build, changed: Build, batches: Sequence[Any], rounds: int = 30, seconds: float = 30.0) -> Timing:
    """Times a change against its baseline in this process.

    After the first call of each, and its warm-up, blocks of steps are timed in the order A B B A, so that a machine
    that becomes slower or faster favours neither.

    What it says holds for the two objects that were built here. Where memory lies can make one of two that do the same
    faster by several percent for as long as both live, and rounds do not show that: believe an effect of that size only
    if it is the same in several processes, which is what ``runner ablate`` starts for the stages of a recipe.

    Args:
        baseline: makes what to compare with.
        changed: makes the same with the change.
        batches: what steps are given, again and again; one at least.
        rounds: the most rounds of four blocks; five at least.
        seconds: stop after so many seconds of rounds, but not before five rounds.
    """
    if not batches or rounds < FEWEST_ROUNDS:
        raise ValueError(f"needs a batch at least, and {FEWEST_ROUNDS} rounds")
    a, b = (_Runner(build, batches) for build in (baseline, changed))
    started = time.perf_counter()
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and time.perf_counter() - started > seconds:
            break
        for runner in (a, b, b, a):
            runner.block()
    baseline_ms, changed_ms = (1e3 * statistics.median(each.blocks) for each in (a, b))
    mine, theirs = (list(map(statistics.fmean, zip(it.blocks[::2], it.blocks[1::2], strict=True))) for it in (a, b))
    pair, a_a = ratio(mine, theirs), ratio(a.blocks[::2], a.blocks[1::2])
    return Timing(pair, a_a, sum(a.blocks) / sum(b.blocks), baseline_ms, changed_ms, a.warm_up, b.warm_up)


class _Runner:
    """One subject, warm, with batches and process-wide settings of its own."""

    def __init__(self, build: Build, batches: Sequence[Any]) -> None:
        self.globals, self.batches = Globals(), itertools.cycle(clones(batches))
        with self.globals.apart():
            self.subject = build()
            held = (tensor for part in self.subject.state.values() for tensor in tensors(part.state_dict()))
            self.stopwatch = Stopwatch(next((each.device for each in held if each.is_cuda), torch.device("cpu")))
            self.warm_up = warm_up(self.step, self.stopwatch)
        self.count = max(1, round(BLOCK_SECONDS / self.warm_up.steady_s))
        self.blocks: list[float] = []  # seconds of one step, in the mean over each block; two blocks are a round

    def step(self) -> None:
        self.subject.step(next(self.batches))

    def block(self) -> None:
        """Times a block of steps."""

        def steps() -> None:
            for _ in range(self.count):
                self.step()

        with self.globals.apart():
            self.blocks.append(self.stopwatch.seconds(steps) / self.count)
