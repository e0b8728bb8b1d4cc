"""Measures every variant of a recipe in a child process of its own, in rounds, until it is sure or out of time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.child.spawn import START_SECONDS, Child, ChildError
from runner.compare.noninferiority import FEWEST_ROUNDS, of_ratios
from runner.system.errors import RunnerError
from runner.train.assemble import resolve_device
from runner.verify.variants import AGAIN, BASELINE, Variant, VariantSet

if TYPE_CHECKING:
    from runner.measure.experiment import AblationConfig, Case
    from runner.measure.measurement_log import CaseLog, MeasurementLog
    from runner.train.signals import Stop

SETUP_SHARE = 0.75
"""Of a squad's time: what is not ready by then is not measured, because nothing would be left to measure it in."""
MEMORY_SHARE = 0.8
TRAIN_EVERY = 2  # every second round also trains a moment, for the throughput of a whole training


@dataclass
class Measurement:
    """One case, new or continued."""

    case: Case
    variants: VariantSet
    config: AblationConfig
    plugin_files: Sequence[Path]
    log: MeasurementLog
    say: Callable[[str], None]
    stop: Stop
    children: dict[str, Child] = field(default_factory=dict)

    def run(self, deadline: float) -> None:
        """Measures the variants that are not done, as many side by side as memory allows.

        Raises:
            RunnerError: the recipe cannot run here, or not even its baseline could be measured.
        """
        settled = {name for names in self.lines.values("settled") for name in names}
        left = [variant for variant in self.variants.variants[1:] if variant.name not in settled]
        if not left:
            return
        with ExitStack() as baselines:
            self.tell("measuring what this machine can do at best")
            device = str(resolve_device(self.case.recipe.device))
            with Child("runner.measure.limit", options={"device": device}) as child:
                self.add(rates=child.answer())
            try:
                for name in (BASELINE, AGAIN):  # the least that there must be
                    self._start(name, (), baselines, deadline + START_SECONDS)
            except ChildError as error:
                raise RunnerError(f"{self.title}the baseline cannot be measured: {error}") from error
            memory = self.children[BASELINE].ask("memory")
            side_by_side = max(1, int(MEMORY_SHARE * memory["free_bytes"] / memory["own_bytes"]))
            for start in range(0, len(left), side_by_side):
                now, squads = time.monotonic(), math.ceil((len(left) - start) / side_by_side)
                self._squad(left[start : start + side_by_side], now + max(0.0, deadline - now) / squads)
            self._memory((BASELINE, AGAIN))

    @property
    def lines(self) -> CaseLog:
        """The log's about this case."""
        return self.log.of(self.case.name)

    @property
    def title(self) -> str:
        """Begins what is said of a case among others."""
        return f"{self.case.name}: " if self.case.name else ""

    def tell(self, text: str) -> None:
        """Shows progress."""
        self.say(f"{self.title}{text}")

    def add(self, **entry: Any) -> None:
        """Adds a line to the log."""
        self.log.add(case=self.case.name, **entry)

    def _start(self, name: str, stages: Sequence[str], processes: ExitStack, deadline: float) -> None:
        child = Child("runner.measure.measured", self.case.recipe, stages=stages, plugin_files=self.plugin_files)
        processes.callback(child.close)
        prepared = child.ask("prepare", min(START_SECONDS, max(30.0, deadline - time.monotonic())))
        if name == BASELINE:
            self.add(cost=child.ask("cost"))
        self.children[name] = child
        self.add(variant=name, prepared=prepared)

    def _squad(self, squad: Sequence[Variant], deadline: float) -> None:
        """Measures variants side by side."""
        begun = time.monotonic()
        with ExitStack() as processes:
            for number, variant in enumerate(squad, start=1):
                if self.stop:
                    return
                if time.monotonic() - begun > SETUP_SHARE * (deadline - begun):
                    self.add(variant=variant.name, failed="the budget was spent before its turn came")
                    continue
                self.tell(f"starting {variant.name} ({number} of {len(squad)})")
                try:
                    self._start(variant.name, variant.stages, processes, deadline)
                except ChildError as error:
                    self.add(variant=variant.name, failed=str(error))
            names = [variant.name for variant in squad if variant.name in self.children]
            ended = self._rounds(names, deadline)
            self._memory(names)
            for name in names:
                self.children.pop(name, None)
            if not self.stop:
                self.add(settled=[variant.name for variant in squad], done=ended)

    def _rounds(self, names: Sequence[str], deadline: float) -> str:
        """Measures rounds of all these variants and the baselines; returns why it stopped."""
        least, most, precision = self.config.rounds.least, self.config.rounds.most, self.config.precision
        half = len(names) // 2
        every = [BASELINE, *names[:half], AGAIN, *names[half:]]  # A/A sees as much drift as the variants do
        rounds = self.lines.rounds
        number, done = max(rounds, default=0), sum(each.keys() >= set(every) for each in rounds.values())
        while done < most:
            if self.stop:
                return "interrupted"
            number, done = number + 1, done + 1
            self._round(every, number)
            lines = self.lines
            ratios = [lines.ratios(AGAIN, BASELINE), *map(lines.ratios, names)]
            widest = max(of_ratios(own).half_width if len(own) >= FEWEST_ROUNDS else math.inf for own in ratios)
            sure = f", intervals up to +-{widest:.1%}" if math.isfinite(widest) else ""
            left = max(0.0, deadline - time.monotonic())
            self.tell(f"round {done} of {most} at most{sure} (wanted {precision:.1%}), {left:.0f} s left")
            if done >= least and widest <= precision:
                return f"every interval is within +-{precision:.1%} after {done} rounds"
            if left == 0 and done >= FEWEST_ROUNDS:
                return f"the budget was spent after {done} rounds"
        return f"{most} rounds were measured"

    def _round(self, every: Sequence[str], number: int) -> None:
        update, train = {}, {}
        for name in order([each for each in every if each in self.children], number):
            try:
                update[name] = self.children[name].ask("update")["seconds"]
                if number % TRAIN_EVERY == 0:
                    train[name] = self.children[name].ask("train")
            except ChildError as error:
                if name in (BASELINE, AGAIN):
                    raise RunnerError(f"{self.title}the baseline failed: {error}") from error
                update.pop(name, None)
                del self.children[name]
                self.add(variant=name, failed=str(error))
        self.add(round=number, update=update, train=train)

    def _memory(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.children:
                self.add(variant=name, memory=self.children[name].ask("memory"))


def order(names: Sequence[str], number: int) -> list[str]:
    """The order of one round: turned by one place every second round, and backwards in every other one.

    Over twice as many rounds as names, each takes every place equally often, and follows its neighbours as often as
    they follow it: a machine that becomes slower or faster favours none.
    """
    start = number // 2 % max(1, len(names))
    turned = [*names[start:], *names[:start]]
    return turned[::-1] if number % 2 else turned
