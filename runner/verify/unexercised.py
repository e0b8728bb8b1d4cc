"""Lists what the checks of a verdict have not exercised."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.verify.pair import StagePair

NOT_EXERCISED = "not_exercised"
"""Key in the evidence of a check for the texts that a PASS adds to its limits."""
SHOWN_LINES = 5
"""Lines of code that a summary names."""


@dataclass(frozen=True)
class Unexercised:
    """The limits of a PASS.

    Attributes:
        updates: Number of consecutive updates that were compared; later ones were not.
        training_updates: Updates of a complete training, estimated from its first ones.
        evaluations: Number of evaluations that were compared; 0 if none was.
        input_sizes: Batch sizes of the predictions that were compared; other sizes were not.
        checks: Names of checks that were not run.
        events: Rare events of a source that did not occur, and sizes in which it was
            not compared.
        ended_s: Seconds after which the long run ended before its last update; 0 if it did not.
        lines: Statements of the stage and of modules in its folder that never ran, as
            ``FILE:LINE``.
    """

    updates: int
    training_updates: int
    evaluations: int
    input_sizes: tuple[int, ...]
    checks: tuple[str, ...]
    lines: tuple[str, ...]
    events: tuple[str, ...] = ()
    ended_s: float = 0.0

    def __str__(self) -> str:
        parts = []
        if self.lines:
            more = (
                f" and {len(self.lines) - SHOWN_LINES} more"
                if len(self.lines) > SHOWN_LINES
                else ""
            )
            parts.append(f"the code in {', '.join(self.lines[:SHOWN_LINES])}{more}")
        if self.updates < self.training_updates:
            remedy = (
                f" (no more fit into {self.ended_s:g} s; --horizon N takes its time)"
                if self.ended_s
                else ""
            )
            parts.append(
                f"updates after {self.updates:,} of about {self.training_updates:,}{remedy}"
            )
        evaluations = (
            f"more than {self.evaluations} evaluations"
            if self.evaluations
            else "evaluations"
        )
        parts.append(evaluations)
        if self.input_sizes:
            parts.append(
                f"inputs of other sizes than {', '.join(map(str, self.input_sizes))}"
            )
        parts += self.events
        return "; ".join(parts)

    def data(self) -> dict[str, Any]:
        """Returns it as JSON can store it."""
        return asdict(self)


def list_unexercised(
    pair: StagePair, updates: int, checks: tuple[str, ...]
) -> Unexercised:
    """Returns what the checks that were run on a pair have not exercised.

    Args:
        pair: With the results of its checks.
        updates: Number of consecutive updates that were compared.
        checks: Names of all checks of the gate.
    """
    completed = {check.name for check, _ in pair.results}
    baseline = pair.baseline
    events = [
        event
        for _, verdict in pair.results
        for event in verdict.evidence.get(NOT_EXERCISED, ())
    ]
    return Unexercised(
        updates=updates,
        training_updates=_count_training_updates(pair),
        evaluations=baseline.count_evaluations() if "evaluations" in completed else 0,
        input_sizes=baseline.input_sizes if "predictions" in completed else (),
        checks=tuple(name for name in checks if name not in completed),
        lines=tuple(pair.code_coverage.missed()),
        events=tuple(events),
        ended_s=_seconds_that_ended(pair, updates)
        if "a long run" in completed
        else 0.0,
    )


def _seconds_that_ended(pair: StagePair, updates: int) -> float:
    """Returns the time of the long run if it was over before the last update, or else 0."""
    options = pair.options
    is_complete = options.completes_horizon or updates >= options.horizon
    return 0.0 if is_complete else options.horizon_seconds


def _count_training_updates(pair: StagePair) -> int:
    """Returns about how many updates a complete training makes."""
    progress = pair.baseline.progress
    updates: int = pair.baseline.batches[pair.options.updates - 1].progress["updates"]
    return round(updates * progress.whole / max(1, progress.position))
