"""Checks a change against its promise: its bits, its gradients, its caches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from runner.plugin.contract import Close, Exact
from runner.proof.randomness import compiled_graphs
from runner.proof.subject import Build
from runner.proof.subject_pair import FRESH, SubjectPair, Unlimited
from runner.proof.verdict import Outcome, Verdict, excluded, worst


def verify(baseline: Build, changed: Build, batches: Sequence[Any], contract: Exact | Close, seed: int = 0) -> Verdict:
    """Judges a change of a training step; in a test, ``assert`` what comes back.

    It runs the checks of ``runner.proof.checks``, and passes if all of them pass. A FAIL names the
    first operator of torch that diverges.

    Args:
        baseline: makes what to compare with.
        changed: makes the same with the change.
        batches: one for each update, 10 or more; steps get copies.
        contract: what is promised.
        seed: of the global random generators of Python, NumPy and torch.

    Raises:
        ValueError: There is no batch, or nothing to compare.
        StepError: The baseline itself fails.
    """
    # The search is needed for a FAIL only.
    from runner.proof.first_operator import name_operator

    return name_operator(compare(baseline, changed, batches, contract, seed))


def compare(baseline: Build, changed: Build, batches: Sequence[Any], contract: Exact | Close, seed: int = 0) -> Verdict:
    """Returns the verdict of ``verify`` without the diverging operator, which takes time to find."""
    # Other functions of the gate need no check.
    from runner.proof.checks import CHECKS

    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # code that was compiled before uses separate random numbers
    pair = SubjectPair(baseline, changed, batches, contract, seed, compiled_graphs())
    for check in (check_type() for check_type in CHECKS):
        if check.applies(pair):
            pair.results.append((check, check.run(pair, Unlimited())))
    return _conclude(pair)


def _conclude(pair: SubjectPair) -> Verdict:
    """Returns one verdict, with the summaries of all checks that are as bad as the worst."""
    contract_verdict = _judge_contract(pair)
    named = [("contract", contract_verdict)]
    named += [(check.name, verdict) for check, verdict in pair.results if not check.judges_contract]
    outcome = worst(verdict.outcome for _, verdict in named)
    worst_verdicts = [verdict for _, verdict in named if verdict.outcome is outcome]

    summaries = dict.fromkeys(verdict.summary for verdict in worst_verdicts if verdict.summary)
    if outcome is Outcome.PASS:
        summaries |= dict.fromkeys((FRESH, excluded(len(pair.batches))))
    evidence = {
        name: {"verdict": verdict.outcome, "summary": verdict.summary, **verdict.evidence}
        for name, verdict in named
        if verdict.evidence
    }
    reproductions = [verdict.reproduction for verdict in worst_verdicts if verdict.reproduction]
    reproduction = next(iter(reproductions), None)
    return Verdict(outcome, pair.promise_name, "; ".join(summaries), evidence, reproduction)


def _judge_contract(pair: SubjectPair) -> Verdict:
    """Returns the verdict on updates, or a later one that is worse, with the evidence of all."""
    verdicts = [verdict for check, verdict in pair.results if check.judges_contract]
    evidence = {name: value for verdict in verdicts for name, value in verdict.evidence.items()}
    first, last = verdicts[0], verdicts[-1]
    if not last:
        return replace(last, evidence=evidence)
    summary = first.summary
    if "random_updates" in last.evidence:
        summary += f"; {last.summary}"
    return replace(first, summary=summary, evidence=evidence)
