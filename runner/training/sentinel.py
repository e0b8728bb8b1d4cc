"""Verifies updates while a training goes on: repeats some of them with the baseline, and compares."""

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
from runner.system.tensor_trees import tensors
from runner.training.deviation import Deviation, find_deviations
from runner.training.repetition import (
    BaselineLearner,
    GradientNoise,
    Snapshot,
    Values,
    values_of,
)

if TYPE_CHECKING:
    from runner.proof.operator_search import DivergingOperator
    from runner.training.pipeline import Assembly
    from runner.training.step import Drawn, Step

FIRST = 2
"""Updates before the first one that is repeated: stages compile in them."""
YARDSTICK_SEEDS = (1, 2, 3)
FIRST_COST = 8
"""Updates that the first comparison is expected to take: repetitions, copies and a second learner."""
_log = logging.getLogger(__name__)


class Sentinel:
    """Calls a training's step, and repeats some of its updates with the same learner without stages.

    A repeated update starts from a copy of the state, with the same batch and random numbers. What is compared depends
    on the contract: bits for ``Exact``; for ``Close``, the yardstick is what the baseline does to itself when its state
    and gradients are perturbed by a unit of the last digit, and a deviation that rounding might explain counts when the
    same tensor deviates in the next update, too; for ``Statistical``, only the form of numbers.

    The training is not affected: it comes to the same bits with and without a sentinel.

    Args:
        step: The training's step.
        pipeline: Of the training.
        config: The share of the time that it may take, and what follows an alarm.
        clock: Returns seconds.
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
        """Updates that were compared."""
        self.updates = 0
        """Updates of this process."""
        self.alarms: list[str] = []
        self.last_good = "no update was compared before"
        """The last update that was the baseline's, for a message."""
        self.seconds = 0.0
        """For everything that the sentinel does."""
        self._pipeline = pipeline
        self._clock = clock
        self._started = clock()
        self._cost = 0.0
        self._checksum_seconds = 0.0
        """For the comparison of the last checksum, which follows a repeated update."""
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
        drawn = self.step.draw()
        if drawn is None:
            return None
        return self._repeated(drawn)

    def _is_due(self) -> bool:
        """Returns whether one more comparison keeps to the share of the time, or a suspicion has to be confirmed."""
        if self.updates < FIRST:
            return False
        if self._suspicions:
            return True
        elapsed = self._clock() - self._started
        cost = self._cost if self.checked else FIRST_COST * elapsed / self.updates
        return (
            self.seconds + cost + self._checksum_seconds <= self.config.share * elapsed
        )

    def _repeated(self, drawn: Drawn) -> dict[str, Any] | None:
        earlier = self.seconds
        began = self._clock()
        snapshot = Snapshot.of(self.step, drawn)
        copied = self._clock()
        output = self.step(drawn)
        trained = self._clock()
        self.updates += 1
        try:
            self._compare(snapshot, output)
        finally:
            self._cost = (copied - began) + (self._clock() - trained)
            # The new checksum has counted its time already, which is a part of this.
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
        if deviations and (unstable := _first_difference(baseline, repeat())):
            self._suspicions = []
            self._raise_alarm(
                f"update {number:,}: the baseline repeated from one snapshot is not the same twice ('{unstable}'): "
                "the hardware is broken, or an operator is not deterministic; no stage is to blame"
            )
            return
        if deviations and isinstance(self.contract, Close):
            deviations = find_deviations(
                trained, baseline, self._yardsticks(repeat), self.contract
            )
        earlier = self._suspicions
        self._suspicions = deviations
        if not deviations:
            self.last_good = (
                f"update {number:,} was the last that was compared and good"
            )
            self.keep_checksum()
        proven = [
            deviation
            for deviation in deviations
            if deviation.is_gross or deviation.repeats(earlier)
        ]
        if proven:
            self._suspicions = []
            deviation = proven[0]
            stages = ", ".join(self._pipeline.stages) or "none"
            operator = self._find_operator(snapshot)
            self._raise_alarm(
                f"update {number:,} deviates from the baseline: {deviation} (stages: {stages}); {operator}"
            )

    def _find_operator(self, snapshot: Snapshot) -> DivergingOperator | str:
        # The search is needed for an alarm only.
        from runner.training.deviating_operator import find_deviating_operator

        assert self._baseline is not None
        return find_deviating_operator(
            self.step, self._pipeline, self._baseline, snapshot, self.contract
        )

    def _yardsticks(self, repeat: Callable[..., Values]) -> Iterator[Values]:
        """Yields what the baseline comes to when it is perturbed by rounding."""
        for seed in YARDSTICK_SEEDS:
            yield repeat(noise=GradientNoise(seed))

    def keep_checksum(self) -> None:
        """Remembers a checksum of parameters and optimizer state, which nothing may change until the next update."""
        began = self._clock()
        self._checksum = checksum(self.step.learner.complete_state())
        self.seconds += self._clock() - began

    def compare_checksum(self) -> None:
        """Raises the alarm if a bit of the state has changed since ``keep_checksum``."""
        if self._checksum is None:
            return
        began = self._clock()
        before, self._checksum = self._checksum, None
        after = checksum(self.step.learner.complete_state())
        self._checksum_seconds = self._clock() - began
        self.seconds += self._checksum_seconds
        if not torch.equal(before, after):
            number = self.step.progress.updates
            places = (
                (before != after).nonzero().flatten().tolist()
                if before.shape == after.shape
                else []
            )
            names = _names(self.step.learner.complete_state())
            place = f" ('{names[places[0]]}')" if places else ""
            self._raise_alarm(
                f"the state after update {number:,} has changed before the next one{place}: "
                "memory is broken, or something writes into parameters between updates"
            )

    def _raise_alarm(self, message: str) -> None:
        self.alarms.append(message)
        if self.config.on_alarm == "stop":
            raise SentinelError(f"sentinel: {message}")
        _log.warning("sentinel: %s", message)

    def metrics(self) -> dict[str, float]:
        """Returns what is logged: updates that were compared, alarms, and the share of the time that it took."""
        elapsed = self._clock() - self._started
        return {
            "perf/sentinel_checked": float(self.checked),
            "perf/sentinel_alarms": float(len(self.alarms)),
            "perf/sentinel_share": self.seconds / elapsed if elapsed > 0 else 0.0,
        }

    def summary(self) -> str:
        """Returns what was compared, and which faults would have been detected."""
        share = self.checked / max(1, self.updates)
        every = max(1, round(self.updates / max(1, self.checked)))
        if not self.checked:
            return f"none of {self.updates:,} updates was compared: the training is too short for this share"
        found = f"{len(self.alarms)} alarms" if self.alarms else "no alarm"
        if isinstance(self.contract, Statistical):
            kinds = ", ".join(statistical_stages(self._pipeline))
            compared = f"{self.checked:,} of {self.updates:,} updates repeated with the baseline, {found}"
            return (
                f"{compared}; because of {kinds} only the form of numbers is compared"
            )
        return (
            f"{self.checked:,} of {self.updates:,} updates repeated with the baseline, {found}; a fault in every "
            f"update is detected within {every:,} updates, one in a single update with a probability of {share:.2%}"
        )


def contract_of(pipeline: Assembly) -> Contract:
    """Returns what the active stages of a pipeline promise together: the weakest of their contracts."""
    order = (Exact, Close, Statistical)
    contracts = _contracts(pipeline).values()
    return max(
        contracts, key=lambda contract: order.index(type(contract)), default=Exact()
    )


def statistical_stages(pipeline: Assembly) -> list[str]:
    """Returns the active stages that promise neither bits nor algebra."""
    return [
        kind
        for kind, contract in _contracts(pipeline).items()
        if isinstance(contract, Statistical)
    ]


def _contracts(pipeline: Assembly) -> dict[str, Contract]:
    from runner.training.pipeline import setting_of

    setting = setting_of(pipeline.recipe, pipeline.device)
    return {kind: setting.stages[kind].contract(setting) for kind in pipeline.stages}


def checksum(state: Any) -> Tensor:
    """Returns a number for each tensor of a state that any single flipped bit changes."""
    sums = [
        torch.hash_tensor(tensor.detach().contiguous()).cpu()
        for tensor in tensors(state)
    ]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.uint64)


def _first_difference(values: Values, again: Values) -> str | None:
    return next(
        (
            name
            for name, value in values.items()
            if digest(value) != digest(again.get(name))
        ),
        None,
    )


def _names(state: Any) -> list[str]:
    from runner.system.tensor_trees import leaves

    return [path for path, value in leaves(state) if isinstance(value, Tensor)]
