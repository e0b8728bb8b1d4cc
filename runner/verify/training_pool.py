"""Trains recipes in child processes, which report their evaluations meanwhile."""

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
from runner.system.byte_size import format_size
from runner.system.errors import DivergedError, RunnerError, UsageError
from runner.system.hardware import available_memory, usable_cores
from runner.training.device_memory import process_memory
from runner.training.evaluation import evaluated
from runner.training.loop import Loop
from runner.training.outputs import NoOutput
from runner.training.pipeline import assemble
from runner.training.signals import Stop


class TrainingOrder(NamedTuple):
    """The input of a child process that trains.

    Attributes:
        recipe: The values of the recipe.
        batch_size: The batch size that a stage has selected; None for the recipe's, to
            which other settings refer in any case.
    """

    recipe: Mapping[str, Any]
    batch_size: int | None = None


def training_order(
    recipe: Recipe, registry: Registry, kinds: Sequence[str], length: int
) -> TrainingOrder:
    """Returns a training of this length with these stages, whose batch size is already
    selected.
    """
    values = recipe.values(masked=False)
    # They are judged on their own, and may end a training early.
    values.pop("callbacks", None)
    values["train"] |= {
        recipe.length[0]: length,
        "log_every": length,
        "checkpoint_every": None,
        # Comparisons need trainings of equal length.
        "stop": None,
    }
    selecting = [kind for kind in kinds if recipe.stages[kind].prepares]
    if not selecting:
        return TrainingOrder(values)
    # Next to other trainings, a stage might select a different size.
    for kind in selecting:
        del values["optimization"][kind]
    return TrainingOrder(values, assemble(recipe, registry.files).batch_size)


class Milestone(NamedTuple):
    """The evaluation of a training at a step, which may be its end.

    Attributes:
        done: The step, in the recipe's unit.
        initial: Metrics of the evaluation before the training, by name.
        metrics: Metrics of this evaluation.
        seconds: Time since the process of the training was started.
        growing_seconds: The part of this time that grows with the length: neither the
            start nor what the first update compiles.
    """

    done: int
    initial: Mapping[str, float]
    metrics: Mapping[str, float]
    seconds: float
    growing_seconds: float


@dataclass
class Trainings(AbstractContextManager["Trainings"]):
    """Trains recipes, each of them once, in child processes with one thread each.

    Args:
        plugin_files: Plugin files that the processes load.
        budget: Seconds from now on after which no training starts.
        length: Length of trainings: the recipe's, or another one with an evaluation.
        every: Distance of intermediate evaluations, which cost time and change nothing.
        say: Receives lines about the progress.
        compiles: Whether a stage of the recipes compiles for a CPU.
        forked: Whether processes may be copies of one that has imported everything,
            which saves time.
        free_memory: Returns the bytes that trainings may take in total, in the memory
            that is the limit.
    """

    plugin_files: Sequence[Path]
    budget: float
    length: int
    every: int
    say: Callable[[str], None]
    compiles: bool = False
    forked: bool = True
    free_memory: Callable[[], int] = available_memory
    _started: float = field(default_factory=time.monotonic)
    # The keys of both are orders as JSON.
    _futures: dict[str, Future[None]] = field(default_factory=dict)
    _milestones: dict[str, list[Milestone]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._given_up = Event()
        self._changed = Condition()
        """Notified when a training starts, is evaluated, ends or is given up."""
        self._cores = max(1, usable_cores())
        self._limit = self._cores
        """Number of trainings that may run simultaneously."""
        self._fitting = self._cores
        """Number of trainings that fit into memory, as far as is known."""
        self._running = 0
        self._memory: int | None = None
        """Bytes that were free before the first training; None until then."""

    def __exit__(self, *_: object) -> None:
        self.give_up()
        self._pool.shutdown(wait=False)

    @property
    def seconds_left(self) -> float:
        """Returns the remaining seconds of the budget; negative once it is spent."""
        return self._started + self.budget - time.monotonic()

    @property
    def most_running(self) -> int:
        """Returns how many trainings run simultaneously if nothing else does."""
        return min(self._cores, self._fitting)

    @contextmanager
    def reserve_cores(self, cores: int) -> Iterator[None]:
        """Leaves the given number of cores to other computations inside the ``with``."""
        previous = self._limit
        self._set_limit(max(1, self._cores - cores))
        try:
            yield
        finally:
            self._set_limit(previous)

    @contextmanager
    def ahead(self, device: torch.device, start: Callable[[], bool]) -> Iterator[None]:
        """Trains on half of the cores of a CPU inside the ``with`` what ``start`` has
        started; afterwards nothing is trained.

        Trainings that turn out to be unnecessary are abandoned. With an accelerator,
        this has no advantage.
        """
        threads = torch.get_num_threads()
        half = self._cores // 2
        with self, self.reserve_cores(self._cores - half):
            has_started = half > 0 and device.type == "cpu" and start()
            torch.set_num_threads(half if has_started else threads)
            try:
                yield
            finally:
                torch.set_num_threads(threads)

    def end_at(self, length: int) -> None:
        """Limits the length of all trainings; those that start later are evaluated only
        at that length.
        """
        self.length = self.every = length

    def begin(self, trainings: Sequence[TrainingOrder], seeds: Sequence[int]) -> None:
        """Starts trainings with every seed, the first seed first, and returns.

        The last of the trainings may diverge.
        """
        changed = set(_as_json(trainings[-1:], seeds))
        for seed in seeds:
            for order in _as_json(trainings, [seed]):
                # Every training is run once.
                if order in self._futures:
                    continue
                self._milestones[order] = []
                future = self._pool.submit(
                    self._run, order, order in changed, self._given_up
                )
                self._futures[order] = future
                future.add_done_callback(self._notify)

    def give_up(self) -> None:
        """Ends all trainings that are not over."""
        self._given_up.set()
        self._notify()
        self._futures = {
            order: future
            for order, future in self._futures.items()
            if not future.cancel() and self._milestone(order, self.length) is not None
        }
        self._given_up = Event()

    def run(
        self, trainings: Sequence[TrainingOrder], seeds: Sequence[int], length: int
    ) -> list[Milestone]:
        """Returns evaluations at this length of every training with every seed,
        trainings outermost.

        Raises:
            DivergedError: Only the last of the trainings diverged.
            RunnerError: A training failed.
        """
        orders = _as_json(trainings, seeds)
        new = [
            order
            for order in dict.fromkeys(orders)
            if self._milestone(order, length) is None
        ]
        self.begin(trainings, seeds)
        try:
            for number, order in enumerate(new, start=1):
                self._wait_for(order, length)
                self.say(f"trained {number} of {len(new)}")
            return [self._wait_for(order, length) for order in orders]
        except BaseException:
            # After an error or Ctrl-C, the other results are not needed.
            self.give_up()
            raise

    def are_over(
        self, trainings: Sequence[TrainingOrder], seeds: Sequence[int], length: int
    ) -> bool:
        """Returns whether all trainings have reached a length."""
        return all(
            self._milestone(text, length) is not None
            for text in _as_json(trainings, seeds)
        )

    def newest(self, training: TrainingOrder, seeds: Sequence[int]) -> list[Milestone]:
        """Returns the last evaluation with every seed that has one, in the order of the
        seeds.
        """
        lists = (self._milestones.get(order) for order in _as_json([training], seeds))
        return [milestones[-1] for milestones in lists if milestones]

    def _milestone(self, order: str, length: int) -> Milestone | None:
        """Returns the first evaluation at this length or after it."""
        for milestone in self._milestones.get(order, ()):
            if milestone.done >= length:
                return milestone
        return None

    def _wait_for(self, order: str, length: int) -> Milestone:
        future = self._futures[order]

        def is_over() -> bool:
            return future.done() or self._milestone(order, length) is not None

        with self._changed:
            self._changed.wait_for(is_over)
        milestone = self._milestone(order, length)
        if milestone is None:
            # Raises the error of the training.
            future.result()
            raise RunnerError(
                f"a training for the comparison ended before it was evaluated at "
                f"{length:,}"
            )
        return milestone

    def _notify(self, *_: object) -> None:
        with self._changed:
            self._changed.notify_all()

    def _set_limit(self, trainings: int) -> None:
        self._limit = trainings
        self._notify()

    def _limit_memory(self, peak: int) -> None:
        """Starts no more trainings than fit into memory, if each takes this many bytes."""
        with self._changed:
            assert self._memory is not None
            fitting = max(1, self._memory // max(1, peak))
            if fitting >= self._fitting:
                return
            self._fitting = fitting
        size = format_size(peak)
        self.say(
            f"each training takes {size}, so at most {fitting} run at the same time"
        )

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._cores)

    def _run(self, order: str, may_diverge: bool, given_up: Event) -> None:
        """Calls ``_train`` when fewer trainings are running than allowed."""

        def may_start() -> bool:
            most = min(self._limit, self._fitting)
            return self._running < most or given_up.is_set()

        with self._changed:
            self._changed.wait_for(may_start)
            if given_up.is_set():
                raise CancelledError
            if self._memory is None:
                self._memory = self.free_memory()
            self._running += 1
        try:
            self._train(order, may_diverge, given_up)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _train(self, order: str, may_diverge: bool, given_up: Event) -> None:
        recipe, batch_size = json.loads(order)
        recipe["train"] |= {"evaluate_every": self.every}
        options = {"batch_size": batch_size}
        started = time.monotonic()
        try:
            with Child(
                __name__,
                recipe,
                plugin_files=self.plugin_files,
                options=options,
                forked=self.forked,
                compiles=self.compiles and self.forked,
            ) as child:
                while (message := child.receive(given_up.is_set)) is not None:
                    seconds = time.monotonic() - started
                    self._limit_memory(message.pop("peak_bytes"))
                    self._milestones[order].append(
                        Milestone(**message, seconds=seconds)
                    )
                    self._notify()
                    # The limit may be less than the length in the order.
                    if message["done"] >= self.length:
                        return
        except ChildError as error:
            if error.cause == Cause.DIVERGED and may_diverge:
                raise DivergedError(str(error)) from error
            if error.cause == Cause.INVALID:
                raise UsageError(str(error)) from error
            summary = f"a training for the comparison failed:\n{error}"
            raise RunnerError(summary) from error


def _as_json(trainings: Sequence[TrainingOrder], seeds: Sequence[int]) -> list[str]:
    """Returns the orders of every training with every seed, trainings outermost."""
    orders = [
        [{**recipe, "seed": seed}, batch_size]
        for recipe, batch_size in trainings
        for seed in seeds
    ]
    return [json.dumps(order, sort_keys=True) for order in orders]


class _EvaluationSender(NoOutput):
    """Sends every evaluation of a training to the process that waits for it."""

    def __init__(
        self, parent: Parent, initial: Mapping[str, float], device: torch.device
    ) -> None:
        self.parent = parent
        self.initial = initial
        self.device = device
        self.started = time.monotonic()
        self.first_update = 0.0

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Records the duration of the first update, which compiles, and sends
        evaluations.
        """
        self.first_update = metrics.get("perf/first_update_seconds", self.first_update)
        evaluation = {
            name.removeprefix("eval/"): value
            for name, value in metrics.items()
            if name.startswith("eval/")
        }
        if not evaluation:
            return
        seconds = time.monotonic() - self.started - self.first_update
        # The cost of an update is derived from it, and must not be zero or negative.
        seconds = max(seconds, 1e-3)
        self.parent.tell(
            done=step,
            initial=self.initial,
            metrics=evaluation,
            growing_seconds=seconds,
            peak_bytes=process_memory(self.device),
        )


def main(parent: Parent) -> None:
    """Trains the recipe without a record; sends its evaluations."""
    # Several trainings run simultaneously.
    torch.set_num_threads(1)
    recipe, registry = parent.load()
    generators.seed(recipe.seed)
    pipeline = assemble(recipe, registry.files, batch_size=parent.options["batch_size"])
    sender = _EvaluationSender(parent, evaluated(pipeline), pipeline.device)
    Loop(pipeline, parent.folder, sender, NoOutput(), Stop()).run()
