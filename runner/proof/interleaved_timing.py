"""Times two implementations of the same training step, interleaved and warm, against the
noise of the machine.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from runner.plugin.contract import Close, Contract
from runner.proof.difference import digest
from runner.proof.fresh_batches import FreshBatches
from runner.proof.ratios import FEWEST_ROUNDS, NO_RATIO, Effect, Ratio, effect, ratio
from runner.proof.subject import Build
from runner.proof.subject_states import load, saved
from runner.proof.timekeeping import (
    LEAST_DEFERRED,
    Timekeepers,
    deferred_seconds,
    read_results,
)
from runner.proof.trees import clones, leaves
from runner.proof.warm_up import WarmUp, warm_up
from runner.proof.windows import UPDATES, Comparison, Window, observe, rounded
from runner.system import generators
from runner.system.generators import Globals
from runner.system.stopwatch import Stopwatch
from runner.system.tensor_trees import nbytes, tensors
from runner.system.text_lines import figure

# Duration of a block of steps: long compared with the resolution of the clock and of the scheduler.
BLOCK_SECONDS = 0.1
# Limits of the time and the memory for the batches of a block.
DRAW_SECONDS = 0.3
BLOCK_BYTES = 2**28
# Update numbers of both differ by a multiple of it, so that periodic work coincides.
PERIOD = 60
# Number of windows that the baseline repeats from a rounded state, and how often.
YARDSTICKS = 2
# Factor between the total ratio and the median of the blocks from which a stall is reported.
STALLING = 1.1


@dataclass(frozen=True)
class Timing:
    """The times of two subjects, with their uncertainty.

    Attributes:
        ratio: Baseline / changed: above 1, the change is faster. Not a number if ``caught``.
        a_a: The baseline's even blocks against its odd ones: the effect of the machine without a
            change.
        total: The ratio of all the time that both took: only here, a step that stalls now and then
            has an effect.
        baseline_ms: Of one step, the median over blocks.
        changed_ms: The same of the change.
        baseline_warm_up: The baseline's steps before it was steady.
        changed_warm_up: The same of the change.
        compared: Number of updates between timed blocks that were compared with the baseline's.
        caught: The change's deviation from the baseline's work, which makes its time meaningless;
            empty if there is none.
        not_compared: The reason why the numbers of the state were not compared; else empty.
    """

    ratio: Ratio
    a_a: Ratio
    total: float
    baseline_ms: float
    changed_ms: float
    baseline_warm_up: WarmUp
    changed_warm_up: WarmUp
    compared: int = 0
    caught: str = ""
    not_compared: str = ""

    @property
    def effect(self) -> Effect:
        """Returns faster, slower, or unclear: not beyond the noise of the machine; invalid if
        something was caught.
        """
        return Effect.INVALID if self.caught else effect(self.ratio, self.a_a)

    def __str__(self) -> str:
        if self.caught:
            reason = "the change does other work than the baseline, so it has no ratio"
            return f"{self.effect}: {reason}: {self.caught}"
        stalls = not 1 / STALLING < self.total / self.ratio.value < STALLING
        stall = f"but {self.total:.2f}x in all, for some stall, " if stalls else ""
        baseline_ms = figure(self.baseline_ms, 3)
        changed_ms = figure(self.changed_ms, 3)
        baseline_first_s = figure(self.baseline_warm_up.first_s, 3)
        changed_first_s = figure(self.changed_warm_up.first_s, 3)
        return (
            f"{self.effect}: {self.ratio}, {stall}{baseline_ms} ms -> {changed_ms} ms a step in "
            f"{self.ratio.rounds} rounds; A/A {self.a_a}; first step {baseline_first_s} s -> "
            f"{changed_first_s} s"
        )


@generators.restored()
def clock(
    baseline: Build,
    changed: Build,
    batches: Sequence[Any] | Iterable[Any] | Callable[[], Any] | FreshBatches,
    rounds: int = 30,
    seconds: float = 30.0,
    contract: Contract = Close(),  # noqa: B008 (it is frozen)
) -> Timing:
    """Times a change against its baseline in this process.

    After the first call of each, and its warm-up, blocks of steps are timed in the order A B B A,
    so that a machine that becomes slower or faster favours neither. No step gets a batch that
    another one has had: to remember one gains nothing (``FreshBatches`` describes how further
    batches are made from those given).

    Work that is finished only when a state or a result is read counts as time of the block before.
    A change that replaces a function by which time is measured has no ratio.

    In the middle of every round, between timed blocks, a few updates are compared: the baseline is
    given the state of the change, both make the same updates with the same seeds, and the state has
    to change by the same, as far as rounding to 16 bits and other random numbers allow. A change
    that skips updates or returns earlier results has no ratio: ``Timing.caught`` describes what it
    did.

    The ratio holds for the two objects that were built here. Where memory lies can make one of two
    identical objects faster by several percent for as long as both live, and rounds do not show
    that: believe an effect of that size only if it is the same in several processes, which is what
    ``runner ablate`` starts for the stages of a recipe.

    The random generators of the process are restored afterwards.

    Args:
        baseline: Makes the subject without the change.
        changed: Makes the same subject with the change.
        batches: Batches for the steps; an iterable or iterator of them (a loader); or a function
            that returns a new one at each call. ``None`` as a batch is passed to every step.
        rounds: The largest number of rounds of four blocks; at least five.
        seconds: Stops after the given seconds of rounds, but not before five rounds.
        contract: The promise of the change. Updates of a ``Statistical`` one may differ, but must
            not be fewer.

    Raises:
        ValueError: There is no batch, fewer than five rounds, or no further batch can
            be made from those given.
    """
    if rounds < FEWEST_ROUNDS:
        raise ValueError(f"rounds: {rounds} is less than the fewest, {FEWEST_ROUNDS}")
    fresh = batches if isinstance(batches, FreshBatches) else FreshBatches(batches)
    timekeepers = Timekeepers()
    a = _Runner(baseline, fresh, timekeepers)
    b = _Runner(changed, fresh, timekeepers)
    _align(a, b)
    a.count = b.count = _block_length(a, b, fresh)
    compared = _Compared(a, b, fresh, contract)
    started = time.perf_counter()
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and time.perf_counter() - started > seconds:
            break
        a.block()
        b.block()
        compared.add_window(number)
        b.block()
        a.block()
    return _timing(a, b, compared)


def _timing(a: _Runner, b: _Runner, compared: _Compared) -> Timing:
    """Returns the result of all blocks and comparisons."""
    caught = b.timekeepers.fault or compared.fault()
    if caught:
        measured = NO_RATIO
        total = math.nan
    else:
        measured = ratio(a.round_seconds(), b.round_seconds())
        total = sum(a.blocks) / sum(b.blocks)
    return Timing(
        ratio=measured,
        a_a=ratio(a.blocks[::2], a.blocks[1::2]),
        total=total,
        baseline_ms=1e3 * statistics.median(a.blocks),
        changed_ms=1e3 * statistics.median(b.blocks),
        baseline_warm_up=a.warm_up,
        changed_warm_up=b.warm_up,
        compared=compared.comparison.updates,
        caught=caught or "",
        not_compared=compared.reason,
    )


class _Runner:
    """A subject after its warm-up, with separate global settings.

    Attributes:
        updates: Number of updates that it has made.
        count: Number of steps in a block.
        blocks: Seconds of one step, in the mean over each block; two blocks are a round.
        trains: Whether its state changes.
    """

    def __init__(
        self, build: Build, fresh: FreshBatches, timekeepers: Timekeepers
    ) -> None:
        self.globals = Globals()
        self.fresh = fresh
        self.timekeepers = timekeepers
        self.updates = 0
        self.count = 1
        self.blocks: list[float] = []
        # The batches of the last blocks stay in memory: another one at the same address would look
        # like a repetition.
        self.recent: deque[list[Any]] = deque(maxlen=2)
        self._next: Any = None
        with self.globals.apart():
            self.subject = build()
            initial = self._digest()
            self.stopwatch = Stopwatch(self._device())
            steps = warm_up(self._step_next, self.stopwatch, prepare=self._draw_next)
            self.warm_up = self._with_deferred(steps)
            fresh.probe(self._step)
            self.trains = self._digest() != initial

    def _device(self) -> torch.device:
        """Returns the GPU of the state, if any of it is on one."""
        for stateful in self.subject.state.values():
            for tensor in tensors(stateful.state_dict()):
                if tensor.is_cuda:
                    return tensor.device
        return torch.device("cpu")

    def round_seconds(self) -> list[float]:
        """Returns the seconds of one step in each round."""
        pairs = zip(self.blocks[::2], self.blocks[1::2], strict=True)
        return [statistics.fmean(pair) for pair in pairs]

    def block(self) -> None:
        """Times a block of steps, after one that is not timed."""
        batches = [self.fresh.draw() for _ in range(self.count)]
        self.recent.append(batches)

        outputs: deque[Any] = deque(maxlen=1)

        def steps() -> None:
            for batch in batches:
                outputs.append(self.subject.step(batch))

        with self.globals.apart():
            self.stopwatch.seconds(self._settle)
            read_results(self.subject)
            seconds = self.stopwatch.seconds(steps)
            self.timekeepers.check()
            deferred = deferred_seconds(self.stopwatch, self.subject, outputs[0])
        if deferred > LEAST_DEFERRED * seconds:
            seconds += deferred
        self.blocks.append(seconds / self.count)
        self.updates += self.count

    def advance(self, count: int) -> None:
        """Makes steps that are not timed."""
        with self.globals.apart():
            for _ in range(count):
                self._draw_next()
                self._step_next()

    def window(self, batches: Sequence[Any], number: int) -> Window:
        """Makes updates with copies of these batches and with the random numbers of that number."""
        copies = clones(list(batches))
        with self.globals.apart():
            generators.seed(number)
            steps = [partial(self._seeded_step, batch, number) for batch in copies]
            window = observe(self._state, steps)
        self.recent.append(copies)
        return window

    def state(self) -> dict[str, Any]:
        """Returns a copy of the state."""
        with self.globals.apart():
            return saved(self.subject)

    def load(self, state: dict[str, Any]) -> None:
        """Gives the subject another state."""
        with self.globals.apart():
            load(self.subject, state)

    def _state(self) -> dict[str, Any]:
        return {name: value.state_dict() for name, value in self.subject.state.items()}

    def _digest(self) -> list[bytes]:
        return [digest(value) for _, value in leaves(self._state())]

    def _with_deferred(self, steps: WarmUp) -> WarmUp:
        """Adds the time of work that the steps have deferred."""
        count = steps.steps + 1
        deferred = deferred_seconds(self.stopwatch, self.subject, None) / count
        if deferred > LEAST_DEFERRED * steps.steady_s:
            return replace(steps, steady_s=steps.steady_s + deferred)
        return steps

    def _settle(self) -> None:
        # Copies of states leave caches cold, and the first step after them is slower.
        self._draw_next()
        self._step_next()

    def _draw_next(self) -> None:
        self._next = self.fresh.draw()

    def _step_next(self) -> None:
        self.fresh.give(self._step, self._next)

    def _step(self, batch: Any) -> None:
        self.updates += 1
        self.subject.step(batch)
        self.timekeepers.check()

    def _seeded_step(self, batch: Any, number: int) -> Any:
        self.updates += 1
        if self.subject.seed is not None:
            self.subject.seed(number + self.updates % PERIOD)
        return self.subject.step(batch)


def _align(a: _Runner, b: _Runner) -> None:
    """Brings both to update numbers that differ by a multiple of the period."""
    behind, ahead = sorted((a, b), key=lambda runner: runner.updates)
    difference = ahead.updates - behind.updates
    behind.advance(difference if difference < PERIOD else difference % PERIOD)


def _block_length(a: _Runner, b: _Runner, fresh: FreshBatches) -> int:
    """Returns the number of steps in a block, the same for both, for which there are time and
    memory.
    """
    count = BLOCK_SECONDS / math.sqrt(a.warm_up.steady_s * b.warm_up.steady_s)
    started = time.perf_counter()
    batch = fresh.draw()
    draw_s = time.perf_counter() - started
    count = min(count, BLOCK_BYTES / max(1, nbytes(batch)))
    if draw_s:
        count = min(count, DRAW_SECONDS / draw_s)
    return max(1, round(count))


class _DeviatingWindow(NamedTuple):
    """A window in which the candidate is far from the baseline.

    Attributes:
        state: The state before it.
        batches: The batches of its updates.
        number: Number of the round, which seeds the random generators.
        baseline: The baseline's window.
    """

    state: dict[str, Any]
    batches: list[Any]
    number: int
    baseline: Window


class _Compared:
    """Updates between timed blocks, which both subjects make from the same state."""

    def __init__(
        self, a: _Runner, b: _Runner, fresh: FreshBatches, contract: Contract
    ) -> None:
        self.a = a
        self.b = b
        self.fresh = fresh
        shared = [name for name in b.subject.state if name in a.subject.state]
        self.comparison = Comparison(contract, compares_numbers=bool(shared))
        self.reason = ""
        if not shared:
            self.reason = "the subjects have no part of the state with the same name"
        self.deviating: list[_DeviatingWindow] = []

    def add_window(self, number: int) -> None:
        """Lets the change make a few updates, and the baseline the same from the same state."""
        # Windows of two lengths meet updates that are skipped in every round at the same place.
        updates = (UPDATES if self.b.count >= UPDATES else UPDATES // 2) + number % 2
        batches = [self.fresh.draw() for _ in range(updates)]
        state = self.b.state()
        candidate = self.b.window(batches, number)
        self._give(state)
        optimizers: set[Optimizer] = set()
        hook = register_optimizer_step_post_hook(
            lambda optimizer, *_: optimizers.add(optimizer)
        )
        try:
            baseline = self.a.window(batches, number)
        finally:
            hook.remove()
        state_objects = self.a.subject.state.values()
        present = {value for value in state_objects if isinstance(value, Optimizer)}
        if not optimizers <= present:
            self._stop("an optimizer that steps is missing in the state")
        self.comparison.add(baseline, candidate)
        if len(self.deviating) >= YARDSTICKS:
            return
        if self.comparison.is_deviating(baseline, candidate):
            if not self.a.trains:
                state = self.a.state()
            deviating = _DeviatingWindow(state, batches, number, baseline)
            self.deviating.append(deviating)

    def fault(self) -> str | None:
        """Returns the fault of the change's updates, after comparing the baseline with itself."""
        for deviating in self.deviating:
            for seed in range(YARDSTICKS):
                self._give(rounded(deviating.state, seed), always=True)
                number = deviating.number + 1000 * (seed + 1)
                repeated = self.a.window(deviating.batches, number)
                self.comparison.yardsticks.append((deviating.baseline, repeated))
        return self.comparison.fault()

    def _give(self, state: dict[str, Any], *, always: bool = False) -> None:
        if not (self.a.trains or always) or not self.comparison.compares_numbers:
            return
        # The user's objects may raise anything.
        try:
            self.a.load(state)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            self._stop(f"the baseline cannot load the state of the change: {message}")

    def _stop(self, reason: str) -> None:
        self.comparison.compares_numbers = False
        self.reason = self.reason or reason
