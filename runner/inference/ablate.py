"""Measures every stage of a recipe's ``inference`` on this machine: time, bytes
and quality of a run's model.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from runner.compare.clock import Timing, clock
from runner.compare.fresh import FreshBatches
from runner.compare.ratio import Effect
from runner.compare.verdict import Outcome, Verdict, worst
from runner.inference.gate import InferenceGate, answering
from runner.inference.model import build
from runner.plugin.contract import Exact
from runner.plugin.source import Batch, Source
from runner.system.errors import ExitCode, StorageError, UsageError
from runner.system.files import is_writable, make_folder, write_durably
from runner.system.hardware import hardware
from runner.system.secrets import redact_values
from runner.train.assemble import resolve_device
from runner.train.trained import Trained
from runner.verify.surroundings import resized
from runner.verify.variants import AGAIN, BASELINE, VariantSet, variants_of, weakest

SIZES = (1, 16)
"""Of the batches that are timed: one request, and several that came together."""
FEWEST_SECONDS = 2.0
"""The shortest time for the rounds of one comparison that gives a result."""
SHARE = 0.6
"""Of the budget, for rounds; the rest is for building, warming up and the gate."""
RESULT = "inference.json"


@dataclass(frozen=True)
class Answering:
    """The measurements of one set of stages."""

    name: str
    stages: tuple[str, ...]
    timings: Mapping[int, Timing]
    """Against the baseline, by size of the batch."""
    bytes: int
    """Of the model in files."""
    bytes_in_memory: int
    value: float | None
    """Mean objective over the evaluations of the gate; None if the gate needed none."""
    verdict: Verdict | None
    """The gate's; None of the baseline."""

    @property
    def throughput(self) -> float:
        """Answers a second in the largest batches."""
        size = max(self.timings)
        return size / self.timings[size].changed_ms * 1e3

    def data(self) -> dict[str, Any]:
        """Returns the measurements as a JSON object."""
        timings = {
            str(size): {
                "ms": each.changed_ms,
                "baseline_ms": each.baseline_ms,
                "ratio": None if each.caught else asdict(each.ratio),
                "a_a": asdict(each.a_a),
                "effect": each.effect,
                "first_s": each.changed_warm_up.first_s,
                "caught": each.caught,
            }
            for size, each in self.timings.items()
        }
        verdict = (
            None
            if self.verdict is None
            else {"verdict": self.verdict.outcome, "summary": self.verdict.summary}
        )
        own = {
            name: getattr(self, name)
            for name in (
                "name",
                "stages",
                "bytes",
                "bytes_in_memory",
                "throughput",
                "value",
            )
        }
        return own | {"timings": timings, "verdict": verdict}


@dataclass(frozen=True)
class InferenceResult:
    """The result of ``runner ablate --of``."""

    recipe: str
    run: str
    stages: Mapping[str, Any]
    """The section ``inference``, with nothing left to defaults."""
    metric: str | None
    rows: tuple[Answering, ...]
    """The baseline against itself first."""
    inactive: Mapping[str, str]
    machine: Mapping[str, Any]
    load: float
    """The load average at the start."""
    seconds: float
    folder: Path
    synthetic: bool = False
    """Whether the data are synthetic."""

    @property
    def baseline(self) -> Answering:
        """The model without any stage, against itself."""
        return self.rows[0]

    @property
    def exit_code(self) -> ExitCode:
        """3 if the gate failed a set of stages or the clock caught one, 4 if the machine is too
        noisy, else 0.
        """
        caught = any(
            timing.caught for row in self.rows for timing in row.timings.values()
        )
        if (
            caught
            or worst(row.verdict.outcome for row in self.rows if row.verdict)
            is Outcome.FAIL
        ):
            return ExitCode.GATE_FAILED
        noisy = all(
            timing.effect is not Effect.UNCLEAR
            for timing in self.baseline.timings.values()
        )
        return ExitCode.INCONCLUSIVE if noisy else ExitCode.DONE

    def data(self) -> dict[str, Any]:
        """Returns the result as a JSON object."""
        own = {
            name: getattr(self, name)
            for name in (
                "recipe",
                "run",
                "stages",
                "metric",
                "inactive",
                "load",
                "seconds",
            )
        }
        return own | {
            "machine": dict(self.machine),
            "variants": [row.data() for row in self.rows],
        }


def ablate_inference(
    found: Trained, folder: Path, budget: float, say: Callable[[str], None]
) -> InferenceResult:
    """Times every stage alone, and all of them, alternating with the model
    without stages; then calls the gate.

    All of it happens in this process, so that effects of a few percent may be luck: where memory
    lies.

    Args:
        found: The run's weights, with the recipe whose stages are measured.
        folder: Receives result, report and plot.
        budget: Approximate seconds for everything.
        say: Receives lines about the progress.

    Raises:
        StorageError: the folder cannot be written.
        UsageError: the recipe has no such section, the budget is too small, or no stage does
            anything here.
    """
    started = time.perf_counter()
    load = os.getloadavg()[0]
    if not is_writable(folder):
        raise StorageError(
            f"{folder} cannot be written; name another folder with --out"
        )
    recipe = answering(found)
    possible = variants_of(recipe, resolve_device(recipe.device), ("alone", "all"))
    gate = InferenceGate(found, say)
    seconds = SHARE * budget / (len(SIZES) * len(possible.variants))
    if seconds < FEWEST_SECONDS:
        least = FEWEST_SECONDS * len(SIZES) * len(possible.variants) / SHARE
        raise UsageError(
            f"a budget of {budget:.0f} s is too small for {len(possible.variants)} variants: "
            f"{least:.0f} s"
        )
    measured = list(_measured(found, gate, possible, seconds, say))
    # Which the gate has evaluated of all of them.
    fewest = min(map(len, gate.values.values()), default=0)
    means = {
        stages: statistics.fmean(values[:fewest])
        for stages, values in gate.values.items()
    }
    rows = tuple(replace(row, value=means.get(row.stages)) for row in measured)
    idle = {
        kind: reason for row in rows for kind, reason in gate.idle(row.stages).items()
    }
    metric = recipe.objective.name if recipe.objective else None
    section = found.recipe.values()["inference"]
    inactive = {**possible.inactive, **idle}
    took = time.perf_counter() - started
    result = InferenceResult(
        recipe.name,
        found.name,
        section,
        metric,
        rows,
        inactive,
        hardware(),
        load,
        took,
        folder,
        recipe.data.is_synthetic(),
    )
    make_folder(folder)
    write_durably(
        folder / RESULT,
        json.dumps(redact_values(result.data()), indent=1, default=str) + "\n",
    )
    return result


def _measured(
    found: Trained,
    gate: InferenceGate,
    possible: VariantSet,
    seconds: float,
    say: Callable[[str], None],
) -> Iterator[Answering]:
    pipeline = build(found, ()).pipeline
    drawn = pipeline.batches()
    possible_sizes = [
        size
        for size in SIZES
        if _resized(pipeline.source, next(drawn)[0], size) is not None
    ]

    def ask(size: int | None) -> Any:
        """Returns a new input, of ``size`` samples if that is given."""
        batch = next(drawn)[0]
        return pipeline.learner.inputs(
            batch if size is None else _resized(pipeline.source, batch, size)
        )

    asks = {size: partial(ask, size) for size in possible_sizes} or {
        pipeline.batch_size: partial(ask, None)
    }
    for variant in possible.variants:
        only = variant.stages[0] if len(variant.stages) == 1 else variant.name
        name = AGAIN if variant.name == BASELINE else only
        timings = {}
        for size, new_question in asks.items():
            say(f"{name}: batches of {size}")
            fresh = FreshBatches(new_question, may_repeat=True)
            contract = (
                weakest(answering(found), variant.stages) if variant.stages else Exact()
            )
            timings[size] = clock(
                gate.subject(()),
                gate.subject(variant.stages),
                fresh,
                seconds=seconds,
                contract=contract,
            )
        verdict = gate(variant.stages) if variant.stages else None
        if verdict is not None:
            say(f"{name}: {verdict.outcome}, {verdict.summary}")
        model = build(found, variant.stages)
        yield Answering(
            name,
            variant.stages,
            timings,
            model.bytes,
            model.bytes_in_memory,
            None,
            verdict,
        )


def _resized(source: Source, batch: Batch, size: int) -> Batch | None:
    """A batch in another size; None if the source does not have it."""
    return next(resized(source, batch, [size]), None)
