"""All that can be said about a change that promises something: its contract, its gradients, its caches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from runner.compare.close import algebra, close_to
from runner.compare.exact import bitwise
from runner.compare.float64 import NotFloat64Error
from runner.compare.health import FRESH, STALE, gradients, health, with_the_same_again
from runner.compare.subject import Build
from runner.compare.verdict import Outcome, Verdict, worst
from runner.plugin.contract import Close, Exact


def verify(baseline: Build, changed: Build, batches: Sequence[Any], contract: Exact | Close, seed: int = 0) -> Verdict:
    """Judges a change of a training step; in a test, ``assert`` what comes back.

    It passes if the change keeps its contract (``exact``, ``close``), if gradients reach every parameter that they
    reach in the baseline (``health``), and if parameters that change between steps take effect in the next (``fresh``).

    Args:
        baseline: makes what to compare with.
        changed: makes the same with the change.
        batches: one for each update, 10 or more; steps get copies.
        contract: what is promised.
        seed: of the global random generators of Python, NumPy and torch.

    Raises:
        ValueError: there is no batch, or nothing that could be compared.
        StepError: the baseline itself fails.
    """
    if not batches:
        raise ValueError("nothing to compare: there is no batch")
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # what was compiled before draws its own random numbers
    kept = _contract(baseline, changed, batches, contract, seed)
    without = kept.evidence.get("without_gradient")  # seen on the way, unless that ended early
    reached = health(changed, batches, baseline, seed) if without is None else gradients(without, len(batches))
    outcome = worst([kept.outcome, reached.outcome])
    summaries = dict.fromkeys(verdict.summary for verdict in (kept, reached) if verdict.outcome is outcome)
    if outcome is Outcome.PASS:
        summaries[FRESH] = None
    evidence = {
        name: {"verdict": verdict.outcome, "summary": verdict.summary, **verdict.evidence}
        for name, verdict in (("contract", kept), ("gradients", reached))
    }
    return Verdict(outcome, type(contract).__name__, "; ".join(summaries), evidence)


def _contract(baseline: Build, changed: Build, batches: Sequence[Any], contract: Exact | Close, seed: int) -> Verdict:
    """The contract's verdict, over updates in which also caches would show."""
    try:
        trajectory = with_the_same_again(baseline, batches, contract, seed)
        found = (bitwise if isinstance(contract, Exact) else algebra)(trajectory, baseline, changed)
    except NotFloat64Error as error:
        found = Verdict(Outcome.INCONCLUSIVE, type(contract).__name__, str(error))
    difference = found.evidence.get("difference")
    if found.outcome is Outcome.FAIL and difference and difference["update"] > len(batches):
        found = Verdict(found.outcome, found.contract, STALE + found.summary, found.evidence)
    return found if isinstance(contract, Exact) else close_to(found, baseline, changed, batches, seed=seed)
