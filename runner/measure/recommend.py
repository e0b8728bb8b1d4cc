"""The recipe that a machine should use, as an ablation found."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.compare.noninferiority import Effect, effect
from runner.measure.experiment import Case
from runner.measure.result import CaseResult, StageGain, VariantResult
from runner.recipe.document import dump_inline
from runner.recipe.loader import shipped
from runner.recipe.render import render
from runner.system.hardware import cpu_model
from runner.system.secrets import MASK
from runner.verify.variants import required


@dataclass(frozen=True)
class Recommendation:
    """Which stages to use, and why not the others."""

    case: str
    variant: str
    """The variant that it is; the baseline if no stage is worth it."""
    stages: tuple[str, ...]
    reasons: dict[str, str]
    """For every stage of the recipe that is to be off."""
    updates: int
    """Of the recipe's whole training, for which it was chosen."""
    seconds: float
    """That these take, compilation and warm-up included."""
    baseline_seconds: float


def recommend(case: Case, result: CaseResult) -> Recommendation:
    """The variant whose updates take least time over the recipe's whole training.

    Compilation and warm-up count, so a stage that is faster in the end may still not be worth it. What the gate has
    failed is left out, with all that contains it. Between variants that the machine cannot tell apart, the one with the
    fewest stages wins.

    Args:
        case: what was measured.
        result: what came out.
    """
    updates = result.planned_updates
    failed = [set(variant.stages) for variant in result.variants if _outcome(variant) == "FAIL"]
    harmless = [variant for variant in result.variants if not any(each <= set(variant.stages) for each in failed)]
    total = {variant.name: _total(variant, result, updates) for variant in harmless}
    total["baseline"] = updates * result.baseline_ms / 1e3
    fastest = min(total.values())
    close = {name for name, seconds in total.items() if seconds <= fastest * result.a_a.spread}
    stages = {variant.name: variant.stages for variant in harmless} | {"baseline": ()}
    chosen = min(close, key=lambda name: (len(stages[name]), total[name]))
    kinds = stages[chosen]
    reasons = {kind: _reason(kind, case, result, kinds, updates) for kind in case.recipe.stages if kind not in kinds}
    return Recommendation(case.name, chosen, kinds, reasons, updates, total[chosen], total["baseline"])


def write(recommendation: Recommendation, case: Case, result: CaseResult, path: Path) -> None:
    """Writes a recipe that extends the measured one, with the reason behind every stage that is off.

    Args:
        recommendation: what to write.
        case: what was measured.
        result: what came out.
        path: the file; replaced if it exists.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text("\n".join(_lines(recommendation, case, result, path)) + "\n", encoding="utf-8")


def _lines(recommendation: Recommendation, case: Case, result: CaseResult, path: Path) -> Iterator[str]:
    measured = result.named(recommendation.variant)
    where = f"{cpu_model()}, {result.threads} threads" if result.device == "cpu" else result.device
    yield f"# What to use on {where}; measured {time.strftime('%Y-%m-%d')}."
    if measured is not None and measured.stages:
        yield f"# An update is {measured.ratio} as fast as without stages."
    yield (
        f"# The {recommendation.updates:,} updates of a training take {recommendation.seconds:,.0f} s with start-up; "
        f"{recommendation.baseline_seconds:,.0f} s without stages."
    )
    if measured is not None and measured.stages and _outcome(measured) != "PASS":
        said = (measured.verdict or {}).get("summary") or "nobody has checked it"
        yield f"# Whether it is harmless is not proven: {_one_line(str(said))}"
    yield f"name: {case.recipe.name[:90]}_here"
    yield f"extends: {dump_inline(_reference(case.recipe.path, path.parent))}"
    values = case.recipe.values()
    yield from render(_nested(case, values))
    yield "optimization:"
    for kind in case.recipe.stages:
        if kind in recommendation.stages:
            yield f"  {kind}: {dump_inline(values['optimization'][kind])}"
        else:
            yield f"  {kind}: off  # {_one_line(recommendation.reasons[kind])}"
    for kind in case.recipe.off:
        yield f"  {kind}: off"


def _reference(recipe: Path, folder: Path) -> str:
    ships = shipped().get(recipe.stem)
    if ships is not None and ships.resolve() == recipe.resolve():
        return recipe.name
    return os.path.relpath(recipe.resolve(), folder.resolve())


def _nested(case: Case, values: Mapping[str, Any]) -> dict[str, Any]:
    """What the case's assignments have set, but for stages and secrets, as nested mappings."""
    nested: dict[str, Any] = {}
    for assignment in case.sets:
        keys = assignment.partition("=")[0].split(".")
        if keys[0] in ("optimization", "name"):
            continue
        value: Any = values
        for key in keys:
            value = value[key]
        if MASK in str(value):
            continue
        below = nested
        for key in keys[:-1]:
            below = below.setdefault(key, {})
        below[keys[-1]] = value
    return nested


def _reason(kind: str, case: Case, result: CaseResult, kept: tuple[str, ...], updates: int) -> str:
    """Why a stage is off, the strongest reason first."""
    if kind in result.inactive:
        return f"inactive here: {result.inactive[kind]}"
    if not any(kind in variant.stages for variant in result.variants):
        return "nothing with it was measured"
    alone = next((v for v in result.variants if set(v.stages) == required(case.recipe.stages, kind) | {kind}), None)
    if alone is not None and _outcome(alone) == "FAIL":
        return f"the gate failed: {(alone.verdict or {}).get('summary')}"
    missing = sorted(required(case.recipe.stages, kind) - set(kept))
    if missing:
        return f"it requires {', '.join(missing)}, which is off"
    gain = next((gain for gain in result.worth if gain.stage == kind), None)
    told = _why_not_faster(gain, result) if gain is not None else ""
    if told:
        return told
    with_it = result.named("all")
    if with_it is not None and kind in with_it.stages and with_it.overhead_s > 1:
        return f"its start-up of {with_it.overhead_s:.0f} s is not made up for in {updates:,} updates"
    return "no measured set of stages with it was faster than this one"


def _why_not_faster(gain: StageGain, result: CaseResult) -> str:
    for measured, company in ((gain.together, "beside all others"), (gain.alone, "alone")):
        if measured is None:
            continue
        said = effect(measured, result.a_a)
        if said is Effect.SLOWER:
            return f"slower: {measured} {company}"
        if said is Effect.INCONCLUSIVE:
            return f"no gain that can be told from noise: {measured} {company}, A/A {result.a_a}"
    return ""


def _total(variant: VariantResult, result: CaseResult, updates: int) -> float:
    """Seconds of a training's updates, and of what the variant's start-up costs beyond the baseline's."""
    baseline = result.named("baseline")
    extra = variant.overhead_s - (baseline.overhead_s if baseline is not None else 0.0)
    return max(0.0, extra) + updates * variant.steady_ms / 1e3


def _outcome(variant: VariantResult) -> str:
    return str((variant.verdict or {}).get("outcome", "")).upper()


def _one_line(text: str) -> str:
    return " ".join(text.split())
