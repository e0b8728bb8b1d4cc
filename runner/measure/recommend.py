"""Which stages to use: of those that passed the gate the fastest; and what is faster but not proven harmless."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from runner.compare.ratio import Effect, Ratio, effect
from runner.compare.verdict import Outcome
from runner.measure.analysis import CaseResult, VariantResult
from runner.measure.experiment import Case
from runner.plugin.registry import Registry
from runner.recipe.loader import shipped
from runner.system.names import shown_path
from runner.verify.variants import ALL, BASELINE, required

NOT_ASKED = "the gate was not asked"


@dataclass(frozen=True)
class Unproven:
    """A set of stages that is faster than the recommended one, and that may be harmless or not."""

    variant: str
    stages: tuple[str, ...]
    ratio: Ratio
    seconds: float  # of the recipe's whole training
    verdict: str | None  # the gate's; None if it was not asked
    command: str  # that has the gate train where only that can tell

    def __str__(self) -> str:
        said = f"the gate: {self.verdict}" if self.verdict else NOT_ASKED
        return f"faster, but not proven harmless ({said}): {self.variant}, {self.ratio}, {self.seconds:,.0f} s"


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
    unproven: tuple[Unproven, ...] = ()  # the fastest first

    def __str__(self) -> str:
        case, stages = f"{self.case}: " if self.case else "", ", ".join(self.stages) or "no stage"
        instead = f" instead of {self.baseline_seconds:,.0f} s" if self.stages else ""
        return f"{case}use {stages}: {self.seconds:,.0f} s for the {self.updates:,} updates of a training{instead}"


def recommend(case: Case, result: CaseResult, registry: Registry) -> Recommendation:
    """Of what the gate has passed, the variant with which the recipe's whole training takes least time.

    Whole training steps count, sampling and transfer included: an update that is twice as fast is worth little where
    updates are a tenth of the time. Compilation and warm-up count, so a stage that is faster in the end may still not
    be worth it. Between variants that the machine cannot tell apart, the one with the fewest stages wins. What contains
    something that failed, or that does not do the baseline's work, is left out.
    """
    updates, start_up = result.planned_updates, result.variants[0].overhead_s  # of the baseline, which is the first
    is_failed = {variant.name: variant.verdict == Outcome.FAIL or bool(variant.caught) for variant in result.variants}
    failed = [set(variant.stages) for variant in result.variants if is_failed[variant.name]]
    possible = [each for each in result.variants if not any(own <= set(each.stages) for own in failed)]
    total = {
        variant.name: max(0.0, variant.overhead_s - start_up) + updates * variant.training_s for variant in possible
    }
    total[BASELINE] = updates * result.variants[0].training_s
    stages = {variant.name: variant.stages for variant in possible if variant.verdict == Outcome.PASS} | {BASELINE: ()}
    fastest, spread = min(total[name] for name in stages), result.training_a_a.spread
    chosen = min(
        (name for name in stages if total[name] <= fastest * spread), key=lambda name: (len(stages[name]), total[name])
    )
    proof = partial(_proof, case, registry, result.inactive)
    unproven = [
        Unproven(each.name, each.stages, each.training_ratio, total[each.name], each.verdict, proof(each))
        for each in possible
        if each.name not in stages
        and each.training_effect is Effect.FASTER
        and total[each.name] * spread < total[chosen]
    ]
    kept = stages[chosen]
    reasons = {kind: _reason(kind, case, result, kept) for kind in case.recipe.stages if kind not in kept}
    return Recommendation(
        case.name, chosen, kept, reasons, updates, total[chosen], total[BASELINE],
        tuple(sorted(unproven, key=lambda each: each.seconds)),
    )  # fmt: skip


def _proof(case: Case, registry: Registry, inactive: Collection[str], variant: VariantResult) -> str:
    """The command that judges exactly these stages, for as long as it takes."""
    recipe = case.recipe
    ships = shipped().get(recipe.path.stem)
    bare = ships is not None and ships.resolve() == recipe.path.resolve()
    sets, name = list(case.sets), variant.name
    if name not in recipe.stages:  # of those that are on, all
        sets += [f"optimization.{kind}=off" for kind in recipe.stages if kind not in (*variant.stages, *inactive)]
        name = ALL
    arguments = [recipe.path.stem if bare else shown_path(recipe.path)]
    arguments += [part for assignment in sets for part in ("--set", assignment)]
    return registry.command(shlex.join(["runner", "verify", *arguments, "--stage", name]))


def _reason(kind: str, case: Case, result: CaseResult, kept: tuple[str, ...]) -> str:
    """Why a stage is off, the strongest reason first."""
    if kind in result.inactive:
        return f"inactive here: {result.inactive[kind]}"
    if not any(kind in variant.stages for variant in result.variants):
        return "nothing with it was measured"
    below = required(case.recipe.stages, kind)
    alone = next((variant for variant in result.variants if set(variant.stages) == {kind} | below), None)
    if alone is not None and alone.caught:
        return f"it does not do the baseline's work: {alone.caught}"
    if alone is not None and alone.verdict == Outcome.FAIL:
        return f"the gate failed: {alone.verdict_summary}"
    if missing := sorted(below - set(kept)):
        return f"it requires {', '.join(missing)}, which is off"
    for gain in (each for each in result.worth if each.stage == kind):
        for measured, company in ((gain.together, "beside all others"), (gain.alone, "alone")):
            said = effect(measured, result.a_a) if measured is not None else Effect.FASTER
            if said is Effect.SLOWER:
                return f"slower: {measured} {company}"
            if said is Effect.UNCLEAR:
                return f"no gain that can be told from noise: {measured} {company}, A/A {result.a_a}"
    with_it = result.named(ALL)
    trained = alone or with_it
    is_in_vain = trained is not None and trained.effect is Effect.FASTER is not trained.training_effect
    if trained is not None and kind in trained.stages and is_in_vain:
        share = 0.0 if trained.throughput is None else trained.throughput.shares.get("update", 0.0)
        return (
            f"an update is faster, {trained.ratio}, but updates are {share:.0%} of a training, which is not: "
            f"{trained.training_ratio}"
        )
    for variant in (alone, with_it):
        if variant is not None and kind in variant.stages and variant.verdict != Outcome.PASS:
            if variant.effect is Effect.FASTER:
                return f"faster, but not proven harmless: {variant.verdict_summary or NOT_ASKED}"
            if alone is None:
                return f"nothing but {variant.name} was measured with it, which is no gain: {variant.ratio}"
    if with_it is not None and kind in with_it.stages and with_it.overhead_s > 1:
        return f"its start-up of {with_it.overhead_s:.0f} s is not made up for in {result.planned_updates:,} updates"
    return "no set of stages with it that was measured and passed was faster than this one"
