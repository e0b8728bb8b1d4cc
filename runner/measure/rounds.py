"""Measures variants in separate processes, in rounds, until ratios are precise or time is over.

Two identical processes differ in speed for their entire lifetime. So all are replaced after a few
rounds, and the intervals count processes. Every measurement is a durable line of a file, so that
an interrupted ablation can be continued.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from runner.child.spawn import START_SECONDS, Cause, Child, ChildError
from runner.compare.verdict import Verdict
from runner.measure.case_log import CaseLog
from runner.measure.experiment import AblationConfig, Case
from runner.measure.measurement_log import MeasurementLog
from runner.measure.pace import FEWEST_PROCESSES, HEADROOM, PROCESSES, Pace, order
from runner.measure.shared_wait import SharedWait
from runner.plugin.contract import Statistical
from runner.plugin.registry import Registry
from runner.recipe.recipe import Recipe
from runner.system.errors import RunnerError, UsageError
from runner.tracking.workspace import folder_name
from runner.train.assemble import resolve_device, setting_of
from runner.train.signals import Stop
from runner.verify.variants import AGAIN, BASELINE, BASELINES, variants_of, weakest

MEMORY_SHARE = 0.8
# About what it takes to measure what the machine can do at best.
LIMIT_SECONDS = 10.0
# that a variant has for the updates that are compared, and the baseline for the same ones
COMPARE_SECONDS = 120.0
# Every second round of a process also trains for a moment, to measure throughput.
TRAIN_EVERY = 2
Gate = Callable[[Recipe, Registry, Sequence[str], float], Verdict]
"""Judges a recipe with exactly these stages within the given seconds."""


class Reporter(Protocol):
    """Display of the progress of a measurement."""

    # Since when the budget counts, by the monotonic clock.
    started: float

    def say(self, text: str) -> None:
        """Reports a line that should remain visible."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Entered around what takes a while."""


@dataclass
class Measurement:
    """A case, new or continued; raises a UsageError if none of its stages can run here."""

    case: Case
    config: AblationConfig
    registry: Registry
    log: MeasurementLog
    reporter: Reporter
    stop: Stop
    # Of a longer budget that would be time to measure this case.
    share: float = 1.0

    def __post_init__(self) -> None:
        self.device = resolve_device(self.case.recipe.device)
        self.variants = variants_of(self.case.recipe, self.device, self.config.variants)
        self.stages = {
            AGAIN: (),
            **{variant.name: variant.stages for variant in self.variants.variants},
        }
        self.children: dict[str, Child] = {}
        self.waits = SharedWait(self.case.recipe.system, self._command)
        # Of batches, by variant.
        self.sizes: dict[str, int] = {}
        # Processes by variant.
        self.starts = Counter[str]()
        self.title = f"{self.case.name}: " if self.case.name else ""

    @property
    def lines(self) -> CaseLog:
        """The log's about this case."""
        return self.log.of(self.case.name)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Shows what is being done."""
        return self.reporter.phase(f"{self.title}{name}")

    def add(self, **entry: Any) -> None:
        """Adds a line to the log."""
        self.log.add(case=self.case.name, **entry)

    def run(self, deadline: float, latest: float | None = None) -> None:
        """Measures the variants that are not done, as many side by side as memory allows, and as
        there is time for.

        Args:
            deadline: When the gate's time begins, in seconds of the monotonic clock.
            latest: When that ends, too. The last variant may use it if no other one was measured,
                because there is nothing else to judge.

        A RunnerError if the recipe cannot run here, or not even its baseline could be measured; a
        UsageError if there is not the time for a single variant.
        """
        settled = {name for names in self.lines.values("settled") for name in names}
        left = [
            variant.name
            for variant in self.variants.variants[1:]
            if variant.name not in settled
        ]
        self.latest = deadline if latest is None else latest
        if not left:
            return
        with tempfile.TemporaryDirectory(
            prefix="runner-compiled-", ignore_cleanup_errors=True
        ) as self.compiled:
            while left and not self.stop:
                with ExitStack() as self.processes:
                    left = self._squad(left, deadline)

    def judge(self, gate: Gate, deadline: float) -> None:
        """Lets the gate judge every measured variant once, the fastest first, as
        long as there is time.

        Variants that only trainings could prove harmless come last, because
        nothing is trained here.
        """
        lines = self.lines
        known = lines.by_variant("verdict").keys() | lines.failed.keys()
        asked = [
            variant
            for variant in self.variants.variants
            if variant.stages and variant.name not in known
        ]
        speeds = {
            each.name: ratio.value if (ratio := lines.ratio(each.name)) else 0.0
            for each in asked
        }
        in_vain = {
            each.name: isinstance(weakest(self.case.recipe, each.stages), Statistical)
            for each in asked
        }
        asked.sort(key=lambda each: (in_vain[each.name], -speeds[each.name]))
        for variant in asked:
            left = deadline - time.monotonic()
            if self.stop or left <= 0:
                break
            with self.phase(f"is {variant.name} harmless?"):
                verdict = gate(self.case.recipe, self.registry, variant.stages, left)
            told = {
                "outcome": str(verdict.outcome),
                "contract": verdict.contract,
                "summary": verdict.summary,
            }
            self.add(variant=variant.name, verdict=told)

    def _squad(self, left: list[str], deadline: float) -> list[str]:
        """Measures the first of these variants, as many as memory allows side by side; returns
        the others.
        """
        self.children = {}
        begun = time.monotonic()
        with self.phase("starting the baseline, twice"):
            prepared = self._start(BASELINES)[BASELINE]
        # Seconds of starting all once more.
        again = time.monotonic() - begun
        self.add(cost=self.children[BASELINE].ask("cost"))
        memory = self.children[BASELINE].ask("memory")
        side_by_side = max(
            1, int(MEMORY_SHARE * memory["free_bytes"] / memory["own_bytes"])
        )
        round_s = prepared["block_s"] + prepared["train_s"] / TRAIN_EVERY
        pace = Pace(again / len(BASELINES), round_s, self.config.rounds.a_process)
        left, pace = self._fitting(left, pace, deadline - LIMIT_SECONDS, side_by_side)
        limit = Child("runner.train.roofline", options={"device": str(self.device)})
        with self.phase("measuring what this machine can do at best"), limit as child:
            self.add(rates=child.answer())
        squad = left[:side_by_side]
        for number, name in enumerate(squad, start=1):
            if self.stop:
                break
            is_only = name == squad[-1] and self.children.keys() == set(BASELINES)
            until = self.latest if is_only else deadline
            allowed = (
                until
                - time.monotonic()
                - pace.rest(again + pace.start_s, len(self.children) + 1)
            )
            # A compilation that never ends leaves something to those after it.
            allowed /= 1 if name == squad[-1] else 2
            if allowed < pace.start_s / 2:
                self.add(
                    variant=name, failed="the budget was spent before its turn came"
                )
                self.reporter.say(
                    f"{self.title}left out, too: {name}; what was before it took longer to start"
                )
                continue
            with self.phase(f"starting {name} ({number} of {len(squad)})"):
                again += self._compile(
                    name, min(START_SECONDS, max(allowed, 2 * pace.start_s))
                )
        if time.monotonic() + pace.rest(again, len(self.children)) > deadline:
            deadline = self.latest
        ended = self._rounds(deadline, again)
        for name, child in self.children.items():
            self.add(variant=name, memory=child.ask("memory"))
        if not self.stop:
            self._compare()
        if not self.stop:
            self.add(settled=squad, done=ended)
        return left[side_by_side:]

    def _compare(self) -> None:
        """Compares a few updates of every variant, after all that was timed, with the baseline's
        from its states.
        """
        with self.phase("comparing updates with the baseline's"):
            recorded = self.children[BASELINE].ask("record")["batches"]
            for name, child in self.children.items():
                if name in BASELINES or self.stop:
                    continue
                if self.sizes[name] != self.case.recipe.train.batch_size:
                    reason = f"its batches have {self.sizes[name]} samples"
                    self.add(
                        variant=name,
                        compared={"updates": 0, "caught": "", "reason": reason},
                    )
                    continue
                is_statistical = isinstance(
                    weakest(self.case.recipe, self.stages[name]), Statistical
                )
                judge = "judge_number" if is_statistical else "judge"
                try:
                    made = child.ask("make", COMPARE_SECONDS, recorded)["windows"]
                    told = self.children[BASELINE].ask(judge, COMPARE_SECONDS, made)
                except ChildError as error:
                    told = {"updates": 0, "caught": "", "reason": str(error)}
                self.add(variant=name, compared=told)

    def _fitting(
        self, left: list[str], pace: Pace, deadline: float, side_by_side: int
    ) -> tuple[list[str], Pace]:
        """Returns the variants for which there is time, the most important ones first; the others
        are reported as not measured.

        Rather than none at all there is one in fewer processes.
        """
        seconds = deadline - time.monotonic()
        budget = self.config.budget
        fit = pace.fitting(seconds, len(left), side_by_side)
        whole = pace.needed(len(left), side_by_side)
        if not fit:
            pace = replace(pace, processes=FEWEST_PROCESSES)
            fit = pace.fitting(seconds, 1, side_by_side)

        def enough(needed: float) -> str:
            """Returns an option with a budget for these seconds and a margin for slower runs."""
            return (
                f"--budget "
                f"{10 * math.ceil((budget + max(0.0, HEADROOM * needed - seconds) / self.share) / 10)}"
            )

        why = (
            f"each variant starts {pace.processes} processes, {pace.start_s:.1f} s each"
        )
        if not fit and not any("update" in entry for entry in self.log.entries):
            said = f"{budget:g} s are not enough to compare a single variant with the baseline"
            raise UsageError(
                f"{self.title}{said}: {why}; {enough(pace.needed(1, side_by_side))} would be"
            )
        if fit == len(left):
            said = f"{budget:g} s are enough for every variant that starts as fast as the baseline"
            self.reporter.say(f"{self.title}{said}")
            return left, pace
        reason = (
            f"did not fit the budget of {budget:g} s; {enough(whole)} is enough for all"
        )
        for name in left[fit:]:
            self.add(variant=name, failed=reason)
        kept = ", ".join(left[:fit]) or "the baseline alone"
        dropped = ", ".join(left[fit:])
        message = (
            f"{budget:g} s are enough for: {kept}. Left out: {dropped} ({why}); "
            f"{enough(whole)} is enough for all"
        )
        self.reporter.say(f"{self.title}{message}")
        return left[:fit], pace

    def _compile(self, name: str, timeout: float) -> float:
        """Starts a variant's first process; returns the seconds that the next will take.

        The next process finds compiled code, unless its stages tune: then nothing of another
        process is used.
        """
        begun = time.monotonic()
        prepared = self._start([name], timeout).get(name)
        if prepared is None:
            return 0.0
        seconds = time.monotonic() - begun
        return (
            seconds
            if self._tunes(name)
            else max(0.0, seconds - float(prepared["first_s"]))
        )

    def _tunes(self, name: str) -> bool:
        """Returns whether a stage of a variant selects an implementation by measuring."""
        setting = setting_of(self.case.recipe, self.device, self.stages[name])
        return any(stage.tunes(setting) for stage in setting.stages.values())

    def _compiled_folder(self, name: str) -> str:
        """Returns the folder for the compiled code of a variant's next process."""
        self.starts[name] += 1
        process = f"-{self.starts[name]}" if self._tunes(name) else ""
        return str(Path(self.compiled, folder_name(name) + process))

    def _start(
        self, names: Sequence[str], timeout: float = START_SECONDS
    ) -> dict[str, dict[str, Any]]:
        """Starts one process for each variant together, and prepares them one after the other."""
        for name in names:
            recipe = replace(
                self.case.recipe,
                stages={
                    kind: self.case.recipe.stages[kind] for kind in self.stages[name]
                },
            )
            options = {"compiled": self._compiled_folder(name), "wait": self.waits.mode}
            child = Child(
                "runner.measure.measured",
                recipe,
                plugin_files=self.registry.files,
                options=options,
            )
            self.children[name] = self.processes.enter_context(child)
        answers = ((name, self._ask(name, "prepare", timeout)) for name in names)
        found = {name: prepared for name, prepared in answers if prepared is not None}
        known = self.lines
        for name, prepared in found.items():
            self.sizes[name] = prepared["batch_size"]
            if name in known.failed or name not in known.by_variant("prepared"):
                self.add(variant=name, prepared=prepared)
        return found

    def _ask(
        self, name: str, command: str, timeout: float = 300.0
    ) -> dict[str, Any] | None:
        """Returns the answer of a variant, or None if it fails; raises an error for a baseline."""
        try:
            return self.children[name].ask(command, timeout)
        except ChildError as error:
            if name in BASELINES:
                raise RunnerError(
                    f"{self.title}the baseline cannot be measured: {error}"
                ) from error
            del self.children[name]
            hung = (
                error.cause is Cause.HUNG
                and timeout < START_SECONDS
                and command == "prepare"
            )
            reason = str(error)
            if hung:
                few = f"the budget left it {timeout:.0f} s to start and compile, which were too few"
                reason = f"{few}; --budget {2 * self.config.budget:g} leaves it more"
            self.add(variant=name, failed=reason)
            return None

    def _rounds(self, deadline: float, again: float) -> str:
        """Measures rounds of all that have a process, which is another one every few rounds;
        returns why it stopped.
        """
        limits = self.config.rounds
        precision = self.config.precision
        rounds = self.lines.rounds
        done = sum(each["update"].keys() >= self.children.keys() for each in rounds)
        number, process = (
            max((each[what] for each in rounds), default=0)
            for what in ("round", "process")
        )
        # The next processes have to be started, too.
        begun = time.monotonic() - again
        while not self.stop:
            process += 1
            for turn in range(min(limits.a_process, limits.most - done)):
                number = number + 1
                done = done + 1
                fewest, widest = self._known()
                sure = (
                    f", intervals up to +-{widest:.1%} (wanted {precision:.1%})"
                    if math.isfinite(widest)
                    else ""
                )
                with self.phase(f"round {done} of {limits.most} at most{sure}"):
                    self._round(number, process, train=turn % TRAIN_EVERY == 0)
                if self.stop:
                    return "interrupted"
            (fewest, widest) = self._known()
            now = time.monotonic()
            after = f"after {done} rounds in {fewest} processes"
            if fewest >= PROCESSES and done >= limits.least and widest <= precision:
                return f"every interval is within +-{precision:.1%} {after}"
            # The next ones would take as long as these.
            if fewest > 1 and now + (now - begun) > deadline:
                return f"the budget was spent {after}"
            if fewest > 1 and self.children.keys() == set(BASELINES):
                return "no variant was left to measure"
            if done >= limits.most:
                return f"{limits.most} rounds were measured in {fewest} processes"
            begun = now
            with self.phase("restarting all processes"):
                self.processes.close()
                self._start(list(self.children))
        return "interrupted"

    def _round(self, number: int, process: int, train: bool) -> None:
        """Measures an update of every variant, and with ``train`` a moment of training."""
        update = {}
        trained = {}
        noticed = []
        for name in order(list(self.children), number):
            if (answer := self._ask(name, "update")) is None:
                continue
            update[name] = answer["seconds"]
            noticed.append(answer)
            if train and (answer := self._ask(name, "train")) is not None:
                trained[name] = answer
        self.add(
            round=number,
            process=process,
            update=update,
            train=trained,
            wait=self.waits.mode,
        )
        self.waits.observe(noticed)

    def _command(self, command: str) -> None:
        """Gives every process a command without an answer of interest."""
        for name in list(self.children):
            self._ask(name, command)

    def _known(self) -> tuple[int, float]:
        """Returns the number of processes in which all running variants were measured, and half the
        widest interval of a ratio.
        """
        lines = self.lines
        ratios = [
            lines.ratio(AGAIN, [BASELINE]),
            *map(lines.ratio, self.children.keys() - set(BASELINES)),
        ]
        known = [each for each in ratios if each is not None]
        if len(known) < len(ratios):
            return 1, math.inf
        return min(each.processes for each in known), max(
            each.half_width for each in known
        )
