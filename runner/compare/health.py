"""What every change must keep, whatever it promises: gradients reach all parameters, and nothing is stale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.compare.close import algebra
from runner.compare.exact import bitwise
from runner.compare.float64 import NotFloat64Error, float64_build, float64_trajectory
from runner.compare.isolation import Isolation, StepError
from runner.compare.state import clones, saved
from runner.compare.subject import Build
from runner.compare.trajectory import Trajectory, Update, failure, newly_untrained
from runner.compare.verdict import Outcome, Verdict
from runner.plugin.contract import Close, Exact

CONTRACT = "Health"
FRESH = "parameters that change between steps take effect"
STALE = "with the same batch again and other parameters, "
_SHOWN = 3


def health(changed: Build, batches: Sequence[Any], baseline: Build | None = None, seed: int = 0) -> Verdict:
    """Looks whether every trainable parameter receives a finite gradient other than zero in some update.

    Args:
        changed: makes what is judged.
        batches: one for each update.
        baseline: parameters that get no gradient there either are not held against the change.
        seed: of the global random generators.

    Raises:
        ValueError: there is no batch.
        StepError: the baseline itself fails.
    """
    if not batches:
        raise ValueError("nothing to look at: there is no batch")
    try:
        untrained = _untrained(changed, batches, seed)
    except StepError as error:
        return Verdict(Outcome.FAIL, CONTRACT, failure(error), {"updates": error.update})
    excused = _untrained(baseline, batches, seed) if baseline is not None and untrained else {}
    return gradients(newly_untrained(excused, untrained), len(batches))


def gradients(without: Mapping[str, str], updates: int) -> Verdict:
    """The verdict on parameters that no gradient reaches.

    Args:
        without: their names, with what each receives instead.
        updates: in how many updates this was so.
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
    isolation = Isolation(build, seed)
    for batch in batches:
        isolation.step(clones(batch))
        if not isolation.untrained:
            break
    return isolation.untrained


def fresh(baseline: Build, changed: Build, batches: Sequence[Any], contract: Exact | Close, seed: int = 0) -> Verdict:
    """Looks whether parameters that change between two steps take effect in the next, as they do in the baseline.

    One batch, the very same object, is given three times: between the first two the step itself has changed the
    parameters, before the third another state is loaded. What remembers anything by its batch is found out.

    Args:
        baseline: makes what to compare with.
        changed: makes what is judged.
        batches: the first is the one that is given.
        contract: whether bits or float64 numbers are compared.
        seed: of the global random generators.

    Raises:
        ValueError: there is no batch, or nothing that could be compared.
        StepError: the baseline itself fails.
    """
    if not batches:
        raise ValueError("nothing to look at: there is no batch")
    try:
        trajectory = with_the_same_again(baseline, batches[:1], contract, seed)
    except NotFloat64Error as error:
        return Verdict(Outcome.INCONCLUSIVE, CONTRACT, str(error))
    found = (bitwise if isinstance(contract, Exact) else algebra)(trajectory, baseline, changed)
    return Verdict(found.outcome, CONTRACT, FRESH if found else STALE + found.summary, found.evidence)


def with_the_same_again(baseline: Build, batches: Sequence[Any], contract: Exact | Close, seed: int) -> Trajectory:
    """Updates on all batches, then two more on the last one, the very same object, with another state in the second.

    Args:
        baseline: makes what reaches the other state, which is that after its first update.
        batches: one for each update.
        contract: ``Close`` is compared in float64.
        seed: of the global random generators.

    Raises:
        NotFloat64Error: the baseline cannot be had in float64.
        StepError: the baseline fails.
    """
    exactly = isinstance(contract, Exact)
    make, build = (Trajectory, baseline) if exactly else (float64_trajectory, float64_build(baseline))
    first = make([Update(batches[0])], seed)
    isolation = first.isolated(build)
    try:
        for _ in first.frames(isolation):
            pass
    except StepError as error:
        if exactly:
            raise
        raise NotFloat64Error.stepping("the baseline", error) from error
    updates = [*map(Update, batches), Update(batches[-1]), Update(batches[-1], saved(isolation.subject))]
    return make(updates, seed)
