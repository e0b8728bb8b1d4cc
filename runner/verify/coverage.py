"""What a verification has covered within its budget, and how it is shared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from runner.compare.verdict import Outcome, Verdict, excluded
from runner.verify.time_limit import NOT_BEGUN, TimeLimit

LONG_RUN = "a long run"
CHECKS = ("updates", "predictions", "evaluations", "sampled batches", "a resumed training", LONG_RUN)
"""What is compared for every set of stages, in this order."""
_BEGINNING = 0.25  # of the budget, in which trainings are begun beside everything else
_SHARES = 2  # times its even share of the remaining budget is what a set of stages may take
_LONG_RUNS = 20  # parts of the remaining budget, one of which a long run may take


class Coverage:
    """The budget of a verification, and the check that is going on or was the last one for each set of stages.

    Args:
        budget: Seconds for all of it; 0 trains nothing and has no limit.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.limit = TimeLimit(budget or math.inf)
        self._checks: dict[tuple[str, ...], str] = {}

    def begin(self, stages: tuple[str, ...], check: str) -> None:
        """Notes that a check begins."""
        self._checks[stages] = check

    def current(self, stages: tuple[str, ...]) -> str | None:
        """Returns the check that is going on or was the last one; None if there was none."""
        return self._checks.get(stages)

    def share(self, asked: Iterable[tuple[str, ...]], *, trained: bool) -> float:
        """Returns the seconds that one of several sets of stages may take: all that remain if it is trained."""
        seconds = self.limit.seconds_left
        if math.isinf(seconds) or trained:
            return seconds
        unjudged = sum(stages not in self._checks for stages in asked)
        return seconds if unjudged <= _SHARES else _SHARES * seconds / unjudged

    def beginning(self) -> AbstractContextManager[None]:
        """Returns the time limit for beginning with trainings beside everything else."""
        return self.limit.within(_BEGINNING * self.limit.seconds_left)

    def at_most(self, seconds: float) -> float:
        """Returns the seconds that a long run may take: less than these where the budget is small."""
        return min(seconds, max(1.0, self.limit.seconds_left / _LONG_RUNS))

    @property
    def not_begun(self) -> str:
        """Returns the summary of a verdict for which no training was begun."""
        hint = "a larger --budget has room for them" if self.budget else "'runner verify' trains"
        return f"{NOT_BEGUN}; {hint}"

    def verdict(self, stages: tuple[str, ...], contract: str, partial: str) -> Verdict:
        """Returns the verdict on a set of stages of which the budget has not covered everything."""
        check = self._checks.setdefault(stages, "")
        if not check:
            summary = f"not begun within the budget of {self.budget:g} s; choose a larger --budget, or --stage"
            return Verdict(Outcome.INCONCLUSIVE, contract, summary)
        number = CHECKS.index(check)
        covered = f"{', '.join(CHECKS[:number])} keep the contract; " if number else ""
        missed = "trainings" if contract == "Statistical" and not number else ", ".join(CHECKS[number:])
        reached = f" ({partial})" if partial else ""
        summary = (
            f"{covered}not covered within the budget of {self.budget:g} s: {missed}{reached}; choose a larger --budget"
        )
        return Verdict(Outcome.INCONCLUSIVE, contract, summary, {"covered": list(CHECKS[:number])})


def with_exclusion(verdict: Verdict, found: Sequence[Verdict], few: int, exact: bool) -> Verdict:
    """Returns the verdict with how rare an error may be that all checks together exclude.

    Args:
        verdict: The worst one.
        found: Those of all checks, that on updates first.
        few: The number of those updates.
        exact: Whether the same bits were promised.
    """
    horizon = max((each.evidence.get("horizon", few) for each in found), default=few)
    around = [{"verdict": each.outcome, "summary": each.summary} for each in found[1:]]
    sampled = min((each.evidence["drawn"] for each in found if "drawn" in each.evidence), default=horizon)
    late = horizon if exact or horizon <= few else sampled
    of_samples = f" (of what is drawn, in more than 1 of {max(1, late // 3):,})" if late < horizon else ""
    summary = verdict.summary.replace(excluded(few), f"{excluded(horizon)}{of_samples}")
    return replace(verdict, summary=summary, evidence=found[0].evidence | {"horizon": horizon, "around": around})
