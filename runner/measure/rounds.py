"""Measures every variant of a recipe in a child process of its own, in rounds, until it is sure or out of time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.child.outcome import ChildError
from runner.child.spawn import START_SECONDS, Child
from runner.compare.noninferiority import FEWEST_ROUNDS, of_ratios
from runner.measure.analysis import analyse, compared, failed_variants, slope, update_rounds
from runner.measure.experiment import Case, Experiment
from runner.measure.measurement_log import MeasurementLog
from runner.measure.result import Result
from runner.plugin.registry import Registry
from runner.recipe.lock import code_of
from runner.system.errors import RunnerError
from runner.system.hardware import hardware
from runner.train.assemble import resolve_device
from runner.train.signals import Stop
from runner.verify.variants import AGAIN, BASELINE, Variant, VariantSet, variants_of

if TYPE_CHECKING:
    from runner.compare.verdict import Verdict
    from runner.recipe.recipe import Recipe

Gate = Callable[["Recipe", Registry, Sequence[str]], "Verdict"]
"""Says whether a recipe with exactly these stages is harmless."""
Say = Callable[[str], None]

SETUP_SHARE = 0.75
"""Of a squad's time: what is not ready by then is not measured, because nothing would be left to measure it in."""
MEMORY_SHARE = 0.8
TRAIN_EVERY = 2
"""Every second round also trains a moment, for the throughput of a whole training."""


def identity(experiment: Experiment) -> dict[str, Any]:
    """What is measured, with what, and where: rounds of two ablations belong together only if all of it is the same."""
    import torch

    facts = {name: value for name, value in hardware().items() if name != "platform"}
    return {
        "name": experiment.config.name,
        "digest": experiment.digest,
        "code": {case.name: code_of(case.recipe) for case in experiment.cases},
        "machine": facts,
        "torch": torch.__version__,
    }


@dataclass
class Ablation:
    """One ablation, new or continued."""

    experiment: Experiment
    registry: Registry
    log: MeasurementLog
    gate: Gate | None
    """Fills the column of verdicts; without it, that stays empty."""
    say: Say
    stop: Stop
    command: str

    def run(self) -> Result:
        """Measures what is still to be measured, and says what all of it means.

        Raises:
            RunnerError: a recipe cannot run here, or not even its baseline could be measured.
        """
        variant_sets = [variants_of(case.recipe, resolve_device(case.recipe.device), self.experiment.config.variants)
                 for case in self.experiment.cases]  # fmt: skip
        self.log.add(load=os.getloadavg()[0])
        for number, (case, variants) in enumerate(zip(self.experiment.cases, variant_sets, strict=True)):
            if not self.stop:
                left = self.experiment.config.budget - self.log.seconds
                remaining = len(variant_sets) - number
                _Measurement(self, case, variants, time.monotonic() + max(0.0, left) / remaining).run()
        for case, variants in zip(self.experiment.cases, variant_sets, strict=True):
            self._judge(case, variants)
        entries = self.log.entries
        cases = tuple(analyse(case, variants, entries)
                      for case, variants in zip(self.experiment.cases, variant_sets, strict=True)
                      if not self.stop or update_rounds(self.of(case)))  # fmt: skip
        return Result(
            name=self.experiment.config.name,
            digest=self.experiment.digest,
            command=self.command,
            machine=hardware(),
            load=max(entry["load"] for entry in entries if "load" in entry),
            cases=cases,
            slope=slope(cases),
            seconds=self.log.seconds,
            folder=str(self.log.folder),
            interrupted=bool(self.stop),
            published_by=self.experiment.config.published_by,
        )

    def of(self, case: Case) -> list[dict[str, Any]]:
        """The log's lines about a case."""
        return [entry for entry in self.log.entries if entry.get("case") == case.name]

    def _judge(self, case: Case, variants: VariantSet) -> None:
        """Asks the gate about every variant that was measured, once."""
        known = {entry["variant"] for entry in self.of(case) if "verdict" in entry} | failed_variants(
            self.of(case)
        ).keys()
        for variant in variants.variants:
            if self.gate is None or self.stop or not variant.stages or variant.name in known:
                continue
            self.say(f"{_title(case)}is {variant.name} harmless?")
            verdict = self.gate(case.recipe, self.registry, variant.stages)
            told = {"outcome": str(verdict.outcome), "contract": verdict.contract, "summary": verdict.summary}
            self.log.add(case=case.name, variant=variant.name, verdict=told)


class _Measurement:
    """One case."""

    def __init__(self, ablation: Ablation, case: Case, variants: VariantSet, deadline: float) -> None:
        self.ablation, self.case, self.variants, self.deadline = ablation, case, variants, deadline
        self.log, self.config = ablation.log, ablation.experiment.config
        self.children: dict[str, Child] = {}

    def run(self) -> None:
        """Measures the variants that are not done, as many side by side as memory allows."""
        settled = {name for entry in self.ablation.of(self.case) for name in entry.get("settled", ())}
        left = [variant for variant in self.variants.variants[1:] if variant.name not in settled]
        if not left:
            return
        with ExitStack() as baselines:
            self._rates()
            for name in (BASELINE, AGAIN):
                self._start(name, (), baselines, self.deadline + START_SECONDS)  # the least that there must be
            squads = list(_split(left, self._fitting()))
            for number, squad in enumerate(squads):
                now = time.monotonic()
                self._squad(squad, now + max(0.0, self.deadline - now) / (len(squads) - number))
            self._memory((BASELINE, AGAIN))

    def _squad(self, squad: Sequence[Variant], deadline: float) -> None:
        begun = time.monotonic()
        with ExitStack() as processes:
            for number, variant in enumerate(squad, start=1):
                if self.ablation.stop:
                    return
                if time.monotonic() - begun > SETUP_SHARE * (deadline - begun):
                    self._fail(variant.name, "the budget was spent before its turn came")
                    continue
                self.ablation.say(f"{_title(self.case)}starting {variant.name} ({number} of {len(squad)})")
                try:
                    self._start(variant.name, variant.stages, processes, deadline)
                except ChildError as error:
                    self._fail(variant.name, str(error))
            names = [variant.name for variant in squad if variant.name in self.children]
            ended = self._rounds(names, deadline)
            self._memory(names)
            for name in names:
                self.children.pop(name, None)
            if not self.ablation.stop:
                self.log.add(case=self.case.name, settled=[variant.name for variant in squad], done=ended)

    def _start(self, name: str, stages: Sequence[str], processes: ExitStack, deadline: float) -> None:
        files = self.ablation.registry.files
        child = Child("runner.measure.measured", self.case.recipe, stages=stages, plugin_files=files)
        processes.callback(child.close)
        patience = min(START_SECONDS, max(30.0, deadline - time.monotonic()))
        try:
            prepared = child.ask("prepare", patience)
            if name == BASELINE:
                self.log.add(case=self.case.name, cost=child.ask("cost"))
        except ChildError as error:
            if not stages:
                raise RunnerError(f"{_title(self.case)}the baseline cannot be measured: {error}") from error
            raise
        self.children[name] = child
        self.log.add(case=self.case.name, variant=name, prepared=prepared)

    def _rounds(self, names: Sequence[str], deadline: float) -> str:
        """Measures rounds of all these variants and the baselines; returns why it stopped."""
        rounds, half = self.config.rounds, len(names) // 2
        every = [BASELINE, *names[:half], AGAIN, *names[half:]]  # A/A sees as much drift as the variants do
        first = 1 + max(update_rounds(self.ablation.of(self.case)), default=0)
        before = [each for each in update_rounds(self.ablation.of(self.case)).values() if each.keys() >= set(every)]
        for number in range(first, first + rounds.most - len(before)):
            if self.ablation.stop:
                return "interrupted"
            update, train = {}, {}
            for name in order([each for each in every if each in self.children], number):
                try:
                    update[name] = self.children[name].ask("update")["seconds"]
                    if number % TRAIN_EVERY == 0:
                        train[name] = self.children[name].ask("train")
                except ChildError as error:
                    if name in (BASELINE, AGAIN):
                        raise RunnerError(f"{_title(self.case)}the baseline failed: {error}") from error
                    update.pop(name, None)
                    del self.children[name]
                    self._fail(name, str(error))
            self.log.add(case=self.case.name, round=number, update=update, train=train)
            done = number - first + 1 + len(before)
            widest = self._widest([AGAIN, *names])
            sure = f", intervals up to +-{widest:.1%}" if math.isfinite(widest) else ""
            self.ablation.say(
                f"{_title(self.case)}round {done} of {rounds.most} at most{sure} (wanted {self.config.precision:.1%}), "
                f"{max(0.0, deadline - time.monotonic()):.0f} s left"
            )
            if done >= rounds.least and widest <= self.config.precision:
                return f"every interval is within +-{self.config.precision:.1%} after {done} rounds"
            if time.monotonic() > deadline and done >= FEWEST_ROUNDS:
                return f"the budget was spent after {done} rounds"
        return f"{rounds.most} rounds were measured"

    def _widest(self, names: Sequence[str]) -> float:
        """Half the width of the widest interval, A/A among them."""
        rounds = update_rounds(self.ablation.of(self.case))
        ratios = [compared(rounds, name, BASELINE if name == AGAIN else "") for name in names]
        return max(of_ratios(values).half_width if len(values) >= FEWEST_ROUNDS else math.inf for values in ratios)

    def _fitting(self) -> int:
        """How many variants fit into memory side by side, judged by the baseline; one at least."""
        answer = self.children[BASELINE].ask("memory")
        return max(1, int(MEMORY_SHARE * answer["free_bytes"] / answer["own_bytes"]))

    def _memory(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.children:
                self.log.add(case=self.case.name, variant=name, memory=self.children[name].ask("memory"))

    def _rates(self) -> None:
        self.ablation.say(f"{_title(self.case)}measuring what this machine can do at best")
        device = resolve_device(self.case.recipe.device)
        with Child("runner.measure.limit", options={"device": str(device)}) as child:
            self.log.add(case=self.case.name, rates=child.answer())

    def _fail(self, name: str, reason: str) -> None:
        self.log.add(case=self.case.name, variant=name, failed=reason)


def order(names: Sequence[str], number: int) -> list[str]:
    """The order of one round: turned by one place every second round, and backwards in every other one.

    Over twice as many rounds as names, each takes every place equally often, and follows its neighbours as often as
    they follow it: a machine that becomes slower or faster favours none.
    """
    start = number // 2 % max(1, len(names))
    turned = [*names[start:], *names[:start]]
    return turned[::-1] if number % 2 else turned


def _split(variants: Sequence[Variant], size: int) -> Iterator[Sequence[Variant]]:
    for start in range(0, len(variants), size):
        yield variants[start : start + size]


def _title(case: Case) -> str:
    return f"{case.name}: " if case.name else ""
