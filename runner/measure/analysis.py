"""From what was measured to what it means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from runner.compare.noninferiority import Effect, Ratio, effect, of_ratios, ratio
from runner.measure.experiment import Case
from runner.measure.limit import Rates, least_cost
from runner.measure.measurement_log import Entry
from runner.measure.result import CaseResult, StageGain, Throughput, VariantResult
from runner.system.errors import RunnerError
from runner.verify.variants import AGAIN, ALL, BASELINE, Variant, VariantSet, required

Rounds = dict[int, dict[str, float]]
"""Seconds of one update by round and variant."""


def analyse(case: Case, variants: VariantSet, entries: Sequence[Entry]) -> CaseResult:
    """What was measured of one case.

    Args:
        case: what was to be measured.
        variants: those of its recipe.
        entries: all lines of the log.

    Raises:
        RunnerError: not even the baseline was measured.
    """
    own = [entry for entry in entries if entry.get("case") == case.name]
    rounds = update_rounds(own)
    base = [seconds for seconds in rounds.values() if BASELINE in seconds and AGAIN in seconds]
    prepared = _by_variant(own, "prepared")
    counted = next((entry["cost"] for entry in own if "cost" in entry), None)
    measured = [Rates(**entry["rates"]) for entry in own if "rates" in entry]
    if not base or counted is None or not measured:
        raise RunnerError(f"{case.name or 'the ablation'}: no round was measured; give it a larger budget")
    gone = failed_variants(own)
    rates = max(measured, key=lambda each: each.float32_flops)
    least = least_cost(counted)
    a_a = ratio([each[BASELINE] for each in base], [each[AGAIN] for each in base])
    limit_s = least.limit_s(rates)
    results = [
        _variant(case, variant, own, rounds, a_a, least.limit_s(rates, _half(case, variant)))
        for variant in variants.variants
        if variant.name in prepared and variant.name not in gone and compared(rounds, variant.name)
    ]
    found = {variant.name for variant in results}
    missing = {v.name: gone.get(v.name, "its turn did not come") for v in variants.variants if v.name not in found}
    return CaseResult(
        name=case.name,
        digest=case.recipe.digest,
        device=prepared[BASELINE]["device"],
        threads=prepared[BASELINE]["threads"],
        batch_size=case.recipe.train.batch_size,
        unit="samples" if case.recipe.length[0] == "epochs" else case.recipe.length[0],
        planned_updates=_planned_updates(own),
        a_a=a_a,
        baseline_ms=1e3 * statistics.median(_baseline(each) for each in base),
        limit_ms=1e3 * limit_s,
        cost=least,
        rates=rates,
        variants=tuple(results),
        worth=tuple(_gains(case, variants, rounds)),
        interaction=_interaction(case, variants, rounds),
        inactive=dict(variants.inactive),
        refused=dict(variants.refused),
        missing=missing,
        ended=next((str(entry["done"]) for entry in reversed(own) if "done" in entry), "interrupted"),
    )


def _half(case: Case, variant: Variant) -> str | None:
    """The type of 16 bits that a variant's stages may compute in: what one of them has as its ``dtype``."""
    return next((dtype for kind in variant.stages if (dtype := getattr(case.recipe.stages[kind], "dtype", None))), None)


def failed_variants(entries: Sequence[Entry]) -> dict[str, str]:
    """Variants that have failed and were not started again since, with the reason."""
    found: dict[str, str] = {}
    for entry in entries:
        if "failed" in entry:
            found[entry["variant"]] = str(entry["failed"])
        elif "prepared" in entry:
            found.pop(entry["variant"], None)
    return found


def update_rounds(entries: Sequence[Entry]) -> Rounds:
    """The rounds of one case."""
    return {entry["round"]: entry["update"] for entry in entries if "update" in entry}


def compared(rounds: Rounds, name: str, other: str = "") -> list[float]:
    """Seconds of ``other`` (the mean of both baselines if there is none) / seconds of ``name``, for each round."""
    both = [each for each in rounds.values() if name in each and (other or AGAIN) in each and BASELINE in each]
    return [(each[other] if other else _baseline(each)) / each[name] for each in both]


def slope(cases: Sequence[CaseResult]) -> float | None:
    """With which power of its least FLOP an update with all stages grows, by least squares of logarithms."""
    points = [(case.cost.least_flop, v.steady_ms) for case in cases if (v := case.named(ALL)) is not None]
    if len({flop for flop, _ in points}) < 2:
        return None
    logs = [(math.log(flop), math.log(ms)) for flop, ms in points]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def _baseline(seconds: Mapping[str, float]) -> float:
    return (seconds[BASELINE] + seconds[AGAIN]) / 2


def _by_variant(entries: Sequence[Entry], key: str) -> dict[str, Any]:
    """The last value that every variant has under a key."""
    return {entry["variant"]: entry[key] for entry in entries if key in entry}


def _variant(
    case: Case, variant: Variant, entries: Sequence[Entry], rounds: Rounds, a_a: Ratio, limit_s: float
) -> VariantResult:
    prepared = _by_variant(entries, "prepared")
    own, baseline = prepared[variant.name], prepared[BASELINE]
    memory = _by_variant(entries, "memory").get(variant.name, {"host_bytes": 0, "device_bytes": None})
    measured = of_ratios(compared(rounds, variant.name))
    base_s = statistics.median(_baseline(each) for each in rounds.values() if BASELINE in each and AGAIN in each)
    steady_s = base_s / measured.value  # by the ratio, so that no variant gains from the quieter half of a session
    said = effect(measured, a_a) if variant.stages else Effect.INCONCLUSIVE
    host = int(memory["host_bytes"])
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
        peak_memory=host if memory["device_bytes"] is None else int(memory["device_bytes"]),
        peak_host_memory=host,
        break_even_updates=_break_even(own["overhead_s"] - baseline["overhead_s"], base_s - steady_s, said),
        limit_fraction=limit_s / steady_s,
        throughput=_throughput(variant.name, entries),
        published=next((case.published[name] for name in variant.names if name in case.published), None),
        verdict=_by_variant(entries, "verdict").get(variant.name),
        notes=tuple(f"{kind}: {note}" for kind, notes in own["notes"].items() for note in notes),
    )


def _break_even(extra_s: float, gain_s: float, said: Effect) -> int | None:
    if said is not Effect.FASTER or gain_s <= 0:
        return None
    return max(0, math.ceil(extra_s / gain_s))


def _throughput(name: str, entries: Sequence[Entry]) -> Throughput | None:
    blocks = {entry["round"]: entry["train"] for entry in entries if entry.get("train")}
    own = [each[name] for each in blocks.values() if name in each]
    if not own:
        return None
    pairs = [(each[BASELINE], each[name]) for each in blocks.values() if name in each and BASELINE in each]
    seconds = sum(each["seconds"] for each in own)
    spent = {activity: sum(each["spent"][activity] for each in own) for activity in own[0]["spent"]}
    shares = {activity: value / seconds for activity, value in spent.items()}
    shares["other"] = max(0.0, 1.0 - sum(shares.values()))
    ratios = [_per_count(baseline) / _per_count(block) for baseline, block in pairs]
    return Throughput(1 / statistics.median(map(_per_count, own)), of_ratios(ratios) if ratios else None, shares)


def _per_count(block: Mapping[str, float]) -> float:
    return block["seconds"] / block["done"]


def _planned_updates(entries: Sequence[Entry]) -> int:
    """How many updates the whole training of the baseline has, by what a part of it had."""
    blocks = [entry["train"][BASELINE] for entry in entries if BASELINE in (entry.get("train") or {})]
    share = sum(block["share"] for block in blocks)
    return max(1, round(sum(block["updates"] for block in blocks) / share)) if share else 1


def _alone(case: Case, variants: VariantSet, stage: str) -> tuple[str, str] | None:
    """The variants with the stage and what it requires, and without the stage; None if there is no such one."""
    below = required(case.recipe.stages, stage)
    with_it, without = variants.find({stage} | below), variants.find(below)
    return (with_it.name, without.name) if with_it is not None and without is not None else None


def _gains(case: Case, variants: VariantSet, rounds: Rounds) -> list[StageGain]:
    whole = variants.named(ALL)
    found = []
    for stage in whole.stages if whole is not None else ():
        pair, rest = _alone(case, variants, stage), variants.named(f"all but {stage}")
        alone = _ratio_of(rounds, pair[0], pair[1]) if pair is not None else None
        together = _ratio_of(rounds, whole.name, rest.name) if whole is not None and rest is not None else None
        found.append(StageGain(stage, alone, together))
    return found


def _ratio_of(rounds: Rounds, name: str, other: str) -> Ratio | None:
    values = compared(rounds, name, "" if other == BASELINE else other)
    return of_ratios(values) if values else None


def _interaction(case: Case, variants: VariantSet, rounds: Rounds) -> Ratio | None:
    """From the rounds in which all that it takes was measured."""
    whole = variants.named(ALL)
    if whole is None or len(whole.stages) < 2:
        return None
    pairs = [pair for stage in whole.stages if (pair := _alone(case, variants, stage)) is not None]
    if len(pairs) < len(whole.stages):
        return None
    needed = {whole.name, BASELINE, AGAIN, *(name for pair in pairs for name in pair)}
    values = []
    for seconds in rounds.values():
        if needed <= seconds.keys():
            each = {**seconds, BASELINE: _baseline(seconds)}
            product = math.prod(each[without] / each[with_it] for with_it, without in pairs)
            values.append(each[BASELINE] / each[whole.name] / product)
    return of_ratios(values) if values else None
