"""Ablation by memory: every stage alone and all together, each in fresh child processes.

The figures do not vary from process to process, so a variant is measured once. Every measurement
is durable, and an interrupted ablation is continued by the same command.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from runner.ablation.ablation_folder import (
    REPORT,
    RESULT,
    choose_folder,
    describe_experiment,
)
from runner.ablation.ablation_record import heartbeat_of
from runner.ablation.experiment import Case, Experiment, keep_budgets
from runner.ablation.measurement_log import ROUNDS, MeasurementLog
from runner.ablation.measurement_rounds import Reporter
from runner.ablation.memory import UPDATES
from runner.ablation.memory_report import markdown
from runner.ablation.memory_result import (
    CaseMemory,
    MemoryResult,
    VariantMemory,
    remaining,
    share,
)
from runner.ablation.update_memory import UpdateMemory
from runner.child.spawn import START_SECONDS, Child, ChildError
from runner.plugin.registry import Registry
from runner.recipe.lock import write_lock
from runner.system.errors import ExitCode, RunnerError, StorageError, UsageError
from runner.system.files import make_folder, write_durably
from runner.system.hardware import hardware
from runner.system.secrets import redact_values
from runner.system.stored_json import json_text
from runner.tracking.workspace import Workspace, folder_name
from runner.training.pipeline import resolve_device
from runner.training.signals import Stop, stop_on_signals
from runner.verify.variants import (
    ALL,
    BASELINE,
    Group,
    Variant,
    VariantSet,
    required,
    variants_of,
)

MEMORY = "memory"
GROUPS: tuple[Group, ...] = ("alone", "all")
"""Groups of variants that are meaningful for memory, among those of an experiment."""


@dataclass(frozen=True)
class MemoryCase:
    """Measurement of one case, new or continued.

    Attributes:
        case: Setting of the recipe.
        registry: Where plugins come from.
        log: All measurements of the ablation.
        reporter: Shows the progress.
        stop: Set by signals.
        groups: Sets of stages to measure.
    """

    case: Case
    registry: Registry
    log: MeasurementLog
    reporter: Reporter
    stop: Stop
    groups: tuple[Group, ...] = GROUPS

    def run(self, deadline: float) -> None:
        """Measures the variants that are missing, until the deadline of the monotonic clock.

        Raises:
            RunnerError: The recipe cannot run here.
        """
        measured = self._entries(MEMORY).keys() | self._entries("failed").keys()
        names = [
            variant
            for variant in self.variants.variants
            if variant.name not in measured
        ]
        for number, variant in enumerate(names, start=1):
            if self.stop:
                return
            # Without the baseline there is no result at all.
            if variant.name != BASELINE and time.monotonic() > deadline:
                self._add(variant, failed="the budget was spent; --budget allows more")
                continue
            title = f"{self.case.name}: " if self.case.name else ""
            phase = f"{title}measuring {variant.name} ({number} of {len(names)})"
            with self.reporter.phase(phase):
                self._measure(variant)

    def result(self) -> CaseMemory | None:
        """Returns what the log holds; None before the baseline is measured."""
        entries = self._entries(MEMORY)
        if BASELINE not in entries:
            return None
        memories = {
            name: UpdateMemory(**entry[MEMORY]) for name, entry in entries.items()
        }
        measured = [
            variant for variant in self.variants.variants if variant.name in entries
        ]
        results = [
            self._result(variant, entries[variant.name], memories)
            for variant in measured
        ]
        names = self._names_of_single_stages() if "alone" in self.groups else set()
        alone = [item for item in results if item.name in names]
        # A product of some of the stages would be compared with all of them.
        is_complete = names and len(alone) == len(names)
        return CaseMemory(
            name=self.case.name,
            device=str(resolve_device(self.case.recipe.device)),
            threads=entries[BASELINE]["threads"],
            batch_size=self.case.recipe.train.batch_size,
            updates=UPDATES,
            variants=tuple(results),
            product=math.prod(item.adds for item in alone) if is_complete else math.nan,
            product_saved=math.prod(item.adds_saved for item in alone)
            if is_complete
            else math.nan,
            inactive=self.variants.inactive,
            refused=self.variants.refused,
            failed={
                name: entry["failed"] for name, entry in self._entries("failed").items()
            },
            synthetic=self.case.recipe.data.is_synthetic(),
        )

    @cached_property
    def variants(self) -> VariantSet:
        """The baseline, each stage alone, and all stages."""
        recipe = self.case.recipe
        return variants_of(recipe, resolve_device(recipe.device), self.groups)

    def _names_of_single_stages(self) -> set[str]:
        """Returns the names of the variants that have one stage and the stages that it requires."""
        recipe = self.case.recipe
        variants = self.variants
        names = set()
        for kind in recipe.stages:
            if kind in variants.inactive:
                continue
            variant = variants.find({kind} | required(recipe.stages, kind))
            names.add(variant.name if variant is not None else kind)
        return names

    def _result(
        self,
        variant: Variant,
        entry: Mapping[str, Any],
        memories: Mapping[str, UpdateMemory],
    ) -> VariantMemory:
        memory = memories[variant.name]
        baseline = memories[BASELINE]
        required_variant = self._required(variant)
        name = BASELINE if required_variant is None else required_variant.name
        reference = memories.get(name, baseline)
        return VariantMemory(
            name=variant.name,
            also=variant.also,
            stages=variant.stages,
            memory=memory,
            process=entry["process"],
            remaining=remaining(memory, baseline),
            remaining_saved=share(memory.saved, baseline.saved),
            adds=remaining(memory, reference),
            adds_saved=share(memory.saved, reference.saved),
            notes=tuple(
                f"{kind}: {note}"
                for kind, notes in entry["notes"].items()
                for note in notes
            ),
        )

    def _required(self, variant: Variant) -> Variant | None:
        """Returns the variant with the stages that the stage of a single-stage variant requires."""
        stages = self.case.recipe.stages
        for kind in variant.stages:
            kinds = required(stages, kind)
            if {kind} | kinds == set(variant.stages):
                return self.variants.find(kinds)
        return None

    def _measure(self, variant: Variant) -> None:
        """Measures a variant in child processes, and adds a line to the log."""
        stages = {kind: self.case.recipe.stages[kind] for kind in variant.stages}
        recipe = replace(self.case.recipe, stages=stages)
        # The thresholds that make freed memory visible would change the size of the process, so
        # each purpose has a process.
        try:
            answers = {}
            for purpose in ("update", "process"):
                options = {"purpose": purpose, "updates": UPDATES}
                module = "runner.ablation.memory_child"
                files = self.registry.files
                with Child(
                    module, recipe, plugin_files=files, options=options
                ) as child:
                    answers[purpose] = child.answer(
                        START_SECONDS, stop=lambda: bool(self.stop)
                    )
        except ChildError as error:
            if self.stop:
                return
            if variant.name == BASELINE:
                raise
            self._add(variant, failed=str(error))
            return
        update = answers["update"]
        process = answers["process"]["process"]
        self._add(
            variant,
            **{key: update[key] for key in (MEMORY, "notes", "threads")},
            process=process,
        )

    def _add(self, variant: Variant, **entry: Any) -> None:
        self.log.add(case=self.case.name, variant=variant.name, **entry)

    def _entries(self, key: str) -> dict[str, dict[str, Any]]:
        """Returns the lines of this case that have a key, by variant."""
        lines = (
            entry for entry in self.log.entries if entry.get("case") == self.case.name
        )
        return {entry["variant"]: entry for entry in lines if key in entry}


def ablate_memory(
    experiment: Experiment,
    registry: Registry,
    workspace: Workspace,
    out: Path | None,
    fresh: bool,
    command: str,
    reporter: Reporter,
) -> MemoryResult:
    """Measures the memory of every variant and leaves a report and the figures in a folder.

    Args:
        experiment: What to measure. Of its settings, only the budget applies.
        registry: Where plugins come from.
        workspace: Place of the folder, unless ``out`` is given.
        out: The user's folder.
        fresh: Starts again, although an interrupted ablation could be continued.
        command: The command line, for the report.
        reporter: Shows the progress. The budget counts from its start.

    Raises:
        StorageError: The folder cannot be written.
        UsageError: The folder belongs to something else, or the file asks for several processes.
        RunnerError: The recipe cannot run here, or the baseline was not measured.
    """
    if experiment.config.processes > 1:
        count = experiment.config.processes
        raise UsageError(
            f"processes: {count}, and memory is measured in one process; remove it"
        )
    experiment = keep_budgets(experiment, registry, reporter.say)
    description = describe_experiment(experiment) | {"metric": MEMORY}
    with stop_on_signals() as stop:
        folder = choose_folder(workspace, description, out, fresh)
        if (folder / ROUNDS).exists():
            reporter.say(f"continuing in {folder}")
        try:
            with closing(MeasurementLog(folder, description)) as log:
                result = _measure(
                    experiment, registry, workspace, log, reporter, stop, command
                )
                write_durably(folder / REPORT, markdown(result))
                if not stop:
                    # This file marks the ablation as finished.
                    text = json_text(redact_values(result.data()), indent=1)
                    write_durably(folder / RESULT, f"{text}\n")
        except OSError as error:
            hint = "free some space, or name another --out"
            raise StorageError(f"{folder}: {error.strerror}; {hint}") from error
    return replace(result, signal=stop.received or 0)


def _measure(
    experiment: Experiment,
    registry: Registry,
    workspace: Workspace,
    log: MeasurementLog,
    reporter: Reporter,
    stop: Stop,
    command: str,
) -> MemoryResult:
    """Measures all cases and keeps the record of the ablation."""
    groups = (
        tuple(group for group in GROUPS if group in experiment.config.variants)
        or GROUPS
    )
    cases = [
        MemoryCase(case, registry, log, reporter, stop, groups)
        for case in experiment.cases
    ]
    goal = sum(len(case.variants.variants) for case in cases)

    def count() -> int:
        return sum(MEMORY in entry for entry in log.entries)

    with heartbeat_of(experiment, log, workspace, "variants", goal, count) as record:
        for case in cases:
            name = case.case.name
            locks = log.folder / "locks" / (folder_name(name) if name else "recipe")
            make_folder(locks)
            write_lock(case.case.recipe, locks, registry, results=log.folder)
            case.run(reporter.started + experiment.config.budget)
        results = [memory for case in cases if (memory := case.result()) is not None]
        if not results:
            error = RunnerError(
                "interrupted before the baseline was measured; run the command again"
            )
            error.exit_code = ExitCode(128 + int(stop.received or 0))
            raise error
        result = MemoryResult(
            name=experiment.config.name,
            digest=experiment.digest,
            command=command,
            machine=hardware() | {"torch": torch.__version__},
            cases=tuple(results),
            seconds=log.seconds,
            folder=str(log.folder),
            interrupted=bool(stop),
        )
        metrics = [*result.metrics()]
        record.update(
            status="STOPPED" if stop else "FINISHED",
            metrics={name: value for name, _, value in metrics},
            headline=tuple(name for name, variant, _ in metrics if variant == ALL),
        )
    return result
