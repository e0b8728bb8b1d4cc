"""Reports side effects that updates have recorded."""

from __future__ import annotations

from runner.plugin.check import TimeBudget
from runner.proof.fingerprints import objections
from runner.proof.subject_pair import SubjectCheck, SubjectPair
from runner.proof.verdict import Verdict, worst


class SideEffectsCheck(SubjectCheck):
    """Reports results that are overwritten, autocast, and state that has no counterpart."""

    name = "side effects"
    question = (
        "Do results outlive later updates, is nothing cast, and has every part of the "
        "state a counterpart?"
    )
    catches = (
        "a result that one of the next three steps overwrites; lower precision by autocast "
        "(Close), which float64 does not show; INCONCLUSIVE for a part of the state without a "
        "counterpart, or for trained parameters outside the state"
    )
    judges_contract = False

    def cost(self, pair: SubjectPair) -> str:
        """Returns that it reads what updates have recorded."""
        return "nothing: recorded with the updates"

    def run(self, pair: SubjectPair, budget: TimeBudget) -> Verdict:
        """Returns the worst objections; without any, an empty summary."""
        verdicts = objections(pair.evidence, pair.promise_name)
        outcome = worst(verdict.outcome for verdict in verdicts)
        summaries = [
            verdict.summary for verdict in verdicts if verdict.outcome is outcome
        ]
        return Verdict(outcome, pair.promise_name, "; ".join(summaries))
