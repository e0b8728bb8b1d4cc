"""Whether a recipe still learns as much with a stage as without, judged by whole trainings with paired seeds."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

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
class Trainings:
    """Trains recipes, each of them once, in child processes: as many at a time as there are cores, one thread each."""

    plugin_files: Sequence[Path]
    budget: float  # seconds from here, after which no training is begun
    say: Callable[[str], None]
    _started: float = field(default_factory=time.monotonic)
    _done: dict[str, dict[str, Any]] = field(default_factory=dict)  # by the order as JSON

    @property
    def seconds_left(self) -> float:
        """Of the budget; below zero once it is spent."""
        return self._started + self.budget - time.monotonic()

    def run(self, trainings: Sequence[TrainingOrder], seeds: Sequence[int]) -> list[dict[str, Any]]:
        """Evaluations before and after every training with every seed, trainings outermost.

        One that fails is a ``RunnerError``: ``DivergedError`` if the last of the trainings diverged, and no other.
        """
        wanted = _as_json(trainings, seeds)
        new = [text for text in dict.fromkeys(wanted) if text not in self._done]
        changed = set(wanted[-len(seeds) :])
        given_up = Event()
        with ThreadPoolExecutor(max(1, usable_cores())) as pool:
            futures = {text: pool.submit(self._train, text, text in changed, given_up) for text in new}
            try:
                for number, text in enumerate(sorted(new, key=changed.__contains__), start=1):
                    self._done[text] = futures[text].result()
                    self.say(f"trained {number} of {len(new)}")
            finally:  # an error or Ctrl-C: nobody waits for the others
                given_up.set()
                pool.shutdown(wait=False, cancel_futures=True)
        return [self._done[text] for text in wanted]

    def are_over(self, trainings: Sequence[TrainingOrder], seeds: Sequence[int]) -> bool:
        """Whether all of them have been trained."""
        return self._done.keys() >= set(_as_json(trainings, seeds))

    def _train(self, text: str, may_diverge: bool, given_up: Event) -> dict[str, Any]:
        recipe, batch_size = json.loads(text)
        options, started = {"batch_size": batch_size}, time.monotonic()
        try:  # several compute side by side, with one thread each
            with Child(__name__, recipe, plugin_files=self.plugin_files, options=options, threads=1) as child:
                told = child.answer(math.inf, given_up.is_set)
                return {**told, "whole_seconds": time.monotonic() - started}
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


def affordable(
    reference: TrainingOrder, changed: TrainingOrder, unit: str, length: int, pairs: int, changes: int,
    trainings: Trainings,
) -> int:  # fmt: skip
    """How long trainings may be for all of them to fit into the budget: a tenth of the recipe's length at least.

    One pair of the shortest trainings says what they cost.

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
    shortest = math.ceil(SHORTEST * length)
    orders = [order.of_length(unit, shortest) for order in (reference, changed)]
    without, with_change = trainings.run(orders, [int(reference.recipe["seed"]) + 1])
    whole, updating = (without[each] + changes * with_change[each] for each in ("whole_seconds", "updating_seconds"))
    at_a_time = min(usable_cores(), pairs * (1 + changes))
    left = trainings.seconds_left

    def needed(steps: float) -> float:
        """Seconds for all trainings of this length."""
        return float(whole + (steps / shortest - 1) * updating) * pairs / at_a_time / (1 - _SPARE)

    share = (left - needed(shortest)) / max(needed(length) - needed(shortest), 1e-9)
    steps = int(shortest + min(max(share, 0.0), 1.0) * (length - shortest))
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
        seeds = [int(reference.recipe["seed"]) + 1 + i for i in range(first, look)]
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
