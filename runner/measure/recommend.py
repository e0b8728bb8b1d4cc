"""The recipe that a machine should use, as an ablation found."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.compare.noninferiority import Effect, effect
from runner.compare.verdict import Outcome
from runner.recipe.document import dump_inline, render
from runner.recipe.loader import shipped
from runner.system.hardware import cpu_model
from runner.system.secrets import MASK
from runner.verify.variants import ALL, BASELINE, required

if TYPE_CHECKING:
    from runner.measure.analysis import CaseResult
    from runner.measure.experiment import Case


@dataclass(frozen=True)
class Recommendation:
    """Which stages to use, and why not the others."""

    case: str
    variant: str  # the variant that it is; the baseline if no stage is worth it
    stages: tuple[str, ...]
    reasons: dict[str, str]  # for every stage of the recipe that is to be off
    updates: int  # of the recipe's whole training, for which it was chosen
    seconds: float  # that these take, compilation and warm-up included
    baseline_seconds: float


def recommend(case: Case, result: CaseResult) -> Recommendation:
    """The variant whose updates take least time over the recipe's whole training.

    Compilation and warm-up count, so a stage that is faster in the end may still not be worth it. What the gate has
    failed is left out, with all that contains it. Between variants that the machine cannot tell apart, the one with the
    fewest stages wins.
    """
    updates, baseline = result.planned_updates, result.named(BASELINE)
    start_up = baseline.overhead_s if baseline is not None else 0.0
    failed = [set(variant.stages) for variant in result.variants if variant.told("outcome") == Outcome.FAIL]
    stages: dict[str, tuple[str, ...]] = {}
    total: dict[str, float] = {}
    for variant in result.variants:
        if not any(each <= set(variant.stages) for each in failed):
            stages[variant.name] = variant.stages
            total[variant.name] = max(0.0, variant.overhead_s - start_up) + updates * variant.steady_ms / 1e3
    stages[BASELINE], total[BASELINE] = (), updates * result.baseline_ms / 1e3
    close = [name for name in total if total[name] <= min(total.values()) * result.a_a.spread]
    chosen = min(close, key=lambda name: (len(stages[name]), total[name]))
    kept = stages[chosen]
    reasons = {kind: _reason(kind, case, result, kept) for kind in case.recipe.stages if kind not in kept}
    return Recommendation(case.name, chosen, kept, reasons, updates, total[chosen], total[BASELINE])


def write(recommendation: Recommendation, case: Case, result: CaseResult, path: Path) -> None:
    """Writes a recipe that extends the measured one, with the reason behind every stage that is off.

    Raises:
        OSError: it cannot be written.
    """
    recipe, measured = case.recipe, result.named(recommendation.variant)
    where = f"{cpu_model()}, {result.threads} threads" if result.device == "cpu" else result.device
    lines = [f"# What to use on {where}; measured {time.strftime('%Y-%m-%d')}."]
    if measured is not None and measured.stages:
        lines.append(f"# An update is {measured.ratio} as fast as without stages.")
    lines.append(
        f"# The {recommendation.updates:,} updates of a training take {recommendation.seconds:,.0f} s with start-up; "
        f"{recommendation.baseline_seconds:,.0f} s without stages."
    )
    if measured is not None and measured.stages and measured.told("outcome") != Outcome.PASS:
        said = measured.told("summary") or "nobody has checked it"
        lines.append(f"# Whether it is harmless is not proven: {' '.join(said.split())}")
    ships = shipped().get(recipe.path.stem)
    if ships is not None and ships.resolve() == recipe.path.resolve():
        extended = recipe.path.name
    else:
        extended = os.path.relpath(recipe.path.resolve(), path.parent.resolve())
    values = recipe.values()
    lines += [f"name: {recipe.name[:90]}_here", f"extends: {dump_inline(extended)}"]
    lines += [*render(_assigned(case, values)), "optimization:"]
    for kind in recipe.stages:
        if kind in recommendation.stages:
            lines.append(f"  {kind}: {dump_inline(values['optimization'][kind])}")
        else:
            lines.append(f"  {kind}: off  # {' '.join(recommendation.reasons[kind].split())}")
    lines += [f"  {kind}: off" for kind in recipe.off]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def _assigned(case: Case, values: dict[str, Any]) -> dict[str, Any]:
    """What the case's assignments have set, but for stages and secrets, as nested mappings."""
    assigned: dict[str, Any] = {}
    for assignment in case.sets:
        *parents, last = assignment.partition("=")[0].split(".")
        below, value = assigned, values
        if [*parents, last][0] in ("optimization", "name"):
            continue
        for key in parents:
            value = value[key]
        if MASK not in str(value[last]):
            for key in parents:
                below = below.setdefault(key, {})
            below[last] = value[last]
    return assigned


def _reason(kind: str, case: Case, result: CaseResult, kept: tuple[str, ...]) -> str:
    """Why a stage is off, the strongest reason first."""
    if kind in result.inactive:
        return f"inactive here: {result.inactive[kind]}"
    if not any(kind in variant.stages for variant in result.variants):
        return "nothing with it was measured"
    below = required(case.recipe.stages, kind)
    alone = next((variant for variant in result.variants if set(variant.stages) == {kind} | below), None)
    if alone is not None and alone.told("outcome") == Outcome.FAIL:
        return f"the gate failed: {alone.told('summary')}"
    if missing := sorted(below - set(kept)):
        return f"it requires {', '.join(missing)}, which is off"
    for gain in (each for each in result.worth if each.stage == kind):
        for measured, company in ((gain.together, "beside all others"), (gain.alone, "alone")):
            said = effect(measured, result.a_a) if measured is not None else Effect.FASTER
            if said is Effect.SLOWER:
                return f"slower: {measured} {company}"
            if said is Effect.INCONCLUSIVE:
                return f"no gain that can be told from noise: {measured} {company}, A/A {result.a_a}"
    with_it = result.named(ALL)
    if with_it is not None and kind in with_it.stages and with_it.overhead_s > 1:
        return f"its start-up of {with_it.overhead_s:.0f} s is not made up for in {result.planned_updates:,} updates"
    return "no measured set of stages with it was faster than this one"
