"""What an ablation has come to, as data for people and programs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from runner.compare.noninferiority import Effect, Ratio
from runner.measure.limit import Rates, UpdateCost
from runner.system.errors import ExitCode


@dataclass(frozen=True)
class Throughput:
    """A whole training: drawing, transfer and update."""

    per_second: float
    """In the unit that the recipe's training is counted in."""
    ratio: Ratio | None
    """Baseline / variant in time per step."""
    shares: dict[str, float]
    """Of its time, by what it was spent on: what the source does apart, draw, transfer, update, other."""


@dataclass(frozen=True)
class VariantResult:
    """One set of stages, measured."""

    name: str
    also: tuple[str, ...]
    stages: tuple[str, ...]
    ratio: Ratio
    """Baseline / variant in time per update."""
    effect: Effect
    compile_s: float
    """The first update: compilation, capture, allocation."""
    warmup_s: float
    """From then until it was steady."""
    overhead_s: float
    """What both cost beyond as many steady updates, and what building cost, the search of a batch size included."""
    steady_ms: float
    """Of one update: the median over rounds."""
    peak_memory: int
    """Bytes: on a GPU the most that torch allocated there, else the most that the process held."""
    peak_host_memory: int
    break_even_updates: int | None
    """After how many updates it has made up for what it costs at the start; None if it never does."""
    limit_fraction: float
    """The limit's time over its own: the share of the limit's speed that it reaches."""
    throughput: Throughput | None
    published: float | None
    """The ratio that somebody else reports."""
    verdict: dict[str, Any] | None
    """Of the gate: ``outcome``, ``contract``, ``summary``; None if it was not asked."""
    notes: tuple[str, ...]
    """What its stages have to say."""

    def data(self) -> dict[str, Any]:
        """As plain data; the ratio is one number, its interval stands beside it."""
        data = dataclasses.asdict(self) | {"ratio": self.ratio.value, "ci95": [self.ratio.low, self.ratio.high]}
        return data | {"rounds": self.ratio.rounds, "verdict": (self.verdict or {}).get("outcome"),
                       "verdict_summary": (self.verdict or {}).get("summary")}  # fmt: skip


@dataclass(frozen=True)
class StageGain:
    """What one stage adds."""

    stage: str
    alone: Ratio | None
    """To the baseline with nothing but what the stage requires."""
    together: Ratio | None
    """To all other stages."""


@dataclass(frozen=True)
class CaseResult:
    """One setting of the recipe, measured."""

    name: str
    digest: str
    """Of the recipe."""
    device: str
    threads: int
    batch_size: int
    unit: str
    """What the recipe's training is counted in; of epochs, it is samples that are counted here."""
    planned_updates: int
    """Of the whole training."""
    a_a: Ratio
    """The baseline in one process against the baseline in another."""
    baseline_ms: float
    limit_ms: float
    """Of one update, in float32; ``limit_fraction`` of a variant that may use 16 bits is of that type's limit."""
    cost: UpdateCost
    rates: Rates
    variants: tuple[VariantResult, ...]
    worth: tuple[StageGain, ...]
    interaction: Ratio | None
    """All stages together over the product of what each adds alone: above 1, they help each other."""
    inactive: dict[str, str]
    refused: dict[str, str]
    missing: dict[str, str]
    """Variants that were not measured to the end, with the reason."""
    ended: str
    """Why no more rounds were measured."""

    def named(self, name: str) -> VariantResult | None:
        """The variant of that name."""
        return next((variant for variant in self.variants if name in (variant.name, *variant.also)), None)


@dataclass(frozen=True)
class Result:
    """One ablation."""

    name: str
    digest: str
    command: str
    machine: dict[str, str | int]
    load: float
    """Other work on the machine while it was measured: the highest load average at the start of a session."""
    cases: tuple[CaseResult, ...]
    slope: float | None
    """With which power of its least FLOP the update with all stages grows from case to case."""
    seconds: float
    folder: str
    interrupted: bool
    published_by: str

    @property
    def exit_code(self) -> ExitCode:
        """A gate that failed counts more than a time that could not be told; what was not proven does not count."""
        outcomes = {str((v.verdict or {}).get("outcome", "")) for case in self.cases for v in case.variants}
        if any(outcome.upper() == "FAIL" for outcome in outcomes):
            return ExitCode.GATE_FAILED
        return ExitCode.INCONCLUSIVE if any(map(_is_unclear, self.cases)) else ExitCode.DONE

    def data(self) -> dict[str, Any]:
        """As one JSON object; ``variants`` lists those of all cases."""
        cases = []
        for case in self.cases:
            whole = {**dataclasses.asdict(case), "variants": None, "float32_flops": case.rates.float32_flops}
            del whole["variants"]
            cases.append(whole)
        return {
            **{field: getattr(self, field) for field in _PLAIN},
            "cases": cases,
            "variants": [{"case": case.name, **variant.data()} for case in self.cases for variant in case.variants],
        }


def _is_unclear(case: CaseResult) -> bool:
    """Whether it cannot be told what all stages together are worth."""
    whole = case.named("all")
    return bool(case.missing) if whole is None else whole.effect is Effect.INCONCLUSIVE


_PLAIN = ("name", "digest", "command", "machine", "load", "slope", "seconds", "folder", "interrupted", "published_by")
