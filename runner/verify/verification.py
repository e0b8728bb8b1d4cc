"""Verdicts on the stages of a recipe: one for each alone, and one for all together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from runner.plugin.contract import Statistical
from runner.proof.verdict import Outcome, Verdict, worst
from runner.recipe.recipe import Recipe
from runner.system.console import CleanText, Console
from runner.system.errors import ExitCode, UsageError
from runner.system.text_lines import duration, print_wrapped
from runner.verify.reduced_form import Reduction, described
from runner.verify.time_limit import Interrupted
from runner.verify.variants import ALL, Variant, VariantSet, nothing_to_judge, weakest

_COLOURS = {Outcome.PASS: "green", Outcome.FAIL: "red", Outcome.INCONCLUSIVE: "yellow"}
Phase = Callable[[str], AbstractContextManager[object]]
"""Returns a context manager for a phase of the work; the progress bar shows its name."""
FAILED = "failed"
"""Key in the evidence for the error of a training that failed."""


@dataclass(frozen=True)
class StageVerdict:
    """The verdict on a set of stages.

    Attributes:
        name: The stage, or ``all`` for the complete recipe.
        stages: Kinds of the stages in the set.
        contract: The contract of the set.
        verdict: The outcome.
        summary: One line for the user.
        evidence: Evidence in the types of JSON.
    """

    name: str
    stages: tuple[str, ...]
    contract: str
    verdict: Outcome
    summary: str
    evidence: dict[str, Any]


@dataclass(frozen=True)
class Verification:
    """The result of ``runner verify``.

    Attributes:
        recipe: Name of the recipe.
        rows: Verdicts on sets of stages.
        inactive: Stages that have nothing to do on this machine, with the reason.
        seconds: Duration of the verification.
        interrupted: Exit code of a signal, after which the remaining sets were not
            judged; None without a signal.
        budget: Planned seconds; None without a limit.
        reduction: Settings that are smaller than in the recipe, with both values.
    """

    recipe: str
    rows: tuple[StageVerdict, ...]
    inactive: dict[str, str]
    seconds: float
    interrupted: ExitCode | None = None
    budget: float | None = None
    reduction: Reduction = field(default_factory=dict)

    @property
    def excess(self) -> float:
        """Returns the seconds beyond the budget."""
        return 0.0 if self.budget is None else max(0.0, self.seconds - self.budget)

    @property
    def outcome(self) -> Outcome:
        """Returns FAIL if anything failed, else INCONCLUSIVE if anything is not clear."""
        return worst(row.verdict for row in self.rows)

    @property
    def exit_code(self) -> ExitCode:
        """Returns that of a signal, or else 0, 3, 4, or 1 if a training failed and no
        stage did.
        """
        if self.interrupted is not None:
            return self.interrupted
        has_failed_training = any(FAILED in row.evidence for row in self.rows)
        # A training that failed is an error, and no verdict on a stage.
        if self.outcome is Outcome.INCONCLUSIVE and has_failed_training:
            return ExitCode.FAILED
        codes = {
            Outcome.FAIL: ExitCode.GATE_FAILED,
            Outcome.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
        }
        return codes.get(self.outcome, ExitCode.DONE)

    def data(self) -> dict[str, Any]:
        """Returns the result as a JSON object."""
        result: dict[str, Any] = {
            "recipe": self.recipe,
            "verdict": self.outcome,
            "seconds": self.seconds,
            "budget": self.budget,
            "seconds_beyond_budget": self.excess,
            "inactive": self.inactive,
            "stages": [asdict(row) for row in self.rows],
            "reduction": {
                path: list(values) for path, values in self.reduction.items()
            },
        }
        if self.interrupted is not None:
            result["interrupted"] = int(self.interrupted)
        return result


def show(report: Verification, console: Console) -> None:
    """Prints the verdict on every stage with its evidence below it, and the verdict on
    the recipe.
    """
    width = max((len(row.name) for row in report.rows), default=0)
    for row in report.rows:
        name = (f"{row.name:{width}}", "bold")
        outcome = (str(row.verdict), _COLOURS[row.verdict])
        line = CleanText.assemble(name, "  ", outcome, f"  {row.contract}")
        console.print(line)
        print_wrapped(f"    {row.summary}", console)
    for kind, reason in report.inactive.items():
        print_wrapped(f"{kind}: inactive, {reason}", console, hang=4, style="dim")
    outcome = (str(report.outcome), _COLOURS[report.outcome])
    seconds = f" in {duration(report.seconds)}"
    console.print(CleanText.assemble(f"{report.recipe}: ", outcome, seconds))
    if report.reduction:
        form = f"compared in a reduced form: {described(report.reduction)}"
        text = f"{form}; the recipe's sizes were not tried"
        print_wrapped(text, console, style="yellow")
    if report.excess >= 1:
        text = (
            f"{duration(report.excess)} more than the budget of "
            f"{duration(report.budget or 0)}: the budget limits trainings; "
            "other checks are finished first"
        )
        print_wrapped(text, console, style="yellow")


class Judge(Protocol):
    """Judges whether sets of stages are harmless."""

    def __call__(self, stages: Sequence[str]) -> Verdict:
        """Returns the verdict on a set."""

    def idle(self, stages: tuple[str, ...]) -> dict[str, str]:
        """Returns the stages of a set without effect, with the reason; by kind."""


def judged(
    recipe: Recipe,
    possible: VariantSet,
    kinds: Sequence[str],
    gate: Judge,
    say: Callable[[str], None],
    budget: float = 0.0,
    phase: Phase = nullcontext,
) -> Verification:
    """Judges every active stage alone and all together, or these kinds only.

    A signal ends it: sets that have a verdict are reported, the others are
    INCONCLUSIVE.

    Args:
        recipe: The recipe.
        possible: Its sets of stages.
        kinds: Names of the sets to judge; all if empty.
        gate: Judges a set.
        say: Receives lines about the progress.
        budget: Planned seconds; 0 for no limit.
        phase: Entered with the name of the set that is judged.
    """
    started = time.perf_counter()
    variants = _selected(possible, kinds)
    if not variants:
        raise nothing_to_judge(recipe, possible.inactive)
    rows: list[StageVerdict] = []
    inactive = dict(possible.inactive)
    interrupted: Interrupted | None = None
    forecast = _Forecast(budget, len(variants), say)
    is_trained = False
    for number, (name, variant) in enumerate(variants, start=1):
        title = f"{number}/{len(variants)} {name}"
        contract = type(weakest(recipe, variant.stages)).__name__
        idle: dict[str, str] = {}
        if interrupted is None:
            say(f"{title}: {contract} ...")
            try:
                with phase(title):
                    verdict = gate(variant.stages)
                    idle = gate.idle(variant.stages)
            except Interrupted as interruption:
                # Sets with a verdict are reported after a signal, too.
                interrupted = interruption
                summary = f"stopped by {interruption.signal.name}"
                verdict = Verdict(Outcome.INCONCLUSIVE, contract, summary)
            say(f"{title}: {verdict.outcome}")
            is_trained = is_trained or contract == Statistical.__name__
            # Trainings are planned separately, and several sets share them.
            if not is_trained:
                forecast.update(number, time.perf_counter() - started)
        else:
            summary = f"not judged: stopped by {interrupted.signal.name}"
            verdict = Verdict(Outcome.INCONCLUSIVE, contract, summary)

        outcome = verdict.outcome
        # A stage without effect has no row, unless it fails.
        if name in idle and outcome is not Outcome.FAIL:
            inactive[name] = idle[name]
            continue
        row = StageVerdict(
            name, variant.stages, contract, outcome, verdict.summary, verdict.evidence
        )
        rows.append(row)
    if not rows:
        raise nothing_to_judge(recipe, inactive)
    code = None if interrupted is None else interrupted.exit_code
    seconds = time.perf_counter() - started
    return Verification(
        recipe.name, tuple(rows), inactive, seconds, code, budget or None
    )


class _Forecast:
    """Reports once that the budget has no room for all sets of stages.

    Args:
        budget: Planned seconds; 0 for no limit.
        sets: Number of sets.
        say: Receives the line.
    """

    def __init__(self, budget: float, sets: int, say: Callable[[str], None]) -> None:
        self._budget = budget
        self._sets = sets
        self._say = say
        self._is_reported = False

    def update(self, judged_sets: int, seconds: float) -> None:
        """Estimates the time of all sets after some of them were judged in these
        seconds.
        """
        needed = seconds / judged_sets * self._sets
        # An estimate that changes with every set would be noise.
        if self._is_reported or not self._budget or needed <= self._budget:
            return
        self._is_reported = True
        count = max(judged_sets, int(self._budget / seconds * judged_sets))
        self._say(
            f"the budget of {self._budget:g} s has room for about {count} "
            f"of {self._sets} sets of stages; all need about {needed:.0f} s"
        )


def _selected(possible: VariantSet, kinds: Sequence[str]) -> list[tuple[str, Variant]]:
    """Returns the sets to judge with their displayed names: stages in their
    order, then the complete recipe.
    """
    by_name = {name: variant for variant in possible.variants for name in variant.names}
    # Sets that are required by a stage have names with a plus.
    candidates = [
        (name, variant)
        for name, variant in by_name.items()
        if variant.stages and " + " not in name
    ]
    candidates.sort(key=lambda candidate: candidate[0] == ALL)
    unknown = set(kinds) - by_name.keys()
    if unknown:
        active = [name for name, _ in candidates]
        raise UsageError(_not_active(min(unknown), possible, active))
    if not kinds:
        return candidates
    return [(name, variant) for name, variant in candidates if name in kinds]


def _not_active(kind: str, possible: VariantSet, active: Sequence[str]) -> str:
    """Returns the message about a stage that cannot be judged, with the reason and with
    those that can.
    """
    reasons = {**possible.inactive, **possible.refused}
    reason = reasons.get(kind, "the recipe does not turn it on")
    problem = f"no active stage '{kind}' ({reason})"
    if not active:
        return f"{problem}; no stage of the recipe is active on this machine"
    return f"{problem}; choose from: {', '.join(active)}"
