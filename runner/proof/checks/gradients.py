"""Compares which parameters receive a gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from runner.plugin.check import TimeBudget
from runner.proof.difference import newly_untrained
from runner.proof.isolation import StepError
from runner.proof.reproduction import Reproduction
from runner.proof.subject import Build
from runner.proof.subject_pair import HEALTH, SubjectCheck, SubjectPair
from runner.proof.trajectory import Trajectory
from runner.proof.verdict import Outcome, Verdict

# Parameters that a message names.
_SHOWN = 3


class GradientsCheck(SubjectCheck):
    """Compares which parameters receive a gradient that is finite and not zero."""

    name = "gradients"
    question = "Does a gradient reach every parameter that has one in the baseline?"
    catches = "a missing gradient, a detached module, a gradient of zeros or NaN"
    judges_contract = False

    def cost(self, pair: SubjectPair) -> str:
        """Returns that it reads what updates have recorded."""
        return f"nothing: recorded with the updates, or {len(pair.batches)} more if these fail"

    def run(self, pair: SubjectPair, budget: TimeBudget) -> Verdict:
        """Reports parameters without a gradient."""
        # Updates that ended early have no such record.
        missing = pair.evidence.get("without_gradient")
        if missing is None:
            verdict = health(pair.candidate, pair.batches, pair.baseline, pair.seed)
        else:
            verdict = _judge(missing, len(pair.batches))
        if verdict.outcome is not Outcome.FAIL:
            return verdict
        trajectory = Trajectory(pair.batches, pair.seed)
        reproduction = Reproduction(
            pair.baseline, pair.candidate, trajectory, 1, pair.promise_name
        )
        return replace(verdict, reproduction=reproduction)


def health(
    changed: Build, batches: Sequence[Any], baseline: Build | None = None, seed: int = 0
) -> Verdict:
    """Returns whether every trainable parameter receives a finite, nonzero gradient in some update.

    Parameters that receive none in the baseline either are excused. Other arguments are those of
    ``verify``.
    """
    try:
        untrained = _find_untrained(changed, batches, seed)
        excused = {}
        if baseline is not None and untrained:
            excused = _find_untrained(baseline, batches, seed)
    except StepError as error:
        return error.verdict(HEALTH, baseline)
    return _judge(newly_untrained(excused, untrained), len(batches))


def _judge(missing: Mapping[str, str], updates: int) -> Verdict:
    """Returns the verdict on parameters without a gradient, each with what it receives instead."""
    evidence = {"updates": updates, "without_gradient": dict(missing)}
    if not missing:
        return Verdict(Outcome.PASS, HEALTH, "gradients reach all parameters", evidence)
    first = list(missing.items())[:_SHOWN]
    names = "; ".join(f"'{name}' {reason}" for name, reason in first)
    if len(missing) > _SHOWN:
        names += f"; and {len(missing) - _SHOWN} more"
    summary = f"in {updates} updates {names}: a module is detached, or no loss uses it"
    return Verdict(Outcome.FAIL, HEALTH, summary, evidence)


def _find_untrained(build: Build, batches: Sequence[Any], seed: int) -> dict[str, str]:
    """Returns the parameters without a proper gradient, with the reason."""
    trajectory = Trajectory(batches, seed)
    isolation = trajectory.isolated(build)
    for _ in trajectory.updated(isolation):
        if not isolation.untrained:
            break
    return isolation.untrained
