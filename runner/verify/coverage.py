"""The time budget of a verification, and what it has covered."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from runner.proof.verdict import Outcome, Verdict
from runner.verify.time_limit import NOT_BEGUN, TimeLimit

if TYPE_CHECKING:
    from runner.plugin.check import Check
    from runner.verify.pair import StagePair

_BEGINNING = 0.25
"""Share of the budget in which trainings start before other checks."""
_SHARES = 2
"""Multiple of its equal share of the remaining budget that a set of stages may take."""
# A set that is interrupted has spent its time without a verdict.
_LEAST_SHARE = 0.5
"""Share of the remaining budget that a set of stages may take in any case."""
_LONG_RUNS = 20
"""Number of long runs for which the remaining budget must have room."""


class Coverage:
    """The budget of a verification, and the sets of stages whose checks have started.

    Args:
        budget: Seconds for all of it; 0 trains nothing and has no limit.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.limit = TimeLimit(budget or math.inf)
        self._judged: set[tuple[str, ...]] = set()

    def begin(self, stages: tuple[str, ...]) -> None:
        """Records that the checks of a set of stages start."""
        self._judged.add(stages)

    def share(self, sets: Iterable[tuple[str, ...]], *, trained: bool) -> float:
        """Returns the seconds that one of several sets of stages may take: all that
        remain if it is trained.
        """
        seconds = self.limit.seconds_left
        # Trainings limit themselves to the budget.
        if math.isinf(seconds) or trained:
            return seconds
        unjudged = sum(stages not in self._judged for stages in sets)
        share = _SHARES / unjudged if unjudged else 1.0
        return seconds * min(1.0, max(share, _LEAST_SHARE))

    def beginning(self) -> AbstractContextManager[None]:
        """Returns the time limit in which trainings may start before other checks."""
        return self.limit.within(_BEGINNING * self.limit.seconds_left)

    def at_most(self, seconds: float) -> float:
        """Returns the seconds that a long run may take: less than these where the budget
        is small.
        """
        return min(seconds, max(1.0, self.limit.seconds_left / _LONG_RUNS))

    @property
    def not_begun(self) -> str:
        """Returns the summary of a verdict for which no training was started."""
        hint = (
            "a larger --budget has room for them"
            if self.budget
            else "'runner verify' trains"
        )
        return f"{NOT_BEGUN}; {hint}"

    def verdict(
        self, pair: StagePair, checks: Sequence[Check], partial: str
    ) -> Verdict:
        """Returns the verdict on a set of stages whose checks the budget did not cover.

        Args:
            pair: With the results of the checks that were finished in time.
            checks: All checks in their order.
            partial: Intermediate result of the check that the budget interrupted.
        """
        if pair.stages not in self._judged:
            self.begin(pair.stages)
            summary = (
                f"not started within the budget of {self.budget:g} s; "
                "choose a larger --budget, or --stage"
            )
            return Verdict(Outcome.INCONCLUSIVE, pair.promise_name, summary)
        covered = [check.name for check, _ in pair.results]
        last = checks.index(pair.results[-1][0]) + 1 if pair.results else 0
        missed = [check.name for check in checks[last:] if check.applies(pair)]
        results = f"{', '.join(covered)} keep the contract; " if covered else ""
        intermediate = f" ({partial})" if partial else ""
        summary = (
            f"{results}not covered within the budget of {self.budget:g} s: "
            f"{', '.join(missed)}{intermediate}; choose a larger --budget"
        )
        return Verdict(
            Outcome.INCONCLUSIVE, pair.promise_name, summary, {"covered": covered}
        )
