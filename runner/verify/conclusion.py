"""Makes one verdict of the verdicts of all checks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runner.plugin.contract import Exact, Statistical
from runner.proof.subject_pair import HEALTH
from runner.proof.verdict import Outcome, Verdict, excluded, worst
from runner.verify.subjects import remarks
from runner.verify.unexercised import list_unexercised

if TYPE_CHECKING:
    from runner.verify.pair import StagePair


def conclude(
    pair: StagePair, missed: str = "", checks: tuple[str, ...] = ()
) -> Verdict:
    """Returns the worst verdict of a pair's checks, with the error rate that they exclude
    and the limits of their coverage.

    Args:
        pair: Contains the results of its checks.
        missed: Checks for which the budget had no room, as the end of the summary.
        checks: Names of all checks, including those that did not run.
    """
    verdict = _with_exclusion(pair, _worst(pair))
    verdict = replace(verdict, summary=verdict.summary + missed)
    if verdict.outcome is Outcome.FAIL:
        # Remarks of stages may explain different numbers.
        notes = remarks(pair.reports, pair.recipe, pair.registry, pair.batches)
        return replace(verdict, summary="; ".join([verdict.summary, *notes]))
    idle = pair.idle
    if pair.stages and set(pair.stages) <= idle.keys():
        reasons = [f"{kind} is inactive: {reason}" for kind, reason in idle.items()]
        summary = "; ".join(reasons)
        return replace(verdict, outcome=Outcome.INCONCLUSIVE, summary=summary)
    # Trainings run in other processes, and longer.
    if not verdict or verdict.contract == "Statistical":
        return verdict
    unexercised = list_unexercised(pair, verdict.evidence["horizon"], checks)
    evidence = verdict.evidence | {"not_exercised": unexercised.data()}
    if unexercised.lines:
        evidence["never_ran"] = list(unexercised.lines)
    text = f"; not exercised here: {unexercised}" if str(unexercised) else ""
    return replace(verdict, summary=verdict.summary + text, evidence=evidence)


def _primary(pair: StagePair) -> Verdict:
    """Returns the verdict on updates, or that on trainings where only these can show the
    contract.
    """
    _, first = pair.results[0]
    check, last = pair.results[-1]
    is_trained = last.contract == "Statistical" and check.name == "trainings"
    return last if is_trained else first


def _worst(pair: StagePair) -> Verdict:
    """Returns the primary verdict, or with its evidence and contract the first one that
    is worse.
    """
    primary = _primary(pair)
    verdicts = [verdict for _, verdict in pair.results]
    outcome = worst(verdict.outcome for verdict in verdicts)
    if outcome is primary.outcome:
        return primary
    worse = next(verdict for verdict in verdicts if verdict.outcome is outcome)
    return replace(
        primary,
        outcome=outcome,
        summary=worse.summary,
        contract=pair.promise_name if primary.contract == HEALTH else primary.contract,
        evidence=primary.evidence | {"difference": worse.evidence.get("difference")},
        reproduction=worse.reproduction,
    )


def _with_exclusion(pair: StagePair, verdict: Verdict) -> Verdict:
    """Returns the verdict with the error rate that all checks together exclude."""
    compared = 0 if isinstance(pair.contract, Statistical) else len(pair.batches)
    horizons = [result.evidence.get("horizon", compared) for _, result in pair.results]
    horizon = max(horizons, default=compared)
    around = [
        {"check": check.name, "verdict": result.outcome, "summary": result.summary}
        for check, result in pair.results[1:]
    ]
    exclusion = excluded(horizon) + _of_samples(pair, horizon)
    return replace(
        verdict,
        summary=verdict.summary.replace(excluded(compared), exclusion),
        evidence=verdict.evidence | {"horizon": horizon, "around": around},
    )


def _of_samples(pair: StagePair, horizon: int) -> str:
    """Returns the error rate in sampled batches, where fewer of them were compared."""
    # Exact stages sample in their long run; Statistical ones promise no numbers.
    is_close = not isinstance(pair.contract, Exact | Statistical)
    if not is_close or horizon <= len(pair.batches):
        return ""
    evidence = [result.evidence for _, result in pair.results]
    counts = [values["drawn"] for values in evidence if "drawn" in values]
    samples = min(counts, default=horizon)
    if samples >= horizon:
        return ""
    return f" (in sampled batches, 1 in {max(1, samples // 3):,})"
