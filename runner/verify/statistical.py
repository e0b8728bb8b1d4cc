"""Whether a recipe still learns as much with a stage as without, judged by whole trainings with paired seeds."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Condition, Event
from typing import Any, NamedTuple

import torch

from runner.child.protocol import Parent
from runner.child.spawn import Cause, Child, ChildError
from runner.plugin.contract import Objective
from runner.proof import NonInferiority, Outcome, Verdict
from runner.system import generators
from runner.system.errors import DivergedError, RunnerError, UsageError
from runner.system.hardware import usable_cores
from runner.train.assemble import assemble
from runner.train.loop import Loop, Nowhere, evaluated
from runner.train.signals import Stop

NOT_BEGUN = "no training was begun within the budget; 'runner verify' trains"
SHORTEST = 0.1  # of a recipe's length, which the trainings of a comparison have at least
_SPARE = 0.1  # of what is left of the budget, because trainings of one kind differ


class TrainingOrder(NamedTuple):
    """What a child process trains."""

    recipe: Mapping[str, Any]  # its values
    batch_size: int | None = None  # what a stage has chosen; the recipe's own stays what its other settings refer to

    def of_length(self, unit: str, steps: int) -> TrainingOrder:
        """The same, ended after so many."""
        return self._replace(recipe={**self.recipe, "train": {**self.recipe["train"], unit: steps, "log_every": steps}})


@dataclass
class Trainings(AbstractContextManager["Trainings"]):
    """Trains recipes, each of them once, in child processes with one thread each: as many at a time as it may."""

    plugin_files: Sequence[Path]
    budget: float  # seconds from here, after which no training is begun
    say: Callable[[str], None]
    compiles: bool = False  # recipes of which a stage compiles for a CPU
    _started: float = field(default_factory=time.monotonic)
    _futures: dict[str, Future[dict[str, Any]]] = field(default_factory=dict)  # by the order as JSON

    def __post_init__(self) -> None:
        self._given_up, self._turn = Event(), Condition()
        self._cores = self._at_a_time = max(1, usable_cores())
        self._running = 0

    def __exit__(self, *_: object) -> None:
        self.give_up()
        self._pool.shutdown(wait=False)

    @property
    def seconds_left(self) -> float:
        """Of the budget; below zero once it is spent."""
        return self._started + self.budget - time.monotonic()

    @contextmanager
    def beside(self, cores: int) -> Iterator[None]:
        """Leaves so many cores to whoever computes inside the ``with``."""
        before = self._at_a_time
        self._train_at_a_time(max(1, self._cores - cores))
        try:
            yield
        finally:
            self._train_at_a_time(before)

    @contextmanager
    def ahead(self, device: torch.device, begin: Callable[[], bool]) -> Iterator[None]:
        """Inside the ``with``, half of the cores of a CPU train what is begun by then; nothing is trained after it.

        What was begun in vain is given up. Where an accelerator trains, there is nothing to gain.
        """
        threads, half = torch.get_num_threads(), self._cores // 2
        with self, self.beside(self._cores - half):
            begun = half > 0 and device.type == "cpu" and begin()
            torch.set_num_threads(half if begun else threads)
            try:
                yield
            finally:
                torch.set_num_threads(threads)

    def begin(self, trainings: Sequence[TrainingOrder], seeds: Sequence[int]) -> None:
        """Trains with every seed, the first seed first, and does not wait for it; the last of them may diverge."""
        changed = set(_as_json(trainings[-1:], seeds))
        for seed in seeds:
            for text in _as_json(trainings, [seed]):
                if text not in self._futures:
                    self._futures[text] = self._pool.submit(self._trained, text, text in changed, self._given_up)

    def give_up(self) -> None:
        """Ends all trainings that are not over."""
        self._given_up.set()
        with self._turn:
            self._turn.notify_all()
        self._futures = {text: each for text, each in self._futures.items() if not each.cancel() and _has_answer(each)}
        self._given_up = Event()

    def run(self, trainings: Sequence[TrainingOrder], seeds: Sequence[int]) -> list[dict[str, Any]]:
        """Evaluations before and after every training with every seed, trainings outermost.

        One that fails is a ``RunnerError``: ``DivergedError`` if the last of the trainings diverged, and no other.
        """
        wanted = _as_json(trainings, seeds)
        new = [text for text in dict.fromkeys(wanted) if text not in self._futures or not self._futures[text].done()]
        self.begin(trainings, seeds)
        try:
            for number, text in enumerate(new, start=1):
                self._futures[text].result()
                self.say(f"trained {number} of {len(new)}")
            return [self._futures[text].result() for text in wanted]
        except BaseException:  # an error or Ctrl-C: nobody waits for the others
            self.give_up()
            raise

    def are_over(self, trainings: Sequence[TrainingOrder], seeds: Sequence[int]) -> bool:
        """Whether all of them have been trained."""
        return all(text in self._futures and _has_answer(self._futures[text]) for text in _as_json(trainings, seeds))

    def _train_at_a_time(self, trainings: int) -> None:
        with self._turn:
            self._at_a_time = trainings
            self._turn.notify_all()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._cores)

    def _trained(self, text: str, may_diverge: bool, given_up: Event) -> dict[str, Any]:
        """As ``_train``, when it is its turn."""
        with self._turn:
            self._turn.wait_for(lambda: self._running < self._at_a_time or given_up.is_set())
            if given_up.is_set():
                raise CancelledError
            self._running += 1
        try:
            return self._train(text, may_diverge, given_up)
        finally:
            with self._turn:
                self._running -= 1
                self._turn.notify_all()

    def _train(self, text: str, may_diverge: bool, given_up: Event) -> dict[str, Any]:
        recipe, batch_size = json.loads(text)
        options, started = {"batch_size": batch_size}, time.monotonic()
        try:  # several compute side by side, with one thread each
            with Child(
                __name__, recipe, plugin_files=self.plugin_files, options=options, forked=True, compiles=self.compiles
            ) as child:
                told = child.answer(math.inf, given_up.is_set)
                return {**told, "whole_seconds": time.monotonic() - started}
        except ChildError as error:
            if error.cause == Cause.DIVERGED and may_diverge:
                raise DivergedError(str(error)) from error
            if error.cause == Cause.INVALID:
                raise UsageError(str(error)) from error
            raise RunnerError(f"a training for the comparison failed:\n{error}") from error


def _has_answer(training: Future[dict[str, Any]]) -> bool:
    return training.done() and not training.cancelled() and training.exception() is None


def _as_json(trainings: Sequence[TrainingOrder], seeds: Sequence[int]) -> list[str]:
    """Every training with every seed, trainings outermost."""
    orders = [[{**recipe, "seed": seed}, batch_size] for recipe, batch_size in trainings for seed in seeds]
    return [json.dumps(order, sort_keys=True) for order in orders]


def seeds_of(training: TrainingOrder, pairs: int) -> list[int]:
    """Those of so many pairs: the recipe's own is not among them."""
    return [int(training.recipe["seed"]) + 1 + i for i in range(pairs)]


def affordable(
    reference: TrainingOrder, changed: TrainingOrder, unit: str, length: int, pairs: int, changes: int,
    trainings: Trainings,
) -> int:  # fmt: skip
    """How long trainings may be for all of them to fit into the budget: a tenth of the recipe's length at least.

    One pair says what they cost: a whole one, as far as it is over already, or one of the shortest.

    Args:
        reference: the training without the change.
        changed: the training with it.
        unit: what a training's length is counted in.
        length: the recipe's own.
        pairs: how many seeds there will be.
        changes: how many changes are compared with the reference, each of them in trainings of its own.
        trainings: what trains, and knows the budget.

    Raises:
        DivergedError: the training with the change did.
    """
    shortest, seeds = math.ceil(SHORTEST * length), seeds_of(reference, pairs)
    trained, orders = length, [order.of_length(unit, length) for order in (reference, changed)]
    over = sum(trainings.are_over(orders, [seed]) for seed in seeds)
    done = [order for order in orders if trainings.are_over([order], seeds[:1])]  # or one stands for both
    if not done:
        trainings.give_up()
        trained, done = shortest, [order.of_length(unit, shortest) for order in (reference, changed)]
    measured = trainings.run(done, seeds[:1])
    one, other = measured[0], measured[-1]
    whole, updating = (one[each] + changes * other[each] for each in ("whole_seconds", "updating_seconds"))
    at_a_time = min(usable_cores(), pairs * (1 + changes))
    left = trainings.seconds_left

    def needed(steps: float) -> float:
        """Seconds for all trainings of this length, or for what is left of them."""
        already = over * (one["whole_seconds"] + other["whole_seconds"]) if steps == length else 0.0
        return float((whole + (steps / trained - 1) * updating) * pairs - already) / at_a_time / (1 - _SPARE)

    share = (left - needed(shortest)) / max(needed(length) - needed(shortest), 1e-9)
    steps = length if needed(length) <= left else int(shortest + min(max(share, 0.0), 1.0) * (length - shortest))
    if steps < length:
        enough = 60 * math.ceil((trainings.budget - left + needed(length)) / 60)
        trainings.say(f"the budget has room for trainings of {steps:,} {unit}; --budget {enough} for all {length:,}")
    return steps


def statistical(
    reference: TrainingOrder, changed: TrainingOrder, objective: Objective, trainings: Trainings, most_seeds: int
) -> Verdict:
    """Trains a recipe without and with a stage from the same seeds, until it is clear whether it learns less with it.

    What is learnt is the objective after the training less that before it. The changed recipe may lose less, in the
    mean over seeds, than the objective's margin: in its unit, or as a share of what the reference learns. If that is
    not clear after the most seeds, or a training collapsed with the stage alone, it is INCONCLUSIVE.

    Raises:
        DivergedError: a training with the stage did.
    """
    name, sign = objective.name, objective.sign
    test = NonInferiority(margin=objective.margin, most=most_seeds, relative=objective.unit is None)
    for first, look in itertools.pairwise((0, *test.looks)):
        seeds = seeds_of(reference, look)[first:]
        if trainings.seconds_left < 0 and not trainings.are_over([reference, changed], seeds):
            break
        results = trainings.run([reference, changed], seeds)
        gains = [sign * (each["after"][name] - each["before"][name]) for each in results]
        for pair in zip(gains[: len(seeds)], gains[len(seeds) :], strict=True):
            test.add(*pair)
        learnt = sum(without for without, _ in test.pairs) / len(test)
        if learnt <= 0:
            summary = f"the reference learns nothing: {name} does not improve; train longer"
            return Verdict(Outcome.INCONCLUSIVE, "Statistical", summary, test.evidence())
        trainings.say(f"{name}, {len(test)} seeds: {test.summary()}")
        if test.decision() is not None:
            break
    if not len(test):
        return Verdict(Outcome.INCONCLUSIVE, "Statistical", NOT_BEGUN)
    return Verdict(test.conclude(), "Statistical", f"{name}: {test.summary()}", {"metric": name, **test.evidence()})


def main(parent: Parent) -> None:
    """Trains the recipe without a trace; tells its evaluations, and the seconds that grow with its length."""
    torch.set_num_threads(1)
    recipe, registry = parent.load()
    generators.seed(recipe.seed)
    pipeline = assemble(recipe, registry.files, batch_size=parent.options["batch_size"])
    started = time.monotonic()
    before = evaluated(pipeline)
    evaluating = time.monotonic() - started
    loop = Loop(pipeline, parent.folder, Nowhere(), Nowhere(), Stop())
    loop.run()
    after = {name.removeprefix("eval/"): value for name, value in loop.metrics.items() if name.startswith("eval/")}
    # The loop evaluates at its end, and its first update compiles.
    updating = time.monotonic() - started - 2 * evaluating - loop.metrics["perf/first_update_seconds"]
    parent.tell(before=before, after=after, updating_seconds=max(updating, 1e-3))
