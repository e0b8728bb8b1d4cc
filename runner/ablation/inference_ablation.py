"""Measures every stage of a recipe's ``inference`` on this machine: time, bytes
and quality of a run's model.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from runner.plugin.contract import Exact
from runner.plugin.source import Batch, Source
from runner.proof.fresh_batches import FreshBatches
from runner.proof.interleaved_timing import Timing, clock
from runner.proof.ratios import Effect
from runner.proof.verdict import Outcome, Verdict, worst
from runner.system.errors import ExitCode, StorageError, UsageError
from runner.system.files import is_writable, make_folder, write_durably
from runner.system.hardware import hardware
from runner.system.secrets import redact_values
from runner.system.stored_json import json_text
from runner.training.inference_model import build
from runner.training.pipeline import resolve_device
from runner.training.trained_run import Trained
from runner.verify.evaluation_checks import resized
from runner.verify.inference_gate import InferenceGate, answering
from runner.verify.variants import AGAIN, BASELINE, VariantSet, variants_of, weakest

SIZES = (1, 16)
"""Sizes of the timed batches: one request, and several requests together."""
FEWEST_SECONDS = 2.0
"""The shortest time for the rounds of one comparison that gives a result."""
SHARE = 0.6
"""Share of the budget for rounds; the remainder is for building, warm-up and the gate."""
RESULT = "inference.json"


@dataclass(frozen=True)
class Answering:
    """The measurements of one set of stages."""

    name: str
    stages: tuple[str, ...]
    timings: Mapping[int, Timing]
    """Times compared with the baseline's, by size of the batch."""
    bytes: int
    """Bytes of the model in files."""
    bytes_in_memory: int
    value: float | None
    """Mean objective over the evaluations of the gate; None if the gate needed none."""
    verdict: Verdict | None
    """Verdict of the gate; None for the baseline."""

    @property
    def throughput(self) -> float:
        """Returns the answers per second in the largest batches."""
        size = max(self.timings)
        return size / self.timings[size].changed_ms * 1e3

    def data(self) -> dict[str, Any]:
        """Returns the measurements as a JSON object."""
        timings = {
            str(size): {
                "ms": timing.changed_ms,
                "baseline_ms": timing.baseline_ms,
                # Times of different work have no meaningful ratio.
                "ratio": None if timing.caught else asdict(timing.ratio),
                "a_a": asdict(timing.a_a),
                "effect": timing.effect,
                "first_s": timing.changed_warm_up.first_s,
                "caught": timing.caught,
            }
            for size, timing in self.timings.items()
        }
        verdict = None
        if self.verdict is not None:
            verdict = {
                "verdict": self.verdict.outcome,
                "summary": self.verdict.summary,
            }
        fields = {
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
        return fields | {"timings": timings, "verdict": verdict}


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
        """Returns the row of the model without any stage, compared with itself."""
        return self.rows[0]

    @property
    def exit_code(self) -> ExitCode:
        """3 if the gate failed a set of stages or the clock caught one, 4 if the machine is too
        noisy, else 0.
        """
        timings = [timing for row in self.rows for timing in row.timings.values()]
        outcome = worst(row.verdict.outcome for row in self.rows if row.verdict)
        if any(timing.caught for timing in timings) or outcome is Outcome.FAIL:
            return ExitCode.GATE_FAILED
        # A clear difference between the model and itself is noise that the bands do not contain.
        effects = [timing.effect for timing in self.baseline.timings.values()]
        is_noisy = Effect.UNCLEAR not in effects
        return ExitCode.INCONCLUSIVE if is_noisy else ExitCode.DONE

    def data(self) -> dict[str, Any]:
        """Returns the result as a JSON object."""
        fields = {
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
        return fields | {
            "machine": dict(self.machine),
            "variants": [row.data() for row in self.rows],
        }


def ablate_inference(
    trained: Trained, folder: Path, budget: float, say: Callable[[str], None]
) -> InferenceResult:
    """Times every stage alone, and all of them, alternating with the model
    without stages; then calls the gate.

    All of it happens in this process, so that effects of a few percent may be luck: where memory
    lies.

    Args:
        trained: The run's weights, with the recipe whose stages are measured.
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
    # An error of the folder should be reported before the measurement.
    if not is_writable(folder):
        raise StorageError(
            f"{folder} cannot be written; name another folder with --out"
        )
    recipe = answering(trained)
    possible = variants_of(recipe, resolve_device(recipe.device), ("alone", "all"))
    gate = InferenceGate(trained, say)
    seconds = SHARE * budget / (len(SIZES) * len(possible.variants))
    if seconds < FEWEST_SECONDS:
        least = FEWEST_SECONDS * len(SIZES) * len(possible.variants) / SHARE
        raise UsageError(
            f"a budget of {budget:.0f} s is too small for {len(possible.variants)} variants: "
            f"{least:.0f} s"
        )
    measured = list(_measured(trained, gate, possible, seconds, say))
    # The gate stops early, so the means are over the evaluations that all sets of stages have.
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
    section = trained.recipe.values()["inference"]
    inactive = {**possible.inactive, **idle}
    took = time.perf_counter() - started
    result = InferenceResult(
        recipe.name,
        trained.name,
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
        json_text(redact_values(result.data()), indent=1, default=str) + "\n",
    )
    return result


def _measured(
    trained: Trained,
    gate: InferenceGate,
    possible: VariantSet,
    seconds: float,
    say: Callable[[str], None],
) -> Iterator[Answering]:
    pipeline = build(trained, ()).pipeline
    batches = pipeline.batches()
    possible_sizes = [
        size
        for size in SIZES
        if _resized(pipeline.source, next(batches)[0], size) is not None
    ]

    def ask(size: int | None) -> Any:
        """Returns a new input, of ``size`` samples if that is given."""
        batch = next(batches)[0]
        return pipeline.learner.inputs(
            batch if size is None else _resized(pipeline.source, batch, size)
        )

    asks = {size: partial(ask, size) for size in possible_sizes}
    # Some sources have batches of a single size only (a graph).
    if not asks:
        asks = {pipeline.batch_size: partial(ask, None)}
    for variant in possible.variants:
        only = variant.stages[0] if len(variant.stages) == 1 else variant.name
        # The baseline is timed against itself, which shows the noise.
        name = AGAIN if variant.name == BASELINE else only
        timings = {}
        for size, new_question in asks.items():
            say(f"{name}: batches of {size}")
            fresh = FreshBatches(new_question, may_repeat=True)
            contract = (
                weakest(answering(trained), variant.stages)
                if variant.stages
                else Exact()
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
        model = build(trained, variant.stages)
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
    """Returns a batch in another size; None if the source does not have it."""
    return next(resized(source, batch, [size]), None)
