"""All that can be said about a change that promises something: its bits, its gradients, its caches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from runner.compare.close import algebra, close
from runner.compare.difference import Difference, comparable, digest, locate, newly_untrained, not_same_bits, shared
from runner.compare.isolation import Location, StepError, Trajectory, Update, saved
from runner.compare.subject import Build
from runner.compare.verdict import Outcome, Verdict, worst
from runner.plugin.contract import Close, Exact

CONTRACT = "Health"
FRESH = "parameters that change between steps take effect"
STALE = "with the same batch again and other parameters, "
_SHOWN = 3
Prints = list[dict[Location, bytes]]  # fingerprints of all that can be seen before the first update and after each


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
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # what was compiled before draws its own random numbers
    judge = close if isinstance(contract, Close) else exact
    kept = _with_the_same_again(judge, baseline, changed, batches, seed)  # caches would show, too
    difference = kept.evidence.get("difference")
    is_later = difference and "rounding" not in kept.evidence and difference["update"] > len(batches)
    if kept.outcome is Outcome.FAIL and is_later:
        kept = replace(kept, summary=STALE + kept.summary)
    without = kept.evidence.get("without_gradient")  # seen on the way, unless that ended early
    reached = health(changed, batches, baseline, seed) if without is None else _gradients(without, len(batches))
    outcome = worst([kept.outcome, reached.outcome])
    summaries = dict.fromkeys(verdict.summary for verdict in (kept, reached) if verdict.outcome is outcome)
    if outcome is Outcome.PASS:
        summaries[FRESH] = None
    evidence = {
        name: {"verdict": verdict.outcome, "summary": verdict.summary, **verdict.evidence}
        for name, verdict in (("contract", kept), ("gradients", reached))
    }
    return Verdict(outcome, type(contract).__name__, "; ".join(summaries), evidence)


def exact(baseline: Build, changed: Build, batches: Sequence[Any], seed: int = 0) -> Verdict:
    """Compares outputs, gradients and state by bits, after every update.

    The baseline is compared with itself first: where it does not repeat itself, nothing can be said. One subject exists
    at a time, two if a difference has to be located. Arguments and exceptions are those of ``verify``. The evidence
    names the parameters that no gradient reaches, other than in the baseline: ``without_gradient``.
    """
    trajectory = Trajectory(batches, seed)
    try:
        first, parts, excused = _fingerprints(trajectory, baseline)
        again, *_ = _fingerprints(trajectory, baseline)
        update = _parting(first, again, parts)
        if update is not None:
            return _unstable(update, locate(trajectory, baseline, baseline, update, not_same_bits))
        prints, changed_parts, untrained = _fingerprints(trajectory, changed)
        names = shared(parts, changed_parts)
        update = _parting(first, prints, names)
        found = None if update is None else locate(trajectory, baseline, changed, update, not_same_bits)
    except StepError as error:
        return error.verdict("Exact", baseline)
    count = len(list(comparable(first[-1], prints[-1], names)))
    evidence = {
        "updates": len(batches), "tensors": count, "not_compared": sorted({*parts, *changed_parts} - {*names}),
        "without_gradient": newly_untrained(excused, untrained),
    }  # fmt: skip
    if update is None:
        summary = f"{count:,} outputs, gradients and parts of the state have the same bits"
        return Verdict(Outcome.PASS, "Exact", f"{summary} after each of {len(batches)} updates", evidence)
    if found is None:
        return _unstable(update, None)
    return Verdict(Outcome.FAIL, "Exact", f"not the same bits: {found}", evidence | {"difference": found.data()})


def _fingerprints(trajectory: Trajectory, build: Build) -> tuple[Prints, list[str], dict[str, str]]:
    """What is left to know of a subject that is gone; with the parts of its state, and parameters without gradient."""
    isolation = trajectory.isolated(build)
    prints = [{location: digest(value) for location, value in frame.items()} for frame in trajectory.frames(isolation)]
    return prints, list(isolation.subject.state), isolation.untrained


def _parting(one: Prints, other: Prints, states: Sequence[str]) -> int | None:
    """The first update after which not all is the same."""
    for update, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        if any(mine[location] != theirs.get(location) for location in comparable(mine, theirs, states)):
            return update
    return None


def _unstable(update: int, found: Difference | None) -> Verdict:
    where = f"update {update}, not always in the same place" if found is None else str(found)
    summary = f"the same is not the same twice: {where}; make it deterministic (torch.use_deterministic_algorithms)"
    evidence = {"update": update, "difference": found and found.data()}
    return Verdict(Outcome.INCONCLUSIVE, "Exact", summary, evidence)


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
    judge = algebra if isinstance(contract, Close) else exact
    found = _with_the_same_again(judge, baseline, changed, batches[:1], seed)
    return replace(found, contract=CONTRACT, summary=FRESH if found else STALE + found.summary)


def _gradients(without: Mapping[str, str], updates: int) -> Verdict:
    """The verdict on parameters that no gradient reaches, given what each receives instead, in so many updates."""
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


def _with_the_same_again(
    judge: Callable[..., Verdict], baseline: Build, changed: Build, batches: Sequence[Any], seed: int
) -> Verdict:
    """The verdict on all batches and two more updates with the last one, the very same object.

    Before the second of them another state is loaded: that of the baseline after its first update.
    """
    first = Trajectory(batches[:1], seed, float64=judge is not exact)
    isolation = first.isolated(baseline)
    try:
        next(first.updated(isolation))
    except StepError as error:
        return error.verdict(CONTRACT, baseline)
    return judge(baseline, changed, [*batches, batches[-1], Update(batches[-1], saved(isolation.subject))], seed=seed)
