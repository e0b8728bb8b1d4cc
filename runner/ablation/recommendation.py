"""Recommends the fastest stages that passed the gate, and lists faster ones that are not proven
harmless.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from runner.ablation.analysis import CaseResult, VariantResult
from runner.ablation.experiment import Case
from runner.plugin.registry import Registry
from runner.proof.ratios import Effect, Ratio, effect, noise_factor
from runner.proof.verdict import Outcome
from runner.recipe.loader import shipped
from runner.system.suggestions import shown_path
from runner.system.text_lines import duration
from runner.verify.variants import ALL, BASELINE, required

NOT_JUDGED = "the gate has not judged it"


@dataclass(frozen=True)
class Unproven:
    """A set of stages that is faster than the recommended one, and that may be harmless or not."""

    variant: str
    stages: tuple[str, ...]
    ratio: Ratio
    seconds: float
    """Seconds of the recipe's training."""
    verdict: str | None
    """Verdict of the gate; None if it did not judge."""
    command: str
    """The command with which the gate trains if only trainings can decide."""

    def __str__(self) -> str:
        verdict = f"the gate: {self.verdict}" if self.verdict else NOT_JUDGED
        return (
            f"faster, but not proven harmless ({verdict}): {self.variant}, {self.ratio}, "
            f"{duration(self.seconds)}"
        )


@dataclass(frozen=True)
class Recommendation:
    """The recommended stages, and the reasons against the others."""

    case: str
    variant: str
    """The recommended variant; the baseline if no stage is worth it."""
    stages: tuple[str, ...]
    reasons: dict[str, str]
    """Reason for every stage that should be off."""
    updates: int
    """Updates of the recipe's training, for which the stages are recommended."""
    seconds: float
    """Seconds of these updates, including the start-up beyond the baseline's."""
    baseline_seconds: float
    rule: str
    """The rule that decided."""
    unproven: tuple[Unproven, ...] = ()
    """Faster sets that are not proven, the fastest first."""

    def __str__(self) -> str:
        prefix = f"{self.case}: " if self.case else ""
        stages = ", ".join(self.stages) or "no stage"
        time = (
            f"{duration(self.seconds)} for the {self.updates:,} updates of a training"
        )
        if self.stages:
            saved = self.baseline_seconds - self.seconds
            share = saved / self.baseline_seconds
            time = f"{time}, {duration(saved)} ({share:.0%}) less than without stages"
        return f"{prefix}use {stages}: {time}. Rule: {self.rule}."


class _Totals:
    """Seconds of the recipe's training by variant, and the rule that compares them."""

    def __init__(self, result: CaseResult) -> None:
        self.updates = result.planned_updates
        self.a_a = result.training_a_a
        self.noise = noise_factor(result.training_a_a)
        baseline = result.variants[0]
        # Start-up that the baseline also needs is no argument against a stage.
        self.start_up = {
            variant.name: max(0.0, variant.overhead_s - baseline.overhead_s)
            for variant in result.variants
        }
        self.start_up[BASELINE] = 0.0
        self.seconds = {
            variant.name: self.start_up[variant.name]
            + self.updates * variant.training_s
            for variant in result.variants
        }
        self.seconds[BASELINE] = self.updates * baseline.training_s

    def choose(self, passed: Mapping[str, VariantResult]) -> tuple[str, str]:
        """Returns the name of the variant to use, and the rule that decided.

        Args:
            passed: The variants that passed the gate, without the baseline.
        """
        faster = [
            item.name
            for item in passed.values()
            if item.training_effect is Effect.FASTER
        ]
        if len(self.seconds) == 1:
            return (
                BASELINE,
                "no set of stages was measured, so nothing is known about them",
            )
        if not passed:
            return BASELINE, "no measured set of stages has passed the gate"
        if not faster:
            best = min(passed, key=lambda name: self.seconds[name])
            return (
                BASELINE,
                f"no set that passed is faster beyond the noise; the best is "
                f"{self.described(best)}",
            )
        stages = {name: passed[name].stages for name in faster} | {BASELINE: ()}
        evidence = {name: f"; {self.evidence(passed[name])}" for name in faster} | {
            BASELINE: ""
        }
        fastest = min(stages, key=lambda name: self.seconds[name])
        limit = self.seconds[fastest] * self.noise
        equal = [name for name in stages if self.seconds[name] <= limit]
        choice = min(equal, key=lambda name: (len(stages[name]), self.seconds[name]))

        if choice != fastest:
            rule = (
                f"within the noise of the fastest that passed ({self.described(fastest)}), "
                f"fewer stages win"
            )
            return choice, rule + evidence[choice]
        if choice != BASELINE:
            return choice, f"the fastest that passed the gate{evidence[choice]}"
        best = min(faster, key=lambda name: self.seconds[name])
        return (
            choice,
            f"with its start-up, no set that passed takes less time; the best is "
            f"{self.described(best)}",
        )

    def evidence(self, variant: VariantResult) -> str:
        """Returns the measurement by which a variant is faster, and whether it differs from that
        of updates.
        """
        measured = f"training steps are faster: {variant.training_ratio}, noise {self.noise:.2f}x"
        if variant.effect is Effect.FASTER:
            return measured
        return f"{measured} (updates alone are {variant.effect}: {variant.ratio})"

    def described(self, name: str) -> str:
        """Returns a variant's total, and what start-up and noise have to do with it."""
        extra = (
            f", {duration(self.start_up[name])} of it more start-up"
            if self.start_up[name] >= 0.05
            else ""
        )
        return f"{name}: {duration(self.seconds[name])}{extra}; noise {self.noise:.2f}x"

    def objection(self, name: str, choice: str) -> str:
        """Returns why a variant that passed was not chosen."""
        extra = self.start_up[name] - self.start_up[choice]
        difference = self.seconds[name] - self.seconds[choice]
        if extra > 0 and 0 < difference <= extra:
            saved = duration(extra - difference)
            return (
                f"it starts {duration(extra)} later, and {self.updates:,} updates save only "
                f"{saved} of that "
                f"({name}: {duration(self.seconds[name])}, {choice}: "
                f"{duration(self.seconds[choice])})"
            )
        if difference <= 0:
            return f"no gain beyond the noise, so fewer stages win ({self.described(name)})"
        return f"a training takes longer with it ({self.described(name)})"


def recommend(case: Case, result: CaseResult, registry: Registry) -> Recommendation:
    """Returns the variant that passed the gate and takes the least time for the recipe's training.

    Complete training steps count, including sampling and transfer: an update that is twice as fast
    gains little if updates are a tenth of the time. Compilation and warm-up count, so a stage with
    faster steady updates may still take more time. Between variants that differ by no more than the
    noise (``noise_factor``), the one with the fewest stages wins. Variants that contain a set that
    failed, or that do other work than the baseline, are excluded.
    """
    is_failed = {
        variant.name: variant.verdict == Outcome.FAIL or bool(variant.caught)
        for variant in result.variants
    }
    # A set that contains a failed set is excluded, even if it passed.
    failed = [
        set(variant.stages) for variant in result.variants if is_failed[variant.name]
    ]
    possible = [
        item
        for item in result.variants
        if not any(stages <= set(item.stages) for stages in failed)
    ]
    passed = {
        item.name: item
        for item in possible
        if item.stages and item.verdict == Outcome.PASS
    }
    totals = _Totals(result)
    choice, rule = totals.choose(passed)

    proof = partial(_proof, case, registry, result)
    unproven = [
        Unproven(
            item.name,
            item.stages,
            item.training_ratio,
            totals.seconds[item.name],
            item.verdict,
            proof(item),
        )
        for item in possible
        if item.stages
        and item.name not in passed
        and item.training_effect is Effect.FASTER
        and totals.seconds[item.name] * totals.noise < totals.seconds[choice]
    ]
    is_on = passed[choice].stages if choice in passed else ()
    reasons = {}
    for kind in case.recipe.stages:
        if kind not in is_on:
            with_kind = [item.name for item in passed.values() if kind in item.stages]
            best = min(with_kind, key=lambda name: totals.seconds[name], default=None)
            objection = "no set of stages with it has passed the gate"
            if best is not None:
                objection = totals.objection(best, choice)
            reasons[kind] = _reason(kind, case, result, is_on) or objection
    return Recommendation(
        case.name,
        choice,
        is_on,
        reasons,
        totals.updates,
        totals.seconds[choice],
        totals.seconds[BASELINE],
        rule,
        tuple(sorted(unproven, key=lambda item: item.seconds)),
    )


def _proof(
    case: Case, registry: Registry, result: CaseResult, variant: VariantResult
) -> str:
    """The command that judges exactly these stages, for as long as it takes."""
    recipe = case.recipe
    ships = shipped().get(recipe.path.stem)
    is_shipped = ships is not None and ships.resolve() == recipe.path.resolve()
    assignments = list(case.sets)
    name = variant.name
    options = ["--stage", name]
    # Names of sets of stages exist in an ablation only, and several processes are judged with all
    # stages of a recipe.
    if name not in recipe.stages or result.processes > 1:
        assignments += [
            f"optimization.{kind}=off"
            for kind in recipe.stages
            if kind not in (*variant.stages, *result.inactive)
        ]
        options = ["--stage", ALL]
    if result.processes > 1:
        options = ["--nproc", str(result.processes)]
    arguments = [recipe.path.stem if is_shipped else shown_path(recipe.path)]
    arguments += [
        argument for assignment in assignments for argument in ("--set", assignment)
    ]
    return registry.command(shlex.join(["runner", "verify", *arguments, *options]))


def _reason(kind: str, case: Case, result: CaseResult, stages: tuple[str, ...]) -> str:
    """Returns why a stage is off, the strongest reason first; empty if only the totals decide."""
    if kind in result.inactive:
        return f"inactive here: {result.inactive[kind]}"
    if not any(kind in variant.stages for variant in result.variants):
        return "no set of stages with it was measured"
    required_stages = required(case.recipe.stages, kind)
    alone = next(
        (
            variant
            for variant in result.variants
            if set(variant.stages) == {kind} | required_stages
        ),
        None,
    )
    if alone is not None and alone.caught:
        return f"it does not do the baseline's work: {alone.caught}"
    if alone is not None and alone.verdict == Outcome.FAIL:
        return f"the gate failed: {alone.verdict_summary}"
    if missing := sorted(required_stages - set(stages)):
        return f"it requires {', '.join(missing)}, which is off"
    for gain in result.worth:
        if gain.stage != kind:
            continue
        # The gain together with all other stages decides before the gain alone.
        measurements = ((gain.together, "with all others"), (gain.alone, "alone"))
        for measured, context in measurements:
            if measured is None:
                continue
            gain_effect = effect(measured, result.a_a)
            if gain_effect is Effect.SLOWER:
                return f"slower: {measured} {context}"
            if gain_effect is Effect.UNCLEAR:
                return (
                    f"no gain beyond the noise: {measured} {context}; noise "
                    f"{noise_factor(result.a_a):.2f}x"
                )
    with_it = result.named(ALL)
    trained = alone or with_it
    is_in_vain = (
        trained is not None
        and trained.effect is Effect.FASTER is not trained.training_effect
    )
    if trained is not None and kind in trained.stages and is_in_vain:
        share = (
            0.0
            if trained.throughput is None
            else trained.throughput.shares.get("update", 0.0)
        )
        return (
            f"an update is faster, {trained.ratio}, but a training step is "
            f"{trained.training_effect}, "
            f"{trained.training_ratio}; updates are {share:.0%} of its time"
        )
    if alone is not None and alone.verdict == Outcome.PASS:
        # Then only its totals are an argument against it, whatever was measured together with
        # others.
        return ""
    for variant in (alone, with_it):
        if (
            variant is not None
            and kind in variant.stages
            and variant.verdict != Outcome.PASS
        ):
            if variant.effect is Effect.FASTER:
                return f"faster, but not proven harmless: {variant.verdict_summary or NOT_JUDGED}"
            if alone is None:
                return (
                    f"only {variant.name} was measured with it, which is not faster: "
                    f"{variant.ratio}"
                )
    return ""
