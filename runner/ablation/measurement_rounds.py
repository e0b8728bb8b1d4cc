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

from runner.ablation.case_log import CaseLog
from runner.ablation.experiment import AblationConfig, Case
from runner.ablation.measurement_log import MeasurementLog
from runner.ablation.shared_wait import SharedWait
from runner.ablation.time_forecast import (
    FEWEST_PROCESSES,
    HEADROOM,
    PROCESSES,
    Pace,
    order,
)
from runner.child.group import ChildGroup
from runner.child.spawn import START_SECONDS, Cause, Child, ChildError
from runner.plugin.contract import Statistical
from runner.plugin.registry import Registry
from runner.proof.verdict import Verdict
from runner.recipe.recipe import Recipe
from runner.system.contention import Contention
from runner.system.errors import RunnerError, UsageError
from runner.tracking.workspace import folder_name
from runner.training.pipeline import resolve_device, setting_of
from runner.training.signals import Stop
from runner.verify.variants import (
    AGAIN,
    BASELINE,
    BASELINES,
    ONE_PROCESS,
    variants_of,
    weakest,
)

MEMORY_SHARE = 0.8
LIMIT_SECONDS = 10.0
"""Approximate time to measure the roofline of the machine."""
COMPARE_SECONDS = 120.0
"""Time limit of a variant for the updates that are compared, and of the baseline for the same."""
TRAIN_EVERY = 2
"""Every second round of a process also trains for a moment, to measure throughput."""
Gate = Callable[[Recipe, Registry, Sequence[str], float], Verdict]
"""Judges a recipe with exactly these stages within the given seconds."""


class Reporter(Protocol):
    """Display of the progress of a measurement."""

    started: float
    """Start of the budget, by the monotonic clock."""

    def say(self, text: str) -> None:
        """Reports a line that should remain visible."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Returns a context manager for a phase that takes a while."""


@dataclass
class Measurement:
    """A case, new or continued; raises a UsageError if none of its stages can run here."""

    case: Case
    config: AblationConfig
    registry: Registry
    log: MeasurementLog
    reporter: Reporter
    stop: Stop
    share: float = 1.0
    """Share of a longer budget that would be time to measure this case."""

    def __post_init__(self) -> None:
        self.device = resolve_device(self.case.recipe.device)
        self.variants = variants_of(
            self.case.recipe,
            self.device,
            self.config.variants,
            self.config.processes,
        )
        self.stages = {
            AGAIN: (),
            **{variant.name: variant.stages for variant in self.variants.variants},
        }
        self.children: dict[str, ChildGroup] = {}
        self.waits = SharedWait(self.case.recipe.system, self._command)
        self.sizes: dict[str, int] = {}
        """Batch sizes by variant."""
        self.starts = Counter[str]()
        """Started processes by variant."""
        self.title = f"{self.case.name}: " if self.case.name else ""

    @property
    def lines(self) -> CaseLog:
        """Returns the lines of the log about this case."""
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
        remaining = [
            variant.name
            for variant in self.variants.variants[1:]
            if variant.name not in settled
        ]
        self.latest = deadline if latest is None else latest
        if not remaining:
            return
        with tempfile.TemporaryDirectory(
            prefix="runner-compiled-", ignore_cleanup_errors=True
        ) as self.compiled:
            while remaining and not self.stop:
                with ExitStack() as self.processes:
                    remaining = self._squad(remaining, deadline)

    def judge(self, gate: Gate, deadline: float) -> None:
        """Lets the gate judge every measured variant once, the fastest first, as
        long as there is time.

        Variants that only trainings could prove harmless come last, because
        nothing is trained here.
        """
        lines = self.lines
        judged = lines.by_variant("verdict").keys() | lines.failed.keys()
        unjudged = [
            variant
            for variant in self.variants.variants
            if variant.stages and variant.name not in judged
        ]
        speeds = {
            variant.name: ratio.value if (ratio := lines.ratio(variant.name)) else 0.0
            for variant in unjudged
        }
        in_vain = {
            variant.name: self._is_statistical(variant.stages) for variant in unjudged
        }
        unjudged.sort(
            key=lambda variant: (in_vain[variant.name], -speeds[variant.name])
        )
        for variant in unjudged:
            remaining_seconds = deadline - time.monotonic()
            if self.stop or remaining_seconds <= 0:
                break
            with self.phase(f"is {variant.name} harmless?"):
                verdict = gate(
                    self.case.recipe, self.registry, variant.stages, remaining_seconds
                )
            outcome = {
                "outcome": str(verdict.outcome),
                "contract": verdict.contract,
                "summary": verdict.summary,
            }
            self.add(variant=variant.name, verdict=outcome)

    def _squad(self, remaining: list[str], deadline: float) -> list[str]:
        """Measures the first of these variants, as many as memory allows side by side; returns
        the others.
        """
        self.children = {}
        started = time.monotonic()
        with self.phase("starting the baseline, twice"):
            prepared = self._start(BASELINES)[BASELINE]
        # All processes are replaced together, so a variant adds to the time of every restart.
        restart_s = time.monotonic() - started
        self.add(cost=self.children[BASELINE].ask("cost"))
        memory = self.children[BASELINE].ask("memory")
        side_by_side = max(
            1, int(MEMORY_SHARE * memory["free_bytes"] / memory["own_bytes"])
        )
        round_s = prepared["block_s"] + prepared["train_s"] / TRAIN_EVERY
        pace = Pace(restart_s / len(BASELINES), round_s, self.config.rounds.a_process)
        remaining, pace = self._fitting(
            remaining, pace, deadline - LIMIT_SECONDS, side_by_side
        )
        limit = Child("runner.training.roofline", options={"device": str(self.device)})
        with self.phase("measuring what this machine can do at best"), limit as child:
            self.add(rates=child.answer())
        # Variants that do not fit into memory take their turn after these.
        squad = remaining[:side_by_side]
        for number, name in enumerate(squad, start=1):
            if self.stop:
                break
            is_only = name == squad[-1] and self.children.keys() == set(BASELINES)
            variant_deadline = self.latest if is_only else deadline
            allowed_s = (
                variant_deadline
                - time.monotonic()
                - pace.rest(restart_s + pace.start_s, len(self.children) + 1)
            )
            # Half of the time remains for the others if a compilation never ends.
            allowed_s /= 1 if name == squad[-1] else 2
            if allowed_s < pace.start_s / 2:
                self.add(
                    variant=name, failed="the budget was spent before its turn came"
                )
                self.reporter.say(
                    f"{self.title}left out, too: {name}; what was before it took longer to start"
                )
                continue
            with self.phase(f"starting {name} ({number} of {len(squad)})"):
                restart_s += self._compile(
                    name, min(START_SECONDS, max(allowed_s, 2 * pace.start_s))
                )
        if time.monotonic() + pace.rest(restart_s, len(self.children)) > deadline:
            deadline = self.latest
        reason = self._rounds(deadline, restart_s)
        for name, group in self.children.items():
            self.add(variant=name, memory=group.ask("memory"))
            if group.count > 1 and name != AGAIN and not self.stop:
                self._add_traffic(name)
        if not self.stop:
            self._compare()
        if not self.stop:
            self.add(settled=squad, done=reason)
        return remaining[side_by_side:]

    def _compare(self) -> None:
        """Compares a few updates of every variant, after all that was timed, with the baseline's
        from its states.
        """
        with self.phase("comparing updates with the baseline's"):
            baseline = self.children[BASELINE]
            nothing: list[tuple[bytes, ...]] = [()] * baseline.count
            answers = baseline.ask_each("record", nothing)
            recorded = [(answer["batches"],) for answer in answers]
            for name in self.children:
                if name in BASELINES or self.stop:
                    continue
                reason = self._obstacle(name)
                if reason:
                    comparison = {"updates": 0, "caught": "", "reason": reason}
                else:
                    comparison = self._comparison(name, recorded)
                self.add(variant=name, compared=comparison)

    def _obstacle(self, name: str) -> str:
        """Returns why updates of a variant cannot be compared; empty if they can."""
        recipe = self.case.recipe
        if self.sizes[name] != recipe.train.batch_size:
            return f"its batches have {self.sizes[name]} samples"
        if name == ONE_PROCESS and recipe.data.division == "draws":
            return "several processes draw samples that no single process draws"
        return ""

    def _comparison(
        self, name: str, recorded: Sequence[tuple[bytes, ...]]
    ) -> dict[str, Any]:
        """Returns how updates of a variant with recorded batches differ from the baseline's."""
        candidate, baseline = self.children[name], self.children[BASELINE]
        is_statistical = self._is_statistical(self.stages[name])
        judge = "judge_number" if is_statistical else "judge"
        try:
            answers = candidate.ask_each(
                "make", recorded[: candidate.count], COMPARE_SECONDS
            )
            windows = [(answer["windows"],) for answer in answers]
            # All processes of the baseline make the updates of a single one.
            windows *= baseline.count // len(windows)
            return baseline.ask_each(judge, windows, COMPARE_SECONDS)[0]
        except ChildError as error:
            return {"updates": 0, "caught": "", "reason": str(error)}

    def _add_traffic(self, name: str) -> None:
        """Measures the bytes that the processes of a variant send for an update."""
        try:
            traffic = self.children[name].ask("traffic")
        # The times are valid without it.
        except ChildError as error:
            self.reporter.say(f"{self.title}{name}: bytes were not measured: {error}")
            return
        self.add(variant=name, traffic=traffic)

    def _is_statistical(self, stages: Sequence[str]) -> bool:
        """Returns whether stages promise neither bits nor algebra."""
        contract = weakest(self.case.recipe, stages, self.config.processes)
        return isinstance(contract, Statistical)

    def _fitting(
        self, names: list[str], pace: Pace, deadline: float, side_by_side: int
    ) -> tuple[list[str], Pace]:
        """Returns the variants for which there is time, the most important ones first; the others
        are reported as not measured.

        Rather than none at all there is one in fewer processes.
        """
        seconds = deadline - time.monotonic()
        budget = self.config.budget
        fit = pace.fitting(seconds, len(names), side_by_side)
        total_s = pace.needed(len(names), side_by_side)
        if not fit:
            pace = replace(pace, processes=FEWEST_PROCESSES)
            fit = pace.fitting(seconds, 1, side_by_side)

        def enough(needed: float) -> str:
            """Returns an option with a budget for these seconds and a margin for slower runs."""
            extra = max(0.0, HEADROOM * needed - seconds) / self.share
            return f"--budget {10 * math.ceil((budget + extra) / 10)}"

        cost = (
            f"each variant starts {pace.processes} processes, {pace.start_s:.1f} s each"
        )
        if not fit and not any("update" in entry for entry in self.log.entries):
            statement = f"{budget:g} s are not enough to compare a single variant with the baseline"
            sufficient = f"{enough(pace.needed(1, side_by_side))} would be"
            if len(names) > 1:
                sufficient += f", {enough(total_s)} is enough for all"
            raise UsageError(f"{self.title}{statement}: {cost}; {sufficient}")
        if fit == len(names):
            self.reporter.say(
                f"{self.title}{budget:g} s are enough for every variant that starts as fast as "
                f"the baseline"
            )
            return names, pace
        reason = f"did not fit the budget of {budget:g} s; {enough(total_s)} is enough for all"
        for name in names[fit:]:
            self.add(variant=name, failed=reason)
        fitting = ", ".join(names[:fit]) or "the baseline alone"
        dropped = ", ".join(names[fit:])
        message = (
            f"{budget:g} s are enough for: {fitting}. Left out: {dropped} ({cost}); "
            f"{enough(total_s)} is enough for all"
        )
        self.reporter.say(f"{self.title}{message}")
        return names[:fit], pace

    def _compile(self, name: str, timeout: float) -> float:
        """Starts a variant's first process; returns the seconds that the next will take.

        The next process finds compiled code, unless its stages tune: then nothing of another
        process is used.
        """
        started = time.monotonic()
        prepared = self._start([name], timeout).get(name)
        if prepared is None:
            return 0.0
        seconds = time.monotonic() - started
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
        """Starts the processes of all variants together; prepares one variant after the other."""
        for name in names:
            recipe = replace(
                self.case.recipe,
                stages={
                    kind: self.case.recipe.stages[kind] for kind in self.stages[name]
                },
            )
            options = {"compiled": self._compiled_folder(name), "wait": self.waits.mode}
            group = ChildGroup(
                "runner.ablation.variant_process",
                recipe,
                1 if name == ONE_PROCESS else self.config.processes,
                plugin_files=self.registry.files,
                options=options,
            )
            self.children[name] = self.processes.enter_context(group)
        answers = ((name, self._ask(name, "prepare", timeout)) for name in names)
        preparations = {
            name: prepared for name, prepared in answers if prepared is not None
        }
        lines = self.lines
        for name, prepared in preparations.items():
            self.sizes[name] = prepared["batch_size"]
            if name in lines.failed or name not in lines.by_variant("prepared"):
                self.add(variant=name, prepared=prepared)
        return preparations

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
            # The others continue without this variant.
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

    def _rounds(self, deadline: float, restart_s: float) -> str:
        """Measures rounds of all that have a process, which is another one every few rounds;
        returns why it stopped.
        """
        limits = self.config.rounds
        precision = self.config.precision
        rounds = self.lines.rounds
        done = sum(entry["update"].keys() >= self.children.keys() for entry in rounds)
        number, process = (
            max((entry[key] for entry in rounds), default=0)
            for key in ("round", "process")
        )
        # The next processes have to be started, too.
        started = time.monotonic() - restart_s
        while not self.stop:
            process += 1
            for index in range(min(limits.a_process, limits.most - done)):
                number = number + 1
                done = done + 1
                fewest, widest = self._known()
                precision_text = (
                    f", intervals up to +-{widest:.1%} (wanted {precision:.1%})"
                    if math.isfinite(widest)
                    else ""
                )
                with self.phase(
                    f"round {done} of {limits.most} at most{precision_text}"
                ):
                    self._round(number, process, train=index % TRAIN_EVERY == 0)
                if self.stop:
                    return "interrupted"
            (fewest, widest) = self._known()
            time_now = time.monotonic()
            summary = f"after {done} rounds in {fewest} processes"
            if fewest >= PROCESSES and done >= limits.least and widest <= precision:
                return f"every interval is within +-{precision:.1%} {summary}"
            # The next processes would take as long as these.
            if fewest > 1 and time_now + (time_now - started) > deadline:
                return f"the budget was spent {summary}"
            if fewest > 1 and self.children.keys() == set(BASELINES):
                return "no variant was left to measure"
            if done >= limits.most:
                return f"{limits.most} rounds were measured in {fewest} processes"
            started = time_now
            with self.phase("restarting all processes"):
                self.processes.close()
                self._start(list(self.children))
        return "interrupted"

    def _round(self, number: int, process: int, train: bool) -> None:
        """Measures an update of every variant, and with ``train`` a moment of training."""
        update = {}
        trained = {}
        contentions = []
        # The order changes from round to round, so that periodic load favours no variant.
        for name in order(list(self.children), number):
            if (answer := self._ask(name, "update")) is None:
                continue
            update[name] = answer["seconds"]
            contentions.append(Contention(**answer["contention"]))
            if train and (answer := self._ask(name, "train")) is not None:
                trained[name] = answer
        self.add(
            round=number,
            process=process,
            update=update,
            train=trained,
            wait=self.waits.mode,
        )
        self.waits.observe(contentions)

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
        measured = [ratio for ratio in ratios if ratio is not None]
        if len(measured) < len(ratios):
            return 1, math.inf
        return min(ratio.processes for ratio in measured), max(
            ratio.half_width for ratio in measured
        )
