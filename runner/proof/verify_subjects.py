"""Checks a change against its promise: its bits, its gradients, its caches."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from runner.plugin.contract import Close, Exact
from runner.proof.isolation import Isolation
from runner.proof.randomness import compiled_graphs
from runner.proof.subject import Build
from runner.proof.subject_pair import FRESH, SubjectPair, Unlimited
from runner.proof.verdict import Outcome, Verdict, excluded, worst


def verify(
    baseline: Build,
    changed: Build,
    batches: Sequence[Any],
    contract: Exact | Close,
    seed: int = 0,
) -> Verdict:
    """Judges a change of a training step; in a test, ``assert`` the returned verdict.

    It runs the checks of ``runner.proof.checks``, and passes if all of them pass. A FAIL names the
    first operator of torch that diverges.

    Args:
        baseline: Makes the reference.
        changed: Makes the same with the change.
        batches: One for each update, 10 or more; steps get copies.
        contract: The promise of the change.
        seed: Of the global random generators of Python, NumPy and torch.

    Raises:
        ValueError: The sequence of batches is empty, nothing can be compared, or ``baseline``
            returns the same object twice.
        StepError: The baseline itself fails.
    """
    # The search is needed for a FAIL only.
    from runner.proof.first_operator import name_operator

    _refuse_repeated_objects(baseline, seed)
    return name_operator(compare(baseline, changed, batches, contract, seed))


def compare(
    baseline: Build,
    changed: Build,
    batches: Sequence[Any],
    contract: Exact | Close,
    seed: int = 0,
) -> Verdict:
    """Returns the verdict of ``verify`` without the search for the diverging operator."""
    # Other functions of the gate need no check.
    from runner.proof.checks import CHECKS

    # Code that was compiled before uses separate random numbers.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    pair = SubjectPair(baseline, changed, batches, contract, seed, compiled_graphs())
    for check in (check_type() for check_type in CHECKS):
        if check.applies(pair):
            pair.results.append((check, check.run(pair, Unlimited())))
    return _conclude(pair)


def _refuse_repeated_objects(baseline: Build, seed: int) -> None:
    """Raises a ``ValueError`` if a part of the baseline's state is the same object in two builds:
    updates of one would change the other.
    """
    first = {}
    for name, stateful in Isolation(baseline, seed).subject.state.items():
        # Not every type has weak references.
        with suppress(TypeError):
            first[name] = weakref.ref(stateful)
    # A weak reference, because the memory may not have room for two subjects.
    for name, stateful in Isolation(baseline, seed).subject.state.items():
        if name in first and first[name]() is stateful:
            raise ValueError(
                f"state: '{name}' is the same object in two builds; make it inside of the function "
                "that builds the subject"
            )


def _conclude(pair: SubjectPair) -> Verdict:
    """Returns one verdict, with the summaries of all checks that are as bad as the worst."""
    contract_verdict = _judge_contract(pair)
    named = [("contract", contract_verdict)]
    named += [
        (check.name, verdict)
        for check, verdict in pair.results
        if not check.judges_contract
    ]
    outcome = worst(verdict.outcome for _, verdict in named)
    worst_verdicts = [verdict for _, verdict in named if verdict.outcome is outcome]

    summaries = dict.fromkeys(
        verdict.summary for verdict in worst_verdicts if verdict.summary
    )
    if outcome is Outcome.PASS:
        summaries |= dict.fromkeys((FRESH, excluded(len(pair.batches))))
    evidence = {
        name: {
            "verdict": verdict.outcome,
            "summary": verdict.summary,
            **verdict.evidence,
        }
        for name, verdict in named
        if verdict.evidence
    }
    reproductions = (verdict.reproduction for verdict in worst_verdicts)
    reproduction = next(filter(None, reproductions), None)
    summary = "; ".join(summaries)
    return Verdict(outcome, pair.promise_name, summary, evidence, reproduction)


def _judge_contract(pair: SubjectPair) -> Verdict:
    """Returns the verdict on updates, or a later one that is worse, with the evidence of all."""
    verdicts = [verdict for check, verdict in pair.results if check.judges_contract]
    evidence: dict[str, Any] = {}
    for verdict in verdicts:
        evidence |= verdict.evidence
    first = verdicts[0]
    last = verdicts[-1]
    if not last:
        return replace(last, evidence=evidence)
    summary = first.summary
    if "random_updates" in last.evidence:
        summary += f"; {last.summary}"
    return replace(first, summary=summary, evidence=evidence)
