"""Makes one verdict of the verdicts of all checks."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Returns the worst verdict of a pair's checks, with what they exclude and what they did not cover.

    Args:
        pair: With the results of its checks.
        missed: What the budget had no room for, as the end of the summary.
        checks: Names of all checks, including those that did not run.
    """
    verdict = _with_exclusion(pair, _worst(pair))
    verdict = replace(verdict, summary=verdict.summary + missed)
    if verdict.outcome is Outcome.FAIL:
        notes = remarks(pair.reports, pair.recipe, pair.baseline.registry, pair.batches)
        return replace(verdict, summary="; ".join([verdict.summary, *notes]))
    idle = pair.idle
    if pair.stages and set(pair.stages) <= idle.keys():
        summary = "; ".join(
            f"{kind} is inactive: {reason}" for kind, reason in idle.items()
        )
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
    """Returns the verdict on updates, or that on trainings where only these can show the contract."""
    verdicts = [verdict for _, verdict in pair.results]
    is_trained = (
        verdicts[-1].contract == "Statistical"
        and pair.results[-1][0].name == "trainings"
    )
    return verdicts[-1] if is_trained else verdicts[0]


def _worst(pair: StagePair) -> Verdict:
    """Returns the primary verdict, or with its evidence and contract the first one that is worse."""
    primary = _primary(pair)
    outcomes = [verdict.outcome for _, verdict in pair.results]
    outcome = worst(outcomes)
    if outcome is primary.outcome:
        return primary
    worse = next(verdict for _, verdict in pair.results if verdict.outcome is outcome)
    contract = pair.promise_name if primary.contract == HEALTH else primary.contract
    evidence = primary.evidence | {"difference": worse.evidence.get("difference")}
    return replace(
        primary, outcome=outcome, summary=worse.summary, contract=contract, evidence=evidence,
        reproduction=worse.reproduction,
    )  # fmt: skip


def _with_exclusion(pair: StagePair, verdict: Verdict) -> Verdict:
    """Returns the verdict with how rare an error may be that all checks together exclude."""
    verdicts = [result for _, result in pair.results]
    compared = 0 if isinstance(pair.contract, Statistical) else len(pair.batches)
    horizon = max(
        (result.evidence.get("horizon", compared) for result in verdicts),
        default=compared,
    )
    around = [
        {"check": check.name, "verdict": result.outcome, "summary": result.summary}
        for check, result in pair.results[1:]
    ]
    text = verdict.summary.replace(
        excluded(compared), excluded(horizon) + _of_samples(pair, verdicts, horizon)
    )
    return replace(
        verdict,
        summary=text,
        evidence=verdict.evidence | {"horizon": horizon, "around": around},
    )


def _of_samples(pair: StagePair, verdicts: Sequence[Verdict], horizon: int) -> str:
    """Returns how rare an error in sampled batches may be, where fewer of them were compared."""
    few = len(pair.batches)
    if isinstance(pair.contract, Exact | Statistical) or horizon <= few:
        return ""
    samples = min(
        (result.evidence["drawn"] for result in verdicts if "drawn" in result.evidence),
        default=horizon,
    )
    return (
        f" (of samples, in more than 1 of {max(1, samples // 3):,})"
        if samples < horizon
        else ""
    )
