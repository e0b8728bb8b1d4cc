"""Trains recipes in child processes, which report their progress and evaluations meanwhile."""

from __future__ import annotations

import json
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
from runner.plugin.registry import Registry
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.errors import DivergedError, RunnerError, UsageError
from runner.system.hardware import usable_cores
from runner.training.evaluation import evaluated
from runner.training.loop import Loop
from runner.training.outputs import NoOutput
from runner.training.pipeline import assemble
from runner.training.signals import Stop


class TrainingOrder(NamedTuple):
    """The input of a child process that trains."""

    recipe: Mapping[str, Any]  # its values
    # As selected by a stage; other settings still refer to the recipe's batch size.
    batch_size: int | None = None


def training_order(recipe: Recipe, registry: Registry, kinds: Sequence[str], length: int) -> TrainingOrder:
    """Returns a training of this length with these stages, its batch size chosen already."""
    values = recipe.values(masked=False)
    values["train"] |= {recipe.length[0]: length, "log_every": length, "checkpoint_every": None, "stop": None}
    choosing = [kind for kind in kinds if recipe.stages[kind].prepares]
    for kind in choosing:
        del values["optimization"][kind]  # next to other trainings, the choice might be different
    return TrainingOrder(values, assemble(recipe, registry.files).batch_size if choosing else None)


class Milestone(NamedTuple):
    """The evaluation of a training at a step, which may be its end, and the time until then."""

    done: int  # in the recipe's unit
    before: Mapping[str, float]  # the evaluation before the training, by name
    after: Mapping[str, float]
    seconds: float  # since its process was started
    growing_seconds: float  # of these, what grows with the length: neither the start nor what the first update compiles


@dataclass
class Trainings(AbstractContextManager["Trainings"]):
    """Trains recipes, each of them once, in child processes with one thread each: as many at a time as it may.

    The processes are copies of one that has imported everything, which saves its time, where that may be copied.
    """

    plugin_files: Sequence[Path]
    budget: float  # seconds from here, after which no training starts
    length: int  # the length of trainings: the recipe's, or another one with an evaluation
    every: int  # distance of intermediate evaluations, which cost time and change nothing
    say: Callable[[str], None]
    compiles: bool = False  # a stage of the recipes compiles for a CPU
    forked: bool = True  # whether their processes may be copies of another one
    _started: float = field(default_factory=time.monotonic)
    _futures: dict[str, Future[None]] = field(default_factory=dict)  # by the order as JSON
    _milestones: dict[str, list[Milestone]] = field(default_factory=dict)  # by the order as JSON

    def __post_init__(self) -> None:
        self._given_up, self._turn = Event(), Condition()
        self._cores = self._at_a_time = max(1, usable_cores())
        self._running = 0

    def __exit__(self, *_: object) -> None:
        self.give_up()
        self._pool.shutdown(wait=False)

    @property
    def seconds_left(self) -> float:
        """Returns the remaining seconds of the budget; negative once it is spent."""
        return self._started + self.budget - time.monotonic()

    @contextmanager
    def beside(self, cores: int) -> Iterator[None]:
        """Leaves the given number of cores to other computations inside the ``with``."""
        before = self._at_a_time
        self._train_at_a_time(max(1, self._cores - cores))
        try:
            yield
        finally:
            self._train_at_a_time(before)

    @contextmanager
    def ahead(self, device: torch.device, begin: Callable[[], bool]) -> Iterator[None]:
        """Trains on half of the cores of a CPU inside the ``with`` what ``begin`` has started;
        afterwards nothing is trained.

        Trainings that turn out to be unnecessary are abandoned. With an
        accelerator, this has no advantage.
        """
        threads, half = torch.get_num_threads(), self._cores // 2
        with self, self.beside(self._cores - half):
            begun = half > 0 and device.type == "cpu" and begin()
            torch.set_num_threads(half if begun else threads)
            try:
                yield
            finally:
                torch.set_num_threads(threads)

    def end_at(self, length: int) -> None:
        """Limits the length of all trainings; those that start later are
        evaluated only at that length.
        """
        self.length = self.every = length

    def begin(self, trainings: Sequence[TrainingOrder], seeds: Sequence[int]) -> None:
        """Trains with every seed, the first seed first, and does not wait for it; the last of them may diverge."""
        changed = set(_as_json(trainings[-1:], seeds))
        for seed in seeds:
            for text in _as_json(trainings, [seed]):
                if text not in self._futures:
                    self._milestones[text] = []
                    self._futures[text] = self._pool.submit(self._trained, text, text in changed, self._given_up)
                    self._futures[text].add_done_callback(self._notify)

    def give_up(self) -> None:
        """Ends all trainings that are not over."""
        self._given_up.set()
        self._notify()
        self._futures = {
            text: each
            for text, each in self._futures.items()
            if not each.cancel() and self._milestone(text, self.length) is not None
        }
        self._given_up = Event()

    def run(self, trainings: Sequence[TrainingOrder], seeds: Sequence[int], length: int) -> list[Milestone]:
        """Evaluations at this length of every training with every seed, trainings outermost.

        A training that fails is a ``RunnerError``: ``DivergedError`` if the last of the trainings diverged, and no
        other.
        """
        wanted = _as_json(trainings, seeds)
        new = [text for text in dict.fromkeys(wanted) if self._milestone(text, length) is None]
        self.begin(trainings, seeds)
        try:
            for number, text in enumerate(new, start=1):
                self._wait_for(text, length)
                self.say(f"trained {number} of {len(new)}")
            return [self._wait_for(text, length) for text in wanted]
        except BaseException:  # an error or Ctrl-C: the other results are not needed
            self.give_up()
            raise

    def are_over(self, trainings: Sequence[TrainingOrder], seeds: Sequence[int], length: int) -> bool:
        """Returns whether all trainings have reached a length."""
        return all(self._milestone(text, length) is not None for text in _as_json(trainings, seeds))

    def newest(self, training: TrainingOrder, seeds: Sequence[int]) -> list[Milestone]:
        """The last evaluation with every seed with which there was one, in the order of the seeds."""
        told = (self._milestones.get(text) for text in _as_json([training], seeds))
        return [each[-1] for each in told if each]

    def _milestone(self, text: str, length: int) -> Milestone | None:
        """The first one at this length or after it."""
        return next((each for each in self._milestones.get(text, ()) if each.done >= length), None)

    def _wait_for(self, text: str, length: int) -> Milestone:
        future = self._futures[text]
        with self._turn:
            self._turn.wait_for(lambda: future.done() or self._milestone(text, length) is not None)
        found = self._milestone(text, length)
        if found is None:
            future.result()  # raises what went wrong
            raise RunnerError(f"a training for the comparison ended before it was evaluated at {length:,}")
        return found

    def _notify(self, *_: object) -> None:
        with self._turn:
            self._turn.notify_all()

    def _train_at_a_time(self, trainings: int) -> None:
        self._at_a_time = trainings
        self._notify()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._cores)

    def _trained(self, text: str, may_diverge: bool, given_up: Event) -> None:
        """Calls ``_train`` when fewer trainings are running than allowed."""
        with self._turn:
            self._turn.wait_for(lambda: self._running < self._at_a_time or given_up.is_set())
            if given_up.is_set():
                raise CancelledError
            self._running += 1
        try:
            self._train(text, may_diverge, given_up)
        finally:
            with self._turn:
                self._running -= 1
                self._turn.notify_all()

    def _train(self, text: str, may_diverge: bool, given_up: Event) -> None:
        recipe, batch_size = json.loads(text)
        recipe["train"] |= {"evaluate_every": self.every}
        options, started = {"batch_size": batch_size}, time.monotonic()
        try:  # several compute side by side, with one thread each
            with Child(
                __name__,
                recipe,
                plugin_files=self.plugin_files,
                options=options,
                forked=self.forked,
                compiles=self.compiles and self.forked,
            ) as child:
                while (told := child.receive(given_up.is_set)) is not None:
                    self._milestones[text].append(Milestone(**told, seconds=time.monotonic() - started))
                    self._notify()
                    if told["done"] >= self.length:
                        return
        except ChildError as error:
            if error.cause == Cause.DIVERGED and may_diverge:
                raise DivergedError(str(error)) from error
            if error.cause == Cause.INVALID:
                raise UsageError(str(error)) from error
            raise RunnerError(f"a training for the comparison failed:\n{error}") from error


def _as_json(trainings: Sequence[TrainingOrder], seeds: Sequence[int]) -> list[str]:
    """Every training with every seed, trainings outermost."""
    orders = [[{**recipe, "seed": seed}, batch_size] for recipe, batch_size in trainings for seed in seeds]
    return [json.dumps(order, sort_keys=True) for order in orders]


class _Told(NoOutput):
    """Sends every evaluation of a training to the process that waits for it."""

    def __init__(self, parent: Parent, before: Mapping[str, float]) -> None:
        self.parent, self.before = parent, before
        self.started, self.first_update = time.monotonic(), 0.0

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Records the duration of the first update, which compiles, and sends evaluations."""
        self.first_update = metrics.get("perf/first_update_seconds", self.first_update)
        after = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
        if after:
            seconds = time.monotonic() - self.started - self.first_update
            self.parent.tell(done=step, before=self.before, after=after, growing_seconds=max(seconds, 1e-3))


def main(parent: Parent) -> None:
    """Trains the recipe without a record; sends its evaluations."""
    torch.set_num_threads(1)
    recipe, registry = parent.load()
    generators.seed(recipe.seed)
    pipeline = assemble(recipe, registry.files, batch_size=parent.options["batch_size"])
    Loop(pipeline, parent.folder, _Told(parent, evaluated(pipeline)), NoOutput(), Stop()).run()
