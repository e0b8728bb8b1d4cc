"""From what was measured to what it means, as data for people and programs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from runner.compare.noninferiority import Effect, Ratio, effect, of_ratios, ratio
from runner.compare.verdict import Outcome
from runner.system.errors import ExitCode, RunnerError
from runner.verify.variants import AGAIN, ALL, BASELINE, BOTH, Variant, VariantSet, required

if TYPE_CHECKING:
    from runner.measure.experiment import Case
    from runner.measure.measurement_log import CaseLog
    from runner.measure.recommend import Recommendation

TRUE_FLOAT32 = 1e-5  # a float32 product is off by some 1e-7 of its size, one of rounded factors by 3e-4 or more


@dataclass(frozen=True)
class Rates:
    """What a machine was measured to do."""

    default_flops: float  # float32 matmul with torch's default kernels, FLOP/s: the best over shapes
    relaxed_flops: float  # the same with ``torch.set_float32_matmul_precision("medium")``
    relaxed_error: float  # relative error of such a product
    copy_bytes: float  # bytes read plus bytes written, a second
    half_flops: Mapping[str, float] = field(default_factory=dict)
    """Matmul in types of 16 bits, by name; those that the device has."""

    @property
    def float32_flops(self) -> float:
        """The best rate of true float32, whichever kernels it takes."""
        return max(self.default_flops, self.relaxed_flops if self.relaxed_error < TRUE_FLOAT32 else 0.0)


@dataclass(frozen=True)
class UpdateCost:
    """What one update has to do at least."""

    counted_flop: int  # as torch counts the baseline's update
    least_flop: int  # by the learner's formula where it has one, else as counted
    moved_bytes: int  # that cannot but be read or written

    @classmethod
    def of(cls, counted: Mapping[str, Any]) -> UpdateCost:
        """From what the baseline counted; ``least``, its learner's formula, may be None."""
        return cls(counted["flop"], *(counted["least"] or (counted["flop"], counted["optimizer_bytes"])))

    def limit_s(self, rates: Rates, dtype: str | None = None) -> float:
        """Seconds that the update takes at least, in float32 and the type of 16 bits that its stages may use."""
        flops = max(rates.float32_flops, rates.half_flops.get(dtype or "", 0.0))
        return max(self.least_flop / flops, self.moved_bytes / rates.copy_bytes)


@dataclass(frozen=True)
class Throughput:
    """A whole training: drawing, transfer and update."""

    per_second: float  # in the unit that the recipe's training is counted in
    ratio: Ratio  # baseline / variant in time per step
    shares: dict[str, float]
    """Of its time, by what it was spent on: what the source does apart, draw, transfer, update, other."""


@dataclass(frozen=True)
class VariantResult:
    """One set of stages, measured."""

    name: str
    also: tuple[str, ...]
    stages: tuple[str, ...]
    ratio: Ratio  # baseline / variant in time per update
    effect: Effect
    compile_s: float  # the first update: compilation, capture, allocation
    warmup_s: float  # from then until it was steady
    overhead_s: float
    """What both cost beyond as many steady updates, and what building cost, the search of a batch size included."""
    steady_ms: float  # of one update: the median over rounds
    peak_memory: int  # bytes: on a GPU the most that torch allocated there, else the most that the process held
    peak_host_memory: int
    break_even_updates: int | None
    """After how many updates it has made up for what it costs at the start; None if it never does."""
    limit_fraction: float  # the limit's time over its own: the share of the limit's speed that it reaches
    throughput: Throughput | None
    published: float | None  # the ratio that somebody else reports
    verdict: dict[str, Any] | None  # of the gate: ``outcome``, ``contract``, ``summary``; None if it was not asked
    notes: tuple[str, ...]  # what its stages have to say

    @property
    def title(self) -> str:
        """All its names."""
        return " = ".join((self.name, *self.also))

    def told(self, what: str) -> str | None:
        """The gate's ``outcome`` or ``summary``; None if it was not asked."""
        return None if self.verdict is None else str(self.verdict[what])


@dataclass(frozen=True)
class StageGain:
    """What one stage adds."""

    stage: str
    alone: Ratio | None  # to the baseline with nothing but what the stage requires
    together: Ratio | None  # to all other stages


@dataclass(frozen=True)
class CaseResult:
    """One setting of the recipe, measured."""

    name: str
    digest: str  # of the recipe
    device: str
    threads: int
    batch_size: int
    unit: str  # what the recipe's training is counted in; of epochs, it is samples that are counted here
    planned_updates: int  # of the whole training
    a_a: Ratio  # the baseline in one process against the baseline in another
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
    missing: dict[str, str]  # variants that were not measured to the end, with the reason
    ended: str  # why no more rounds were measured

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
    load: float  # other work on the machine while it was measured: the highest load average at the start of a session
    cases: tuple[CaseResult, ...]
    recommendations: tuple[Recommendation, ...]  # one for every case
    slope: float | None  # with which power of its least FLOP the update with all stages grows from case to case
    seconds: float
    folder: str
    interrupted: bool
    published_by: str

    @property
    def exit_code(self) -> ExitCode:
        """A gate that failed counts more than a time that could not be told; what was not proven does not count."""
        if any(variant.told("outcome") == Outcome.FAIL for case in self.cases for variant in case.variants):
            return ExitCode.GATE_FAILED
        for case in self.cases:
            whole = case.named(ALL)
            if whole.effect is Effect.INCONCLUSIVE if whole is not None else case.missing:
                return ExitCode.INCONCLUSIVE
        return ExitCode.DONE

    def data(self) -> dict[str, Any]:
        """As one JSON object; ``variants`` lists those of all cases, each ``ratio`` a number beside its interval."""
        whole = asdict(self) | {"variants": []}
        for case, plain in zip(self.cases, whole["cases"], strict=True):
            plain["float32_flops"] = case.rates.float32_flops
            for variant, own in zip(case.variants, plain.pop("variants"), strict=True):
                own |= {"ratio": variant.ratio.value, "ci95": [variant.ratio.low, variant.ratio.high],
                        "rounds": variant.ratio.rounds, "verdict": variant.told("outcome"),
                        "verdict_summary": variant.told("summary")}  # fmt: skip
                whole["variants"].append({"case": case.name, **own})
        return whole


def analyse(case: Case, variants: VariantSet, log: CaseLog) -> CaseResult:
    """What was measured of one case.

    Raises:
        RunnerError: not even the baseline was measured.
    """
    rounds, counted, rated = list(log.rounds.values()), log.values("cost"), log.values("rates")
    if not rounds or not counted or not rated:
        raise RunnerError(f"{case.name or 'the ablation'}: no round was measured; give it a larger budget")
    rates = max((Rates(**each) for each in rated), key=lambda each: each.float32_flops)
    cost = UpdateCost.of(counted[0])
    a_a = ratio([each[BASELINE] for each in rounds], [each[AGAIN] for each in rounds])
    base_s = statistics.median(each[BOTH] for each in rounds)
    prepared, failed = log.by_variant("prepared"), log.failed
    results, missing = [], {}
    for variant in variants.variants:
        if variant.name in prepared and variant.name not in failed and log.ratios(variant.name):
            dtypes = (getattr(case.recipe.stages[kind], "dtype", None) for kind in variant.stages)
            limit_s = cost.limit_s(rates, next(filter(None, dtypes), None))
            results.append(_variant(case, variant, log, a_a, base_s, limit_s))
        else:
            missing[variant.name] = failed.get(variant.name, "its turn did not come")
    trained = [each[BASELINE] for each in log.values("train") if each]
    share = sum(each["share"] for each in trained)
    worth, interaction = _worth(case, variants, log)
    unit, _ = case.recipe.length
    return CaseResult(
        name=case.name, digest=case.recipe.digest, batch_size=case.recipe.train.batch_size,
        device=prepared[BASELINE]["device"], threads=prepared[BASELINE]["threads"],
        unit="samples" if unit == "epochs" else unit,
        planned_updates=max(1, round(sum(each["updates"] for each in trained) / share)) if share else 1,
        a_a=a_a, baseline_ms=1e3 * base_s, limit_ms=1e3 * cost.limit_s(rates), cost=cost, rates=rates,
        variants=tuple(results), worth=worth, interaction=interaction,
        inactive=dict(variants.inactive), refused=dict(variants.refused), missing=missing,
        ended=(log.values("done") or ["interrupted"])[-1],
    )  # fmt: skip


def slope(cases: Sequence[CaseResult]) -> float | None:
    """With which power of its least FLOP an update with all stages grows, by least squares of logarithms."""
    points = [(math.log(c.cost.least_flop), math.log(v.steady_ms)) for c in cases if (v := c.named(ALL)) is not None]
    if len({flop for flop, _ in points}) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def _variant(case: Case, variant: Variant, log: CaseLog, a_a: Ratio, base_s: float, limit_s: float) -> VariantResult:
    prepared = log.by_variant("prepared")
    own = prepared[variant.name]
    memory = log.by_variant("memory").get(variant.name, {"host_bytes": 0, "device_bytes": None})
    measured = of_ratios(log.ratios(variant.name))
    steady_s = base_s / measured.value  # by the ratio, so that no variant gains from the quieter half of a session
    said = effect(measured, a_a) if variant.stages else Effect.INCONCLUSIVE
    break_even = None
    if said is Effect.FASTER and steady_s < base_s:
        extra_s = own["overhead_s"] - prepared[BASELINE]["overhead_s"]
        break_even = max(0, math.ceil(extra_s / (base_s - steady_s)))
    return VariantResult(
        name=variant.name, also=variant.also, stages=variant.stages, ratio=measured, effect=said,
        compile_s=own["first_s"], warmup_s=own["seconds"], overhead_s=own["overhead_s"], steady_ms=1e3 * steady_s,
        peak_memory=memory["host_bytes"] if memory["device_bytes"] is None else memory["device_bytes"],
        peak_host_memory=memory["host_bytes"],
        break_even_updates=break_even, limit_fraction=limit_s / steady_s,
        throughput=_throughput([each for each in log.values("train") if variant.name in each], variant.name),
        published=next((case.published[name] for name in variant.names if name in case.published), None),
        verdict=log.by_variant("verdict").get(variant.name),
        notes=tuple(f"{kind}: {note}" for kind, notes in own["notes"].items() for note in notes),
    )  # fmt: skip


def _throughput(blocks: Sequence[dict[str, Any]], name: str) -> Throughput | None:
    if not blocks:
        return None
    own = [each[name] for each in blocks]
    seconds = sum(each["seconds"] for each in own)
    shares = {activity: sum(each["spent"][activity] for each in own) / seconds for activity in own[0]["spent"]}
    shares["other"] = max(0.0, 1.0 - sum(shares.values()))
    step_s = [each["seconds"] / each["done"] for each in own]
    baseline_s = [each[BASELINE]["seconds"] / each[BASELINE]["done"] for each in blocks]
    return Throughput(1 / statistics.median(step_s), ratio(baseline_s, step_s), shares)


def _worth(case: Case, variants: VariantSet, log: CaseLog) -> tuple[tuple[StageGain, ...], Ratio | None]:
    """What each stage adds, and how they help each other, by the rounds in which all that it takes was measured."""
    whole = variants.named(ALL)
    if whole is None:
        return (), None
    gains, pairs = [], []
    for stage in whole.stages:
        below = required(case.recipe.stages, stage)
        with_it, without, rest = (
            variants.find({stage} | below),
            variants.find(below),
            variants.named(f"all but {stage}"),
        )
        alone = together = None
        if with_it is not None and without is not None:
            pairs.append((with_it.name, without.name if without.stages else BOTH))
            alone = _ratio(log.ratios(*pairs[-1]))
        if rest is not None:
            together = _ratio(log.ratios(whole.name, rest.name if rest.stages else BOTH))
        gains.append(StageGain(stage, alone, together))
    if len(whole.stages) < 2 or len(pairs) < len(whole.stages):
        return tuple(gains), None
    needed = {whole.name, *(name for pair in pairs for name in pair)}
    helped = [
        each[BOTH] / each[whole.name] / math.prod(each[without] / each[with_it] for with_it, without in pairs)
        for each in log.rounds.values()
        if needed <= each.keys()
    ]
    return tuple(gains), _ratio(helped)


def _ratio(values: Sequence[float]) -> Ratio | None:
    return of_ratios(values) if values else None
