"""Verifies updates during a training: repeats some of them with the baseline, and compares."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.plugin.contract import Close, Contract, Exact, Statistical
from runner.proof.difference import digest
from runner.recipe.safeguards import SentinelConfig
from runner.system.errors import SentinelError
from runner.training.checksum import checksum
from runner.training.deviation import Deviation, find_deviations
from runner.training.repetition import (
    BaselineLearner,
    GradientNoise,
    Snapshot,
    Values,
    values_of,
)
from runner.training.skipped_updates import Skipped

if TYPE_CHECKING:
    from runner.proof.operator_search import DivergingOperator
    from runner.training.pipeline import Assembly
    from runner.training.step import Drawn, Step

# Stages compile in the first updates, whose time is not representative.
FIRST = 2
YARDSTICK_SEEDS = (1, 2, 3)
# Expected cost of the first comparison in updates: repetitions, copies and a second learner.
FIRST_COST = 8
_log = logging.getLogger(__name__)


class Sentinel:
    """Calls a training's step, and repeats some of its updates with the learner without stages.

    A repeated update starts from a copy of the state, with the same batch and random numbers. The
    comparison depends on the contract. For ``Exact``, bits are compared. For ``Close``, the
    yardstick is the baseline with its state and gradients perturbed by a unit of the last digit; a
    deviation that rounding might explain counts when the same tensor deviates in the next update,
    too. For ``Statistical``, only the form of numbers is compared.

    The training is not affected: its bits are the same with and without a sentinel.

    Args:
        step: The training's step.
        pipeline: The training's pipeline.
        config: The share of the time that it may take, and the consequence of an alarm.
        clock: Returns seconds.

    Attributes:
        checked: Updates that were compared.
        updates: Updates of this process.
        alarms: Messages of alarms.
        last_good: The last update that was the baseline's, for a message.
        seconds: Time of everything that the sentinel does.
    """

    def __init__(
        self,
        step: Step,
        pipeline: Assembly,
        config: SentinelConfig,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.step = step
        self.config = config
        self.contract = contract_of(pipeline)
        self.checked = 0
        self.updates = 0
        self.alarms: list[str] = []
        self.last_good = "no update was compared before"
        self.seconds = 0.0
        self._pipeline = pipeline
        self._clock = clock
        self._started = clock()
        self._cost = 0.0
        # Each repeated update is followed by the comparison of a checksum, which takes this long.
        self._checksum_seconds = 0.0
        self._baseline: BaselineLearner | None = None
        self._suspicions: list[Deviation] = []
        self._checksum: Tensor | None = None

    def __call__(self) -> dict[str, Any] | None:
        """Makes a step of the training, and repeats its update if it is time to."""
        self.compare_checksum()
        if not self._is_due():
            output = self.step()
            self.updates += output is not None
            return output
        inputs = self.step.draw()
        if inputs is None:
            return None
        return self._repeated(inputs)

    def _is_due(self) -> bool:
        """Returns whether a comparison keeps to the share of the time, or confirms a suspicion."""
        if self.updates < FIRST:
            return False
        # A suspicion is confirmed in the next update, or dropped.
        if self._suspicions:
            return True
        elapsed = self._clock() - self._started
        cost = self._cost if self.checked else FIRST_COST * elapsed / self.updates
        seconds = self.seconds + cost + self._checksum_seconds
        return seconds <= self.config.share * elapsed

    def _repeated(self, inputs: Drawn) -> dict[str, Any] | None:
        """Makes a step of the training, and compares its update."""
        earlier = self.seconds
        started = self._clock()
        snapshot = Snapshot.of(self.step, inputs)
        copied = self._clock()
        output = self.step(inputs)
        trained = self._clock()
        self.updates += 1
        # The baseline would have made the update.
        if isinstance(output, Skipped):
            return output
        try:
            self._compare(snapshot, output)
        finally:
            self._cost = (copied - started) + (self._clock() - trained)
            # The cost includes the time of the new checksum, which was counted already.
            self.seconds = earlier + self._cost
        return output

    def _compare(self, snapshot: Snapshot, output: Any) -> None:
        """Repeats an update that was trained, and raises the alarm if it deviates."""
        if self._baseline is None:
            self._baseline = BaselineLearner(self._pipeline)
        repeat = partial(self._baseline.repeat, self.step, snapshot)
        number = snapshot.counts["updates"] + 1
        trained = values_of(output, self.step.learner.complete_state())
        baseline = repeat()
        self.checked += 1
        deviations = find_deviations(trained, baseline, (), self.contract)
        # Repeating the baseline costs an update, so only a deviation is worth it.
        if deviations:
            unstable = _first_difference(baseline, repeat())
            if unstable:
                self._suspicions = []
                self._raise_alarm(
                    f"update {number:,}: the baseline repeated from one snapshot is not the same "
                    f"twice ('{unstable}'): the hardware is broken, or an operator is not "
                    "deterministic; no stage is to blame"
                )
                return
        if deviations and isinstance(self.contract, Close):
            yardsticks = self._yardsticks(repeat)
            deviations = find_deviations(trained, baseline, yardsticks, self.contract)
        # A deviation that rounding might explain is rarely repeated by the next update.
        suspicions = self._suspicions
        self._suspicions = deviations
        if not deviations:
            self.last_good = (
                f"update {number:,} was the last that was compared and good"
            )
            self.keep_checksum()
        proven = [
            deviation
            for deviation in deviations
            if deviation.is_gross or deviation.repeats(suspicions)
        ]
        if proven:
            self._suspicions = []
            stages = ", ".join(self._pipeline.stages) or "none"
            operator = self._find_operator(snapshot)
            self._raise_alarm(
                f"update {number:,} deviates from the baseline: {proven[0]} "
                f"(stages: {stages}); {operator}"
            )

    def _find_operator(self, snapshot: Snapshot) -> DivergingOperator | str:
        # The search is needed for an alarm only.
        from runner.training.deviating_operator import find_deviating_operator

        assert self._baseline is not None
        return find_deviating_operator(
            self.step, self._pipeline, self._baseline, snapshot, self.contract
        )

    def _yardsticks(self, repeat: Callable[..., Values]) -> Iterator[Values]:
        """Yields the results of the baseline when it is perturbed by rounding."""
        for seed in YARDSTICK_SEEDS:
            yield repeat(noise=GradientNoise(seed))

    def keep_checksum(self) -> None:
        """Remembers a checksum of the state, which nothing may change until the next update."""
        started = self._clock()
        self._checksum = checksum(self.step.learner.complete_state())
        self.seconds += self._clock() - started

    def compare_checksum(self) -> None:
        """Raises the alarm if a bit of the state has changed since ``keep_checksum``."""
        expected = self._checksum
        if expected is None:
            return
        started = self._clock()
        self._checksum = None
        actual = checksum(self.step.learner.complete_state())
        self._checksum_seconds = self._clock() - started
        self.seconds += self._checksum_seconds
        if torch.equal(expected, actual):
            return
        entry = ""
        if expected.shape == actual.shape:
            names = _names(self.step.learner.complete_state())
            index = int((expected != actual).nonzero()[0])
            entry = f" ('{names[index]}')"
        self._raise_alarm(
            f"the state after update {self.step.progress.updates:,} has changed before the next "
            f"one{entry}: memory is broken, or something writes into parameters between updates"
        )

    def _raise_alarm(self, message: str) -> None:
        self.alarms.append(message)
        if self.config.on_alarm == "stop":
            raise SentinelError(f"sentinel: {message}")
        _log.warning("sentinel: %s", message)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics that are logged: comparisons, alarms, and the share of the time."""
        elapsed = self._clock() - self._started
        return {
            "perf/sentinel_checked": float(self.checked),
            "perf/sentinel_alarms": float(len(self.alarms)),
            "perf/sentinel_share": self.seconds / elapsed if elapsed > 0 else 0.0,
        }

    def summary(self) -> str:
        """Returns the number of comparisons, and which faults would have been detected."""
        if not self.checked:
            return (
                f"none of {self.updates:,} updates was compared: "
                "the training is too short for this share"
            )
        alarms = f"{len(self.alarms)} alarms" if self.alarms else "no alarm"
        compared = (
            f"{self.checked:,} of {self.updates:,} updates repeated with the baseline, "
            f"{alarms}"
        )
        if isinstance(self.contract, Statistical):
            kinds = ", ".join(statistical_stages(self._pipeline))
            return (
                f"{compared}; because of {kinds} only the form of numbers is compared"
            )
        share = self.checked / max(1, self.updates)
        interval = max(1, round(self.updates / self.checked))
        return (
            f"{compared}; a fault in every update is detected within {interval:,} updates, "
            f"one in a single update with a probability of {share:.2%}"
        )


def contract_of(pipeline: Assembly) -> Contract:
    """Returns the weakest contract of the active stages of a pipeline."""
    order = (Exact, Close, Statistical)

    def weakness(contract: Contract) -> int:
        return order.index(type(contract))

    return max(_contracts(pipeline).values(), key=weakness, default=Exact())


def statistical_stages(pipeline: Assembly) -> list[str]:
    """Returns the active stages that promise neither bits nor algebra."""
    return [
        kind
        for kind, contract in _contracts(pipeline).items()
        if isinstance(contract, Statistical)
    ]


def _contracts(pipeline: Assembly) -> dict[str, Contract]:
    from runner.training.pipeline import setting_of

    context = setting_of(pipeline.recipe, pipeline.device)
    return {kind: context.stages[kind].contract(context) for kind in pipeline.stages}


def _first_difference(values: Values, repeated: Values) -> str | None:
    """Returns the name of the first value that differs in a repetition; None if there is none."""
    for name, value in values.items():
        if digest(value) != digest(repeated.get(name)):
            return name
    return None


def _names(state: Any) -> list[str]:
    from runner.system.tensor_trees import leaves

    return [path for path, value in leaves(state) if isinstance(value, Tensor)]
