"""Checks a change against its promise: its bits, its gradients, its caches."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from runner.compare.close import close
from runner.compare.difference import newly_untrained
from runner.compare.exact import exact
from runner.compare.fingerprints import objections
from runner.compare.isolation import StepError, Trajectory
from runner.compare.randomness import compiled_graphs, same_randomness
from runner.compare.reproduction import Reproduction
from runner.compare.subject import Build
from runner.compare.turns import ends, hidden, turns
from runner.compare.verdict import Outcome, Verdict, excluded, worst
from runner.plugin.contract import Close, Exact

CONTRACT = "Health"
FRESH = "parameters that change between steps take effect"
_SHOWN = 3


def verify(baseline: Build, changed: Build, batches: Sequence[Any], contract: Exact | Close, seed: int = 0) -> Verdict:
    """Judges a change of a training step; in a test, ``assert`` what comes back.

    It passes if the change keeps its contract (``exact``, ``close``), if gradients
    reach every parameter that they reach in the baseline (``health``), if parameters
    that change between steps take effect in the next (``fresh``), if single updates
    have the same results in extreme cases (``ends``) and numbers that are not finite
    are not hidden, if the random numbers of compiled code in a training have the same
    effect as the baseline's (``same_randomness``), if the result of a step outlives the
    next three, and if every part of the baseline's state has its counterpart. A FAIL
    names the first operator of torch that diverges.

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
    from runner.compare.first_operator import name_operator

    return name_operator(compare(baseline, changed, batches, contract, seed))


def compare(baseline: Build, changed: Build, batches: Sequence[Any], contract: Exact | Close, seed: int = 0) -> Verdict:
    """Returns the verdict of ``verify`` without the operator that diverges, which takes time to find."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # code that was compiled before uses separate random numbers
    before = compiled_graphs()
    kept = _beyond(baseline, changed, batches, contract, seed)
    without = kept.evidence.get("without_gradient")  # seen on the way, unless that ended early
    reached = health(changed, batches, baseline, seed) if without is None else _gradients(without, len(batches))
    name = type(contract).__name__
    if kept:
        at_ends = ends(baseline, changed, batches[-1], name, seed, isinstance(contract, Close))
        found = at_ends and hidden(baseline, changed, batches[0], name, seed)
        found = found and same_randomness(baseline, changed, batches, name, seed, compiled_before=before)
        kept = replace(kept if found else found, evidence=kept.evidence | found.evidence)
        if "random_updates" in found.evidence and found:
            kept = replace(kept, summary=f"{kept.summary}; {found.summary}")
    verdicts = [kept, reached, *objections(kept.evidence, name)]
    outcome = worst(verdict.outcome for verdict in verdicts)
    summaries = dict.fromkeys(verdict.summary for verdict in verdicts if verdict.outcome is outcome)
    if outcome is Outcome.PASS:
        summaries |= dict.fromkeys((FRESH, excluded(len(batches))))
    evidence = {
        name: {"verdict": verdict.outcome, "summary": verdict.summary, **verdict.evidence}
        for name, verdict in (("contract", kept), ("gradients", reached))
    }
    worst_verdicts = [verdict for verdict in verdicts if verdict.outcome is outcome]
    reproduction = next((verdict.reproduction for verdict in worst_verdicts if verdict.reproduction), None)
    if outcome is Outcome.FAIL and reproduction is None and reached.outcome is outcome:
        reproduction = Reproduction(baseline, changed, Trajectory(batches, seed), 1, name)
    return Verdict(outcome, name, "; ".join(summaries), evidence, reproduction)


def health(changed: Build, batches: Sequence[Any], baseline: Build | None = None, seed: int = 0) -> Verdict:
    """Looks whether every trainable parameter receives a finite gradient other than zero in some update.

    Those that get none in the baseline either are not held against the change; the rest is as for ``verify``.
    """
    try:
        untrained = _untrained(changed, batches, seed)
        excused = _untrained(baseline, batches, seed) if baseline is not None and untrained else {}
    except StepError as error:
        return error.verdict(CONTRACT, baseline)
    return _gradients(newly_untrained(excused, untrained), len(batches))


def fresh(baseline: Build, changed: Build, batches: Sequence[Any], contract: Exact | Close, seed: int = 0) -> Verdict:
    """Looks whether parameters that change between two steps take effect in the next, as they do in the baseline.

    One batch, the very same object, is given three times: between the first two the step itself has changed the
    parameters, before the third another state is loaded. What remembers anything by its batch is found out. Arguments
    and exceptions are those of ``verify``.
    """
    found = _beyond(baseline, changed, batches[:1], contract, seed)
    return replace(found, contract=CONTRACT, summary=FRESH if found else found.summary)


def _gradients(without: Mapping[str, str], updates: int) -> Verdict:
    """Returns the verdict on parameters that no gradient reaches in ``updates`` updates, with what
    each receives instead.
    """
    evidence = {"updates": updates, "without_gradient": dict(without)}
    if not without:
        return Verdict(Outcome.PASS, CONTRACT, "gradients reach all parameters", evidence)
    names = "; ".join(f"'{name}' {reason}" for name, reason in list(without.items())[:_SHOWN])
    more = f"; and {len(without) - _SHOWN} more" if len(without) > _SHOWN else ""
    summary = f"in {updates} updates {names}{more}: a module is detached, or no loss uses it"
    return Verdict(Outcome.FAIL, CONTRACT, summary, evidence)


def _untrained(build: Build, batches: Sequence[Any], seed: int) -> dict[str, str]:
    """Parameters without a proper gradient, with the reason."""
    trajectory = Trajectory(batches, seed)
    isolation = trajectory.isolated(build)
    for _ in trajectory.updated(isolation):
        if not isolation.untrained:
            break
    return isolation.untrained


def _beyond(baseline: Build, changed: Build, batches: Sequence[Any], contract: Exact | Close, seed: int) -> Verdict:
    """The verdict on all batches, and on batches and memory that come again."""
    float64 = isinstance(contract, Close)
    try:
        beyond = turns(baseline, batches, seed, float64)
    except StepError as error:
        return error.verdict(CONTRACT, baseline)
    updates = [turn.update for turn in beyond]
    if float64:
        found = close(baseline, changed, batches, seed=seed, turns=updates)
    else:
        found = exact(baseline, changed, [*batches, *updates], seed)
    difference = found.evidence.get("difference")
    if found.outcome is not Outcome.FAIL or not difference or "rounding" in found.evidence:
        return found
    number = difference["update"] - len(batches)
    return replace(found, summary=beyond[number - 1].name + found.summary) if number > 0 else found
