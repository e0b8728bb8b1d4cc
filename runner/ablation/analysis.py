"""Results of measurements, as data for reports and programs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from runner.ablation.case_log import CaseLog, Entry
from runner.ablation.experiment import Case
from runner.proof.ratios import Effect, Ratio, effect, of_processes
from runner.proof.verdict import Outcome
from runner.system.errors import ExitCode, RunnerError
from runner.training.roofline import Rates, UpdateCost, dtype_of
from runner.verify.variants import (
    AGAIN,
    ALL,
    BASELINE,
    BASELINES,
    Variant,
    VariantSet,
    required,
    usual_stages,
)

if TYPE_CHECKING:
    from runner.ablation.recommendation import Recommendation


@dataclass(frozen=True)
class Throughput:
    """A complete training: sampling, transfer and update."""

    per_second: float
    """Progress per second, in the unit of the recipe's training."""
    ratio: Ratio
    """Baseline / variant in time per step."""
    effect: Effect
    """Effect on a training step."""
    update_s: float
    """Seconds of training per update of the recipe, computed from the ratio."""
    shares: dict[str, float]
    """Shares of the time: activities of the source, draw, transfer, update, other."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that several processes together send for an update."""

    computed: int
    """Of its operations, if each sends what a ring does: no other algorithm sends less."""
    counted: float | None
    """What the loopback interface received, with the headers of packets; None without one."""
    unknown: tuple[str, ...] = ()
    """Operations without a rule, which are not in ``computed``."""


@dataclass(frozen=True)
class VariantResult:
    """Results of one set of stages."""

    name: str
    also: tuple[str, ...]
    stages: tuple[str, ...]
    ratio: Ratio
    """Baseline / variant in time per update."""
    effect: Effect
    compile_s: float
    """Seconds of the first update: compilation, capture, allocation."""
    warmup_s: float
    """Seconds from the first update until updates were steady."""
    overhead_s: float
    """Seconds of building, and by which compilation and warm-up exceed steady updates."""
    steady_ms: float
    """Time of one update, computed from the baseline's median over rounds and the ratio."""
    peak_memory: int
    """Peak in bytes: on a GPU that of torch's allocator, else that of the process."""
    peak_host_memory: int
    break_even_updates: int | None
    """Updates after which the start-up has paid off; None if never."""
    limit_fraction: float
    """The limit's time divided by that of the variant: the reached share of the limit's speed."""
    throughput: Throughput | None
    published: float | None
    """A ratio that was published elsewhere."""
    verdict: str | None
    """Outcome of the gate; None if it did not judge."""
    verdict_summary: str | None
    notes: tuple[str, ...]
    """Remarks of the stages."""
    compared: int = 0
    """Number of updates that were compared with the baseline's, after the timed ones."""
    caught: str = ""
    """Deviation from the baseline's work, which makes the ratio meaningless; else empty."""
    not_compared: str = ""
    """Reason why no update was compared."""
    traffic: Traffic | None = None
    """None for a single process, and where it was not measured."""

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
        return "1" if self.name == BASELINE else str(self.ratio)

    @property
    def title(self) -> str:
        """Returns all names of the variant."""
        return " = ".join((self.name, *self.also))


@dataclass(frozen=True)
class StageGain:
    """The gain of one stage."""

    stage: str
    alone: Ratio | None
    """Ratio to the baseline, with only the stages that this one requires."""
    together: Ratio | None
    """Ratio of all stages to all others."""


@dataclass(frozen=True)
class CaseResult:
    """Results of one setting of the recipe."""

    name: str
    digest: str
    """Digest of the recipe."""
    device: str
    threads: int
    batch_size: int
    unit: str
    """The unit of the training's length; samples for a training in epochs."""
    planned_updates: int
    """Number of updates of the recipe's training."""
    a_a: Ratio
    """Ratio of the baseline to itself, in separate processes."""
    training_a_a: Ratio
    """The A/A ratio of a complete training; that of an update if nothing else was measured."""
    baseline_ms: float
    limit_ms: float
    """Roofline of one update in float32; a variant with 16 bits has the limit of its type."""
    cost: UpdateCost
    rates: Rates
    variants: tuple[VariantResult, ...]
    """The baseline first."""
    worth: tuple[StageGain, ...]
    interaction: Ratio | None
    """Gain of all stages over the product of the gains of each alone; synergy if above 1."""
    inactive: dict[str, str]
    refused: dict[str, str]
    missing: dict[str, str]
    """Variants that were not measured to the end, with the reason."""
    ended: str
    """Reason why the measurement ended."""
    synthetic: bool = False
    """True if the data are synthetic."""
    processes: int = 1
    """Number of processes that train together."""
    usual: tuple[str, ...] = ()
    """The stages that a training script usually has."""
    beyond_usual: Ratio | None = None
    """Time of an update with these stages, divided by that with all; None if not measured."""

    def named(self, name: str) -> VariantResult | None:
        """Returns the variant of that name."""
        for variant in self.variants:
            if name in (variant.name, *variant.also):
                return variant
        return None


@dataclass(frozen=True)
class Result:
    """Results of one ablation."""

    name: str
    digest: str
    command: str
    machine: dict[str, str | int]
    load: float
    """Other work on the machine: the highest load average at the start of a session."""
    cases: tuple[CaseResult, ...]
    recommendations: tuple[Recommendation, ...]
    """A recommendation for every case."""
    slope: float | None
    """Exponent with which the time of an update with all stages grows with its minimal FLOP."""
    seconds: float
    folder: str
    interrupted: bool
    published_by: str
    run_id: str = ""
    """Id of the parent run in MLflow."""
    tracking_problem: str = ""
    """Reason why the result is not in MLflow; else empty."""
    signal: int = 0
    """The number of the signal that requested the end."""

    @property
    def exit_code(self) -> ExitCode:
        """Returns the exit code: of a signal first, then of a failed or invalid
        variant, then of an unclear time.
        """
        if self.signal:
            return ExitCode(128 + self.signal)
        variants = [variant for case in self.cases for variant in case.variants]
        if any(item.verdict == Outcome.FAIL or item.caught for item in variants):
            return ExitCode.GATE_FAILED
        for case in self.cases:
            all_stages = case.named(ALL)
            if all_stages is None and case.missing:
                return ExitCode.INCONCLUSIVE
            if all_stages is None:
                continue
            # A clear effect on either is a result.
            effects = {all_stages.effect, all_stages.training_effect}
            if effects == {Effect.UNCLEAR}:
                return ExitCode.INCONCLUSIVE
        return ExitCode.DONE

    def data(self) -> dict[str, Any]:
        """Returns the result as a JSON object; ``variants`` lists those of all
        cases, each with its ratio and interval.
        """
        tree = asdict(self) | {"variants": []}
        for case, case_tree in zip(self.cases, tree["cases"], strict=True):
            case_tree["float32_flops"] = case.rates.float32_flops
            for variant in case_tree.pop("variants"):
                ratio = variant.pop("ratio")
                figures = {
                    "ratio": ratio["value"],
                    "ci95": [ratio["low"], ratio["high"]],
                }
                # A ratio of different work would mislead a program that reads it.
                if variant["caught"]:
                    figures = {"ratio": None, "ci95": None}
                    variant["throughput"] = None
                figures |= {unit: ratio[unit] for unit in ("rounds", "processes")}
                tree["variants"].append({"case": case.name, **variant, **figures})
        return tree


def analyse(
    case: Case, variants: VariantSet, log: CaseLog, processes: int = 1
) -> CaseResult:
    """Returns the result of one case, with this number of processes.

    Raises:
        RunnerError: Not even the baseline was measured.
    """
    a_a = log.ratio(AGAIN, [BASELINE])
    costs = log.values("cost")
    rates_entries = log.values("rates")
    # Without two processes of the baseline, no variant has an interval.
    if a_a is None or not costs or not rates_entries:
        raise RunnerError(
            f"{case.name or 'the ablation'}: no two processes were measured; give it a larger "
            f"budget"
        )
    # Other programs can only lower the measured speed, so the highest is the best estimate.
    rates = max(
        (Rates(**entry) for entry in rates_entries),
        key=lambda candidate: candidate.float32_flops,
    )
    cost = UpdateCost.of(costs[0])
    baseline_s = statistics.median(
        entry["update"][name] for entry in log.rounds for name in BASELINES
    )
    prepared = log.by_variant("prepared")
    failed = log.failed
    results = []
    missing = {}
    for variant in variants.variants:
        measured = log.ratio(variant.name)
        is_prepared = variant.name in prepared
        if is_prepared and variant.name not in failed and measured is not None:
            # A variant with 16 bits has the limit of that type.
            dtype = dtype_of(case.recipe.stages[kind] for kind in variant.stages)
            limit_s = cost.limit_s(rates, dtype)
            results.append(
                _variant(case, variant, log, measured, a_a, baseline_s, limit_s)
            )
        else:
            reason = "its turn did not come"
            if is_prepared:
                reason = "only one process was measured"
            missing[variant.name] = failed.get(variant.name, reason)

    trained = [entry[BASELINE] for entry in log.values("train") if entry]
    training_a_a = log.ratio(AGAIN, [BASELINE], of=_step_s)
    # The length of a training is extrapolated from the share that the baseline has trained.
    share = sum(entry["share"] for entry in trained)
    updates = sum(entry["updates"] for entry in trained)
    planned_updates = max(1, round(updates / share)) if share else 1
    worth, interaction = _worth(case, variants, log)
    usual, beyond_usual = _beyond_usual(case, variants, log)
    unit, _ = case.recipe.length
    return CaseResult(
        name=case.name,
        digest=case.recipe.digest,
        batch_size=case.recipe.train.batch_size,
        device=prepared[BASELINE]["device"],
        threads=prepared[BASELINE]["threads"],
        unit="samples" if unit == "epochs" else unit,
        planned_updates=planned_updates,
        a_a=a_a,
        training_a_a=training_a_a or a_a,
        baseline_ms=1e3 * baseline_s,
        limit_ms=1e3 * cost.limit_s(rates),
        cost=cost,
        rates=rates,
        variants=tuple(results),
        worth=worth,
        interaction=interaction,
        usual=usual,
        beyond_usual=beyond_usual,
        inactive=dict(variants.inactive),
        refused=dict(variants.refused),
        missing=missing,
        ended=(log.values("done") or ["interrupted"])[-1],
        synthetic=case.recipe.data.is_synthetic(),
        processes=processes,
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
    baseline_s: float,
    limit_s: float,
) -> VariantResult:
    prepared = log.by_variant("prepared")
    gate = log.by_variant("verdict").get(variant.name, {})
    preparation = prepared[variant.name]
    memory = log.by_variant("memory").get(
        variant.name, {"host_bytes": 0, "device_bytes": None}
    )
    # The ratio compares within rounds, so that no variant gains from a quiet part of the session.
    steady_s = baseline_s / measured.value
    compared = log.by_variant("compared").get(
        variant.name, {"updates": 0, "caught": "", "reason": ""}
    )
    is_baseline = variant.name == BASELINE
    variant_effect = Effect.UNCLEAR if is_baseline else effect(measured, a_a)
    variant_effect = Effect.INVALID if compared["caught"] else variant_effect
    throughput = _throughput(log, variant.name)
    break_even = None
    if variant_effect is Effect.FASTER:
        extra_s = preparation["overhead_s"] - prepared[BASELINE]["overhead_s"]
        saved_s = baseline_s - steady_s
        # A training saves less than its updates, because sampling stays the same.
        if throughput is not None:
            saved_s = throughput.update_s * (throughput.ratio.value - 1)
        break_even = max(0, math.ceil(extra_s / saved_s)) if saved_s > 0 else None
    peak_memory = memory["device_bytes"]
    if peak_memory is None:
        peak_memory = memory["host_bytes"]
    return VariantResult(
        name=variant.name,
        also=variant.also,
        stages=variant.stages,
        ratio=measured,
        effect=variant_effect,
        compile_s=preparation["first_s"],
        warmup_s=preparation["seconds"],
        overhead_s=preparation["overhead_s"],
        steady_ms=1e3 * steady_s,
        peak_memory=peak_memory,
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
            f"{kind}: {note}"
            for kind, notes in preparation["notes"].items()
            for note in notes
        ),
        compared=compared["updates"],
        caught=compared["caught"],
        not_compared=compared["reason"],
        traffic=_traffic(log, variant.name),
    )


def _traffic(log: CaseLog, name: str) -> Traffic | None:
    measured = log.by_variant("traffic").get(name)
    if measured is None:
        return None
    computed = sum(measured["computed"].values())
    return Traffic(computed, measured["counted"], tuple(measured["unknown"]))


def _throughput(log: CaseLog, name: str) -> Throughput | None:
    training_ratio = log.ratio(name, of=_step_s)
    a_a = log.ratio(AGAIN, [BASELINE], of=_step_s)
    if training_ratio is None or a_a is None:
        return None
    rounds = [entry for entry in log.rounds if name in entry["train"]]
    trainings = [entry["train"][name] for entry in rounds]
    seconds = sum(entry["seconds"] for entry in trainings)
    shares = {
        activity: sum(entry["spent"][activity] for entry in trainings) / seconds
        for activity in trainings[0]["spent"]
    }
    shares["other"] = max(0.0, 1.0 - sum(shares.values()))
    per_second = 1 / statistics.median(_step_s(entry)[name] for entry in rounds)
    baselines = (
        entry["train"][baseline]
        for entry in rounds
        for baseline in BASELINES
        if baseline in entry["train"]
    )
    baseline_s = statistics.median(
        entry["seconds"] / entry["updates"] for entry in baselines
    )
    training_effect = (
        Effect.UNCLEAR if name == BASELINE else effect(training_ratio, a_a)
    )
    return Throughput(
        per_second,
        training_ratio,
        training_effect,
        baseline_s / training_ratio.value,
        shares,
    )


def _step_s(entry: Entry) -> dict[str, float]:
    """Returns the seconds of one step of a complete training, by variant."""
    return {
        name: training["seconds"] / training["done"]
        for name, training in entry["train"].items()
    }


def _worth(
    case: Case, variants: VariantSet, log: CaseLog
) -> tuple[tuple[StageGain, ...], Ratio | None]:
    """Returns the gain of each stage and their interaction, from the processes
    that measured all variants involved.
    """
    all_stages = variants.named(ALL)
    if all_stages is None:
        return (), None
    caught = _caught(log)
    gains = []
    pairs = []
    for stage in all_stages.stages:
        required_stages = required(case.recipe.stages, stage)
        alone = _pair(
            variants.find({stage} | required_stages), variants.find(required_stages)
        )
        joint = _pair(all_stages, variants.named(f"all but {stage}"))
        # A variant that does other work than the baseline has no ratio to any other.
        alone, joint = (
            pair if pair and not caught & {pair[0], *pair[1]} else None
            for pair in (alone, joint)
        )
        gains.append(
            StageGain(
                stage,
                *(log.ratio(*pair) if pair else None for pair in (alone, joint)),
            )
        )
        pairs += [alone] if alone else []
    if (
        all_stages.name in caught
        or len(all_stages.stages) < 2
        or len(pairs) < len(all_stages.stages)
    ):
        return tuple(gains), None
    all_ratios = log.ratios(all_stages.name)
    single_ratios = [log.ratios(*pair) for pair in pairs]
    common = set(all_ratios).intersection(*single_ratios)
    interactions = [
        all_ratios[process] / math.prod(ratios[process] for ratios in single_ratios)
        for process in sorted(common)
    ]
    return tuple(gains), of_processes(interactions, len(log.rounds)) if len(
        interactions
    ) > 1 else None


def _beyond_usual(
    case: Case, variants: VariantSet, log: CaseLog
) -> tuple[tuple[str, ...], Ratio | None]:
    """Returns the stages that a training script usually has, and what all stages gain over them."""
    whole = variants.named(ALL)
    if whole is None:
        return (), None
    usual = usual_stages(case.recipe.stages, whole.stages)
    scripted = variants.find(usual) if usual else None
    if scripted is None or scripted is whole:
        return usual, None
    # A variant that does other work has no ratio.
    if _caught(log) & {whole.name, scripted.name}:
        return usual, None
    return usual, log.ratio(whole.name, [scripted.name])


def _caught(log: CaseLog) -> set[str]:
    """Returns the variants that do other work than the baseline."""
    comparisons = log.by_variant("compared")
    return {name for name, comparison in comparisons.items() if comparison["caught"]}


def _pair(
    changed: Variant | None, without: Variant | None
) -> tuple[str, Sequence[str]] | None:
    """A variant's name and those that its times are compared with, where there are both."""
    if changed is None or without is None:
        return None
    return changed.name, [without.name] if without.stages else BASELINES
