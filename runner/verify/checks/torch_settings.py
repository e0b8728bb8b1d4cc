"""Compares torch's global settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.plugin.contract import Statistical
from runner.proof.verdict import Outcome, Verdict

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair


class TorchSettingsCheck(Check):
    """Compares the settings of torch that a candidate leaves behind, or changes while it
    calls other code.
    """

    name = "torch's settings"
    question = "Are torch's global settings as in the baseline?"
    catches = (
        "TF32 or another matmul precision that is left on; a default dtype; "
        "deterministic modes"
    )

    def applies(self, pair: StagePair) -> bool:
        """Returns False for ``Statistical``, which may change the precision."""
        return not isinstance(pair.promised, Statistical)

    def cost(self, pair: StagePair) -> str:
        """Returns that it reads what updates have recorded."""
        return "nothing: recorded with the updates"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Reports the first setting that differs."""
        updates = pair.results[0][1]
        settings = updates.evidence.get("contract", {}).get("settings", {})
        # Settings that are changed only during calls have no trace in the evidence.
        if not settings:
            settings = {
                name: tuple(map(repr, values))
                for name, values in pair.code_coverage.settings.items()
            }
        for name, (expected, actual) in settings.items():
            summary = (
                f"it makes torch's {name} {actual} ({expected} before), "
                "which can change numbers: promise Statistical"
            )
            return Verdict(Outcome.INCONCLUSIVE, pair.promise_name, summary)
        return pair.passed("torch's settings are the baseline's")
