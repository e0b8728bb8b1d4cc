"""Results of measurements, as data for reports and programs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from runner.compare.ratio import Effect, Ratio, effect, of_processes
from runner.compare.verdict import Outcome
from runner.measure.case_log import CaseLog, Entry
from runner.measure.experiment import Case
from runner.system.errors import ExitCode, RunnerError
from runner.train.roofline import Rates, UpdateCost, dtype_of
from runner.verify.variants import (
    AGAIN,
    ALL,
    BASELINE,
    BASELINES,
    Variant,
    VariantSet,
    required,
)

if TYPE_CHECKING:
    from runner.measure.recommend import Recommendation


@dataclass(frozen=True)
class Throughput:
    """A complete training: sampling, transfer and update."""

    # In the unit that the recipe's training is counted in.
    per_second: float
    # Baseline / variant in time per step.
    ratio: Ratio
    # Of that ratio.
    effect: Effect
    # Seconds of training for each update of the recipe, by the ratio.
    update_s: float
    # Of its time: activities of the source, draw, transfer, update, other.
    shares: dict[str, float]


@dataclass(frozen=True)
class VariantResult:
    """Results of one set of stages."""

    name: str
    also: tuple[str, ...]
    stages: tuple[str, ...]
    # Baseline / variant in time per update.
    ratio: Ratio
    effect: Effect
    # The first update: compilation, capture, allocation.
    compile_s: float
    # From then until it was steady.
    warmup_s: float
    overhead_s: (
        # Compilation and warm-up beyond as many steady updates, and building.
        float
    )
    # Of one update: the median over rounds.
    steady_ms: float
    # bytes: on a GPU the most that torch allocated there, else the most that the process held
    peak_memory: int
    peak_host_memory: int
    # Updates after which the start-up has paid off; None if never.
    break_even_updates: int | None
    # The limit's time divided by that of the variant: the reached share of the limit's speed.
    limit_fraction: float
    throughput: Throughput | None
    # A ratio that was published elsewhere.
    published: float | None
    # The outcome of the gate; None if it did not judge.
    verdict: str | None
    verdict_summary: str | None
    # Remarks of its stages.
    notes: tuple[str, ...]
    # Updates after the timed ones that were compared with the baseline's.
    compared: int = 0
    # How they deviated from the baseline's work, which makes the ratio meaningless.
    caught: str = ""
    # Why none was.
    not_compared: str = ""

    @property
    def training_s(self) -> float:
        """Returns the seconds of a complete training per update; those of the update alone if
        nothing else was measured.
        """
        return (
            self.steady_ms / 1e3
            if self.throughput is None
            else self.throughput.update_s
        )

    @property
    def training_ratio(self) -> Ratio:
        """Returns baseline / variant in the time of a complete training; that of an update if
        nothing else was measured.
        """
        return self.ratio if self.throughput is None else self.throughput.ratio

    @property
    def training_effect(self) -> Effect:
        """Returns the effect on a complete training."""
        return (
            self.effect
            if self.throughput is None or self.caught
            else self.throughput.effect
        )

    @property
    def shown_ratio(self) -> str:
        """Returns the ratio of an update as text; no ratio for the baseline and
        for a variant that does other work.
        """
        if self.caught:
            return "-"
        return str(self.ratio) if self.stages else "1"

    @property
    def title(self) -> str:
        """Returns all names of the variant."""
        return " = ".join((self.name, *self.also))


@dataclass(frozen=True)
class StageGain:
    """The gain of one stage."""

    stage: str
    # To the baseline, with only the stages that this one requires.
    alone: Ratio | None
    # To all other stages.
    together: Ratio | None


@dataclass(frozen=True)
class CaseResult:
    """Results of one setting of the recipe."""

    name: str
    # Of the recipe.
    digest: str
    device: str
    threads: int
    batch_size: int
    # The unit of the training's length; samples for a training in epochs.
    unit: str
    # Of the recipe's training.
    planned_updates: int
    # The baseline against itself, in separate processes.
    a_a: Ratio
    # The same for a complete training; that of an update if nothing else was measured.
    training_a_a: Ratio
    baseline_ms: float
    # of one update in float32; a variant that may use 16 bits has a fraction of that type's limit
    limit_ms: float
    cost: UpdateCost
    rates: Rates
    # The baseline first.
    variants: tuple[VariantResult, ...]
    worth: tuple[StageGain, ...]
    # All stages over the product of what each adds alone: above 1, they are synergistic.
    interaction: Ratio | None
    inactive: dict[str, str]
    refused: dict[str, str]
    # Variants that were not measured to the end, with the reason.
    missing: dict[str, str]
    # Why no more rounds were measured.
    ended: str
    # Whether the data are synthetic.
    synthetic: bool = False

    def named(self, name: str) -> VariantResult | None:
        """The variant of that name."""
        return next(
            (
                variant
                for variant in self.variants
                if name in (variant.name, *variant.also)
            ),
            None,
        )


@dataclass(frozen=True)
class Result:
    """Results of one ablation."""

    name: str
    digest: str
    command: str
    machine: dict[str, str | int]
    # other work on the machine while it was measured: the highest load average at the start of a
    # session
    load: float
    cases: tuple[CaseResult, ...]
    # One for every case.
    recommendations: tuple[Recommendation, ...]
    # With which power of its least FLOP the update with all stages grows from case to case.
    slope: float | None
    seconds: float
    folder: str
    interrupted: bool
    published_by: str
    # Of the parent run in MLflow.
    run_id: str = ""
    # Why MLflow does not have it.
    tracking_problem: str = ""
    # The number of the signal that requested the end.
    signal: int = 0

    @property
    def exit_code(self) -> ExitCode:
        """Returns the exit code: of a signal first, then of a failed or invalid
        variant, then of an unclear time.
        """
        if self.signal:
            return ExitCode(128 + self.signal)
        if any(
            variant.verdict == Outcome.FAIL or variant.caught
            for case in self.cases
            for variant in case.variants
        ):
            return ExitCode.GATE_FAILED
        for case in self.cases:
            whole = case.named(ALL)
            if whole is None and case.missing:
                return ExitCode.INCONCLUSIVE
            if (
                whole is not None
                and whole.effect is whole.training_effect is Effect.UNCLEAR
            ):
                return ExitCode.INCONCLUSIVE
        return ExitCode.DONE

    def data(self) -> dict[str, Any]:
        """Returns the result as a JSON object; ``variants`` lists those of all
        cases, each with its ratio and interval.
        """
        whole = asdict(self) | {"variants": []}
        for case, plain in zip(self.cases, whole["cases"], strict=True):
            plain["float32_flops"] = case.rates.float32_flops
            for own in plain.pop("variants"):
                ratio = own.pop("ratio")
                figures = {
                    "ratio": ratio["value"],
                    "ci95": [ratio["low"], ratio["high"]],
                }
                # It must not be mistaken for a ratio of the same work.
                if own["caught"]:
                    figures = {"ratio": None, "ci95": None}
                    own["throughput"] = None
                figures |= {what: ratio[what] for what in ("rounds", "processes")}
                whole["variants"].append({"case": case.name, **own, **figures})
        return whole


def analyse(case: Case, variants: VariantSet, log: CaseLog) -> CaseResult:
    """Returns the result of one case; raises a RunnerError if not even the baseline was
    measured.
    """
    a_a = log.ratio(AGAIN, [BASELINE])
    counted = log.values("cost")
    rated = log.values("rates")
    if a_a is None or not counted or not rated:
        raise RunnerError(
            f"{case.name or 'the ablation'}: no two processes were measured; give it a larger "
            f"budget"
        )
    rates = max((Rates(**each) for each in rated), key=lambda each: each.float32_flops)
    cost = UpdateCost.of(counted[0])
    base_s = statistics.median(
        each["update"][name] for each in log.rounds for name in BASELINES
    )
    prepared = log.by_variant("prepared")
    failed = log.failed
    results = []
    missing = {}
    for variant in variants.variants:
        measured = log.ratio(variant.name)
        if (
            variant.name in prepared
            and variant.name not in failed
            and measured is not None
        ):
            limit_s = cost.limit_s(
                rates, dtype_of(case.recipe.stages[kind] for kind in variant.stages)
            )
            results.append(_variant(case, variant, log, measured, a_a, base_s, limit_s))
        else:
            unknown = (
                "only one process was measured"
                if variant.name in prepared
                else "its turn did not come"
            )
            missing[variant.name] = failed.get(variant.name, unknown)
    trained = [each[BASELINE] for each in log.values("train") if each]
    training_a_a = log.ratio(AGAIN, [BASELINE], of=_step_s)
    share = sum(each["share"] for each in trained)
    worth, interaction = _worth(case, variants, log)
    unit, _ = case.recipe.length
    return CaseResult(
        name=case.name,
        digest=case.recipe.digest,
        batch_size=case.recipe.train.batch_size,
        device=prepared[BASELINE]["device"],
        threads=prepared[BASELINE]["threads"],
        unit="samples" if unit == "epochs" else unit,
        planned_updates=max(1, round(sum(each["updates"] for each in trained) / share))
        if share
        else 1,
        a_a=a_a,
        training_a_a=training_a_a or a_a,
        baseline_ms=1e3 * base_s,
        limit_ms=1e3 * cost.limit_s(rates),
        cost=cost,
        rates=rates,
        variants=tuple(results),
        worth=worth,
        interaction=interaction,
        inactive=dict(variants.inactive),
        refused=dict(variants.refused),
        missing=missing,
        ended=(log.values("done") or ["interrupted"])[-1],
        synthetic=case.recipe.data.is_synthetic(),
    )


def slope(cases: Sequence[CaseResult]) -> float | None:
    """Returns the exponent with which the time of an update with all stages grows with its least
    FLOP: least squares of logarithms.
    """
    points = [
        (math.log(c.cost.least_flop), math.log(v.steady_ms))
        for c in cases
        if (v := c.named(ALL)) is not None
    ]
    if len({flop for flop, _ in points}) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def _variant(
    case: Case,
    variant: Variant,
    log: CaseLog,
    measured: Ratio,
    a_a: Ratio,
    base_s: float,
    limit_s: float,
) -> VariantResult:
    prepared = log.by_variant("prepared")
    gate = log.by_variant("verdict").get(variant.name, {})
    own = prepared[variant.name]
    memory = log.by_variant("memory").get(
        variant.name, {"host_bytes": 0, "device_bytes": None}
    )
    # By the ratio, so that no variant gains from the quieter half of a session.
    steady_s = base_s / measured.value
    compared = log.by_variant("compared").get(
        variant.name, {"updates": 0, "caught": "", "reason": ""}
    )
    said = effect(measured, a_a) if variant.stages else Effect.UNCLEAR
    said = Effect.INVALID if compared["caught"] else said
    throughput = _throughput(log, variant.name)
    break_even = None
    if said is Effect.FASTER:
        extra_s = own["overhead_s"] - prepared[BASELINE]["overhead_s"]
        saved_s = (
            base_s - steady_s
            if throughput is None
            else throughput.update_s * (throughput.ratio.value - 1)
        )
        break_even = max(0, math.ceil(extra_s / saved_s)) if saved_s > 0 else None
    return VariantResult(
        name=variant.name,
        also=variant.also,
        stages=variant.stages,
        ratio=measured,
        effect=said,
        compile_s=own["first_s"],
        warmup_s=own["seconds"],
        overhead_s=own["overhead_s"],
        steady_ms=1e3 * steady_s,
        peak_memory=memory["host_bytes"]
        if memory["device_bytes"] is None
        else memory["device_bytes"],
        peak_host_memory=memory["host_bytes"],
        break_even_updates=break_even,
        limit_fraction=limit_s / steady_s,
        throughput=throughput,
        published=next(
            (case.published[name] for name in variant.names if name in case.published),
            None,
        ),
        verdict=gate.get("outcome"),
        verdict_summary=gate.get("summary"),
        notes=tuple(
            f"{kind}: {note}" for kind, notes in own["notes"].items() for note in notes
        ),
        compared=compared["updates"],
        caught=compared["caught"],
        not_compared=compared["reason"],
    )


def _throughput(log: CaseLog, name: str) -> Throughput | None:
    gained = log.ratio(name, of=_step_s)
    a_a = log.ratio(AGAIN, [BASELINE], of=_step_s)
    if gained is None or a_a is None:
        return None
    rounds = [each for each in log.rounds if name in each["train"]]
    own = [each["train"][name] for each in rounds]
    seconds = sum(each["seconds"] for each in own)
    shares = {
        activity: sum(each["spent"][activity] for each in own) / seconds
        for activity in own[0]["spent"]
    }
    shares["other"] = max(0.0, 1.0 - sum(shares.values()))
    per_second = 1 / statistics.median(_step_s(each)[name] for each in rounds)
    baselines = (
        each["train"][other]
        for each in rounds
        for other in BASELINES
        if other in each["train"]
    )
    base_s = statistics.median(each["seconds"] / each["updates"] for each in baselines)
    said = Effect.UNCLEAR if name == BASELINE else effect(gained, a_a)
    return Throughput(per_second, gained, said, base_s / gained.value, shares)


def _step_s(entry: Entry) -> dict[str, float]:
    """Returns the seconds of one step of a complete training, by variant."""
    return {name: own["seconds"] / own["done"] for name, own in entry["train"].items()}


def _worth(
    case: Case, variants: VariantSet, log: CaseLog
) -> tuple[tuple[StageGain, ...], Ratio | None]:
    """Returns the gain of each stage and their interaction, from the processes
    that measured all variants involved.
    """
    whole = variants.named(ALL)
    if whole is None:
        return (), None
    caught = {
        name for name, told in log.by_variant("compared").items() if told["caught"]
    }
    gains = []
    pairs = []
    for stage in whole.stages:
        below = required(case.recipe.stages, stage)
        alone = _pair(variants.find({stage} | below), variants.find(below))
        together = _pair(whole, variants.named(f"all but {stage}"))
        # A variant that does other work than the baseline has no ratio to any other.
        alone, together = (
            pair if pair and not caught & {pair[0], *pair[1]} else None
            for pair in (alone, together)
        )
        gains.append(
            StageGain(
                stage,
                *(log.ratio(*pair) if pair else None for pair in (alone, together)),
            )
        )
        pairs += [alone] if alone else []
    if whole.name in caught or len(whole.stages) < 2 or len(pairs) < len(whole.stages):
        return tuple(gains), None
    gained = log.ratios(whole.name)
    adding = [log.ratios(*pair) for pair in pairs]
    common = set(gained).intersection(*adding)
    helped = [
        gained[process] / math.prod(own[process] for own in adding)
        for process in sorted(common)
    ]
    return tuple(gains), of_processes(helped, len(log.rounds)) if len(
        helped
    ) > 1 else None


def _pair(
    changed: Variant | None, without: Variant | None
) -> tuple[str, Sequence[str]] | None:
    """A variant's name and those that its times are compared with, where there are both."""
    if changed is None or without is None:
        return None
    return changed.name, [without.name] if without.stages else BASELINES
