"""Measures every variant of a recipe in a child process of its own, in rounds, until it is sure or out of time.

What was measured is durable line by line, so that what was interrupted can go on.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.child.spawn import START_SECONDS, Child, ChildError
from runner.compare.noninferiority import FEWEST_ROUNDS, of_ratios
from runner.compare.verdict import Verdict
from runner.measure.experiment import AblationConfig, Case
from runner.plugin.registry import Registry
from runner.recipe.recipe import Recipe
from runner.system.errors import RunnerError, UsageError
from runner.system.files import sync, write_durably
from runner.system.secrets import redact_values
from runner.train.assemble import resolve_device
from runner.train.signals import Stop
from runner.verify.variants import AGAIN, BASELINE, BOTH, Variant, variants_of

ROUNDS, HEAD = "rounds.jsonl", "ablation.json"
SETUP_SHARE = 0.75  # of a squad's time: what is not ready by then would have nothing left to be measured in
MEMORY_SHARE = 0.8
TRAIN_EVERY = 2  # every second round also trains a moment, for the throughput of a whole training
Gate = Callable[[Recipe, Registry, Sequence[str]], Verdict]  # is a recipe with exactly these stages harmless?
Entry = dict[str, Any]  # one line: whose it is (``case``, ``variant``) and what was measured


@dataclass(frozen=True)
class CaseLog:
    """The lines about one case."""

    entries: Sequence[Entry]

    def values(self, key: str) -> list[Any]:
        """What lines have under a key, in their order."""
        return [entry[key] for entry in self.entries if key in entry]

    def by_variant(self, key: str) -> dict[str, Any]:
        """The last value that every variant has under a key."""
        return {entry["variant"]: entry[key] for entry in self.entries if key in entry}

    @property
    def rounds(self) -> dict[int, dict[str, float]]:
        """Seconds of one update by round and variant; ``BOTH`` among them."""
        updates = {entry["round"]: entry["update"] for entry in self.entries if "update" in entry}
        return {number: {**own, BOTH: (own[BASELINE] + own[AGAIN]) / 2} for number, own in updates.items()}

    @property
    def failed(self) -> dict[str, str]:
        """Variants that have failed and were not started again since, with the reason."""
        last = {each["variant"]: each.get("failed") for each in self.entries if each.keys() & {"failed", "prepared"}}
        return {name: str(reason) for name, reason in last.items() if reason is not None}

    def ratios(self, name: str, other: str = BOTH) -> list[float]:
        """Seconds of ``other`` / seconds of ``name``, for each round that has them."""
        return [each[other] / each[name] for each in self.rounds.values() if name in each and other in each]


class MeasurementLog:
    """All lines, in the folder of one ablation; its identity beside them tells whether another one is the same.

    A UsageError if another process measures in the folder.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / ROUNDS).open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            reason = "another process measures in this folder; wait for it, or name another"
            raise UsageError(f"{folder}: {reason}") from None
        if not (folder / HEAD).exists():
            write_durably(folder / HEAD, json.dumps(identity, indent=1) + "\n")
        data = (folder / ROUNDS).read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        self._file.truncate(len(whole))  # without a line that a crash has torn
        self.entries: list[Entry] = []
        for line in whole.splitlines():
            with suppress(ValueError):
                self.entries.append(json.loads(line))
        spent = {entry["session"]: float(entry["spent"]) for entry in self.entries}
        self.earlier_seconds = sum(spent.values())
        self._session = 1 + max(spent, default=0)
        self._started = time.monotonic()
        sync(folder)

    @property
    def seconds(self) -> float:
        """Spent in all sessions so far."""
        return self.earlier_seconds + time.monotonic() - self._started

    def of(self, case: str) -> CaseLog:
        """The lines about the case of that name."""
        return CaseLog([entry for entry in self.entries if entry.get("case") == case])

    def add(self, **entry: Any) -> None:
        """Adds a line, which is durable when this returns; an OSError if the disk does not take it."""
        spent = round(time.monotonic() - self._started, 3)
        whole = {"session": self._session, "spent": spent, **redact_values(entry)}
        self._file.write((json.dumps(whole) + "\n").encode())
        os.fsync(self._file)
        self.entries.append(whole)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def identity_of(folder: Path) -> dict[str, Any] | None:
    """What the ablation in a folder measures; None if there is none."""
    with suppress(OSError, ValueError):
        if isinstance(found := json.loads((folder / HEAD).read_text(encoding="utf-8")), dict):
            return found
    return None


@dataclass
class Measurement:
    """One case, new or continued; a UsageError if none of its stages may run here."""

    case: Case
    config: AblationConfig
    registry: Registry
    log: MeasurementLog
    say: Callable[[str], None]
    stop: Stop

    def __post_init__(self) -> None:
        self.device = resolve_device(self.case.recipe.device)
        self.variants = variants_of(self.case.recipe, self.device, self.config.variants)
        self.children: dict[str, Child] = {}
        self.title = f"{self.case.name}: " if self.case.name else ""  # begins what is said of a case among others

    @property
    def lines(self) -> CaseLog:
        """The log's about this case."""
        return self.log.of(self.case.name)

    def tell(self, text: str) -> None:
        """Shows progress."""
        self.say(f"{self.title}{text}")

    def add(self, **entry: Any) -> None:
        """Adds a line to the log."""
        self.log.add(case=self.case.name, **entry)

    def run(self, deadline: float) -> None:
        """Measures the variants that are not done, as many side by side as memory allows.

        A RunnerError if the recipe cannot run here, or not even its baseline could be measured.
        """
        settled = {name for names in self.lines.values("settled") for name in names}
        left = [variant for variant in self.variants.variants[1:] if variant.name not in settled]
        if not left:
            return
        self.tell("measuring what this machine can do at best")
        with Child("runner.measure.limit", options={"device": str(self.device)}) as child:
            self.add(rates=child.answer())
        with ExitStack() as baselines:
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
            self.add(variant=BASELINE, memory=self.children[BASELINE].ask("memory"))

    def judge(self, gate: Gate) -> None:
        """Asks the gate about every variant that was measured, once."""
        known = self.lines.by_variant("verdict").keys() | self.lines.failed.keys()
        for variant in self.variants.variants:
            if variant.stages and variant.name not in known and not self.stop:
                self.tell(f"is {variant.name} harmless?")
                found = gate(self.case.recipe, self.registry, variant.stages)
                told = {"outcome": str(found.outcome), "contract": found.contract, "summary": found.summary}
                self.add(variant=variant.name, verdict=told)

    def _start(self, name: str, stages: Sequence[str], processes: ExitStack, deadline: float) -> None:
        recipe = replace(self.case.recipe, stages={kind: self.case.recipe.stages[kind] for kind in stages})
        child = processes.enter_context(Child("runner.measure.measured", recipe, plugin_files=self.registry.files))
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
            for name in names:
                if (child := self.children.pop(name, None)) is not None:
                    self.add(variant=name, memory=child.ask("memory"))
            if not self.stop:
                self.add(settled=[variant.name for variant in squad], done=ended)

    def _rounds(self, names: Sequence[str], deadline: float) -> str:
        """Measures rounds of all these variants and the baselines; returns why it stopped."""
        limits, precision, half, rounds = self.config.rounds, self.config.precision, len(names) // 2, self.lines.rounds
        every = [BASELINE, *names[:half], AGAIN, *names[half:]]  # A/A sees as much drift as the variants do
        number, done = max(rounds, default=0), sum(each.keys() >= set(every) for each in rounds.values())
        while done < limits.most:
            if self.stop:
                return "interrupted"
            number, done = number + 1, done + 1
            update, train = {}, {}
            for name in order([each for each in every if each in self.children], number):
                try:
                    seconds = self.children[name].ask("update")["seconds"]
                    if number % TRAIN_EVERY == 0:
                        train[name] = self.children[name].ask("train")
                    update[name] = seconds
                except ChildError as error:
                    if name in (BASELINE, AGAIN):
                        raise RunnerError(f"{self.title}the baseline failed: {error}") from error
                    del self.children[name]
                    self.add(variant=name, failed=str(error))
            self.add(round=number, update=update, train=train)
            lines = self.lines
            ratios = [lines.ratios(AGAIN, BASELINE), *map(lines.ratios, names)]
            widest = max(of_ratios(own).half_width if len(own) >= FEWEST_ROUNDS else math.inf for own in ratios)
            sure = f", intervals up to +-{widest:.1%}" if math.isfinite(widest) else ""
            left = max(0.0, deadline - time.monotonic())
            self.tell(f"round {done} of {limits.most} at most{sure} (wanted {precision:.1%}), {left:.0f} s left")
            if done >= limits.least and widest <= precision:
                return f"every interval is within +-{precision:.1%} after {done} rounds"
            if left == 0 and done >= FEWEST_ROUNDS:
                return f"the budget was spent after {done} rounds"
        return f"{limits.most} rounds were measured"


def order(names: Sequence[str], number: int) -> list[str]:
    """The order of one round: turned by one place every second round, and backwards in every other one.

    Over twice as many rounds as names, each takes every place equally often, and follows its neighbours as often as
    they follow it: a machine that becomes slower or faster favours none.
    """
    start = number // 2 % max(1, len(names))
    turned = [*names[start:], *names[:start]]
    return turned[::-1] if number % 2 else turned
