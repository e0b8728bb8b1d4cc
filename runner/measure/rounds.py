"""Measures every variant of a recipe in child processes of its own, in rounds, until it is sure or out of time.

Two processes that do the same differ for as long as they live. So all are started anew after a few rounds, and it is
processes that the intervals count.

What was measured is durable line by line, so that what was interrupted can go on.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

from runner.child.spawn import START_SECONDS, Child, ChildError
from runner.compare.ratio import Ratio, of_processes
from runner.compare.verdict import Verdict
from runner.measure.experiment import PROCESSES, AblationConfig, Case
from runner.plugin.registry import Registry
from runner.recipe.recipe import Recipe
from runner.system.errors import RunnerError, UsageError
from runner.system.files import sync, write_durably
from runner.system.secrets import redact_values
from runner.tracking.workspace import folder_name
from runner.train.assemble import resolve_device
from runner.train.signals import Stop
from runner.verify.variants import AGAIN, BASELINE, BASELINES, variants_of

ROUNDS, HEAD = "rounds.jsonl", "ablation.json"
SETUP_SHARE = 0.75  # of a squad's time, for all starts: what takes more would leave nothing to be measured in
MEMORY_SHARE = 0.8
TRAIN_EVERY = 2  # every second round of a process also trains a moment, for the throughput of a whole training
Gate = Callable[[Recipe, Registry, Sequence[str]], Verdict]  # is a recipe with exactly these stages harmless?
Entry = dict[str, Any]  # one line: whose it is (``case``, ``variant``) and what was measured
Times = Callable[[Entry], Mapping[str, float]]  # seconds by variant, in the line of a round


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
    def rounds(self) -> list[Entry]:
        """The lines of rounds; ``update`` has the seconds of one update by variant."""
        return [entry for entry in self.entries if "update" in entry]

    @property
    def failed(self) -> dict[str, str]:
        """Variants that have failed and were not started again since, with the reason."""
        last = {each["variant"]: each.get("failed") for each in self.entries if each.keys() & {"failed", "prepared"}}
        return {name: str(reason) for name, reason in last.items() if reason is not None}

    def ratios(
        self, name: str, others: Sequence[str] = BASELINES, of: Times = itemgetter("update")
    ) -> dict[int, float]:
        """Seconds of others / seconds of a variant by process: the median over its rounds, of all others in the mean.

        Not of the others' mean: where load comes in bursts, the median of that ratio favours who is compared with it.
        """
        found = {}
        for process, rounds in groupby(self._with({name, *others}, of), itemgetter("process")):
            times = list(map(of, rounds))
            medians = (median(math.log(own[other] / own[name]) for own in times) for other in others)
            found[process] = math.exp(fmean(medians))
        return found

    def ratio(self, name: str, others: Sequence[str] = BASELINES, of: Times = itemgetter("update")) -> Ratio | None:
        """What all processes say; None where there is but one, of which nobody can tell how lucky it is."""
        found, rounds = self.ratios(name, others, of), self._with({name, *others}, of)
        return of_processes(list(found.values()), len(rounds)) if len(found) > 1 else None

    def _with(self, names: set[str], of: Times) -> list[Entry]:
        return [each for each in self.rounds if names <= of(each).keys()]


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
        self.stages = {AGAIN: (), **{variant.name: variant.stages for variant in self.variants.variants}}
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
        left = [variant.name for variant in self.variants.variants[1:] if variant.name not in settled]
        if not left:
            return
        self.tell("measuring what this machine can do at best")
        with Child("runner.measure.limit", options={"device": str(self.device)}) as child:
            self.add(rates=child.answer())
        with tempfile.TemporaryDirectory(prefix="runner-compiled-", ignore_cleanup_errors=True) as self.compiled:
            while left and not self.stop:
                with ExitStack() as self.processes:
                    left = self._squad(left, deadline)

    def judge(self, gate: Gate) -> None:
        """Asks the gate about every variant that was measured, once."""
        known = self.lines.by_variant("verdict").keys() | self.lines.failed.keys()
        for variant in self.variants.variants:
            if variant.stages and variant.name not in known and not self.stop:
                self.tell(f"is {variant.name} harmless?")
                found = gate(self.case.recipe, self.registry, variant.stages)
                told = {"outcome": str(found.outcome), "contract": found.contract, "summary": found.summary}
                self.add(variant=variant.name, verdict=told)

    def _squad(self, left: list[str], deadline: float) -> list[str]:
        """Measures the first of these variants, as many as memory allows side by side; returns the others."""
        begun, self.children = time.monotonic(), {}
        again = sum(map(self._compile, BASELINES))  # seconds of starting all once more
        self.add(cost=self.children[BASELINE].ask("cost"))
        memory = self.children[BASELINE].ask("memory")
        side_by_side = max(1, int(MEMORY_SHARE * memory["free_bytes"] / memory["own_bytes"]))
        squad, seconds = left[:side_by_side], max(0.0, deadline - begun) / math.ceil(len(left) / side_by_side)
        for number, name in enumerate(squad, start=1):
            spent = time.monotonic() - begun
            if self.stop:
                break
            if spent + (PROCESSES - 1) * again > SETUP_SHARE * seconds:
                self.add(variant=name, failed="the budget was spent before its turn came")
                continue
            self.tell(f"starting {name} ({number} of {len(squad)})")
            again += self._compile(name, min(START_SECONDS, max(30.0, seconds - spent)))
        ended = self._rounds(begun + seconds)
        for name, child in self.children.items():
            self.add(variant=name, memory=child.ask("memory"))
        if not self.stop:
            self.add(settled=squad, done=ended)
        return left[side_by_side:]

    def _compile(self, name: str, timeout: float = START_SECONDS) -> float:
        """Starts a variant's first process; returns the seconds that the next will take, which finds compiled code."""
        begun, known = time.monotonic(), self.lines
        prepared = self._start([name], timeout).get(name)
        if prepared is None:
            return 0.0
        if name in known.failed or name not in known.by_variant("prepared"):
            self.add(variant=name, prepared=prepared)
        return max(0.0, time.monotonic() - begun - float(prepared["first_s"]))

    def _start(self, names: Sequence[str], timeout: float = START_SECONDS) -> dict[str, dict[str, Any]]:
        """Gives each a process; they begin at the same time, and are prepared one after the other."""
        for name in names:
            recipe = replace(
                self.case.recipe, stages={kind: self.case.recipe.stages[kind] for kind in self.stages[name]}
            )
            options = {"compiled": str(Path(self.compiled, folder_name(name)))}
            child = Child("runner.measure.measured", recipe, plugin_files=self.registry.files, options=options)
            self.children[name] = self.processes.enter_context(child)
        answers = ((name, self._ask(name, "prepare", timeout)) for name in names)
        return {name: prepared for name, prepared in answers if prepared is not None}

    def _ask(self, name: str, command: str, timeout: float = 300.0) -> dict[str, Any] | None:
        """The answer of a variant; None if it fails, which ends it here, and the whole if it is a baseline."""
        try:
            return self.children[name].ask(command, timeout)
        except ChildError as error:
            if name in BASELINES:
                raise RunnerError(f"{self.title}the baseline cannot be measured: {error}") from error
            del self.children[name]
            self.add(variant=name, failed=str(error))
            return None

    def _rounds(self, deadline: float) -> str:
        """Measures rounds of all that have a process, which is another one every few rounds; returns why it stopped."""
        limits, precision, rounds = self.config.rounds, self.config.precision, self.lines.rounds
        done = sum(each["update"].keys() >= self.children.keys() for each in rounds)
        number, process = (max((each[what] for each in rounds), default=0) for what in ("round", "process"))
        begun = time.monotonic()
        while not self.stop:
            process += 1
            for turn in range(min(limits.a_process, limits.most - done)):
                number, done = number + 1, done + 1
                self._round(number, process, train=turn % TRAIN_EVERY == 0)
                fewest, widest = self._known()
                sure = f", intervals up to +-{widest:.1%}" if math.isfinite(widest) else ""
                left = max(0.0, deadline - time.monotonic())
                self.tell(f"round {done} of {limits.most} at most{sure} (wanted {precision:.1%}), {left:.0f} s left")
                if self.stop:
                    return "interrupted"
            (fewest, widest), now = self._known(), time.monotonic()
            after = f"after {done} rounds in {fewest} processes"
            if fewest >= PROCESSES and done >= limits.least and widest <= precision:
                return f"every interval is within +-{precision:.1%} {after}"
            if fewest >= PROCESSES and now + (now - begun) > deadline:  # the next ones would take as long as these
                return f"the budget was spent {after}"
            if fewest > 1 and self.children.keys() == set(BASELINES):
                return "no variant was left to measure"
            if done >= limits.most:
                return f"{limits.most} rounds were measured in {fewest} processes"
            begun = now
            self.processes.close()
            self._start(list(self.children))
        return "interrupted"

    def _round(self, number: int, process: int, train: bool) -> None:
        """Measures an update of every variant, and with ``train`` a moment of training."""
        update, trained = {}, {}
        for name in order(list(self.children), number):
            if (answer := self._ask(name, "update")) is None:
                continue
            update[name] = answer["seconds"]
            if train and (answer := self._ask(name, "train")) is not None:
                trained[name] = answer
        self.add(round=number, process=process, update=update, train=trained)

    def _known(self) -> tuple[int, float]:
        """In how many processes all were measured that have one now, and half the widest interval of a ratio."""
        lines = self.lines
        ratios = [lines.ratio(AGAIN, [BASELINE]), *map(lines.ratio, self.children.keys() - set(BASELINES))]
        known = [each for each in ratios if each is not None]
        if len(known) < len(ratios):
            return 1, math.inf
        return min(each.processes for each in known), max(each.half_width for each in known)


def order(names: Sequence[str], number: int) -> list[str]:
    """The order of one round, by chance: load that comes back as often as a round does favours none of them."""
    return random.Random(number).sample(names, len(names))
