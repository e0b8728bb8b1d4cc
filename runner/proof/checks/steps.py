"""Compares the steps of a training by the contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from runner.plugin.check import TimeBudget
from runner.plugin.contract import Close, Exact
from runner.proof.adversarial_updates import adversarial_cases
from runner.proof.close_check import close
from runner.proof.exact_check import exact
from runner.proof.isolation import FAILED_UPDATE, StepError
from runner.proof.subject import Build
from runner.proof.subject_pair import FRESH, HEALTH, SubjectCheck, SubjectPair
from runner.proof.trajectory import Update
from runner.proof.verdict import Outcome, Verdict


class StepsCheck(SubjectCheck):
    """Compares steps on all batches, then on batches, objects and memory that are used again."""

    name = "steps"
    question = (
        "Does every step have the same result, also when a batch or its memory is used "
        "again?"
    )
    catches = (
        "another output, state or gradient in `.grad`, as by clipping inside another "
        "function; a stale cache, also by identity or address; a function that is replaced "
        "for the baseline, too"
    )

    def cost(self, pair: SubjectPair) -> str:
        """Returns the number of updates of each."""
        precision = "in float64, and up to 12 single ones in the training's precision"
        count = f"{len(pair.batches)} updates and 4 more"
        return f"{count} {precision}" if pair.is_close else count

    def run(self, pair: SubjectPair, budget: TimeBudget) -> Verdict:
        """Compares bits or algebra."""
        return compare_steps(
            pair.baseline, pair.candidate, pair.batches, pair.contract, pair.seed
        )


def compare_steps(
    baseline: Build,
    candidate: Build,
    batches: Sequence[Any],
    contract: Exact | Close,
    seed: int,
) -> Verdict:
    """Returns the verdict on all batches, and on batches and memory that come again."""
    count = len(batches)
    try:
        verdict = _compare_all(baseline, candidate, batches, contract, seed)
        failed_update = verdict.evidence.get(FAILED_UPDATE)
    except StepError as error:
        failed_update = error.update
        if count == 1 or failed_update != count + 1:
            raise
    if count == 1 or failed_update != count + 1:
        return verdict
    # A schedule may have one step for each batch, so a batch that comes again takes the last one.
    verdict = _compare(baseline, candidate, batches, contract, seed, ())
    if not verdict:
        return verdict
    return _compare_all(baseline, candidate, batches[:-1], contract, seed)


def _compare(
    baseline: Build,
    candidate: Build,
    batches: Sequence[Any],
    contract: Exact | Close,
    seed: int,
    updates: Sequence[Update],
) -> Verdict:
    """Returns the verdict on all batches, and on further updates after them."""
    if isinstance(contract, Close):
        return close(baseline, candidate, batches, seed=seed, further_updates=updates)
    return exact(baseline, candidate, [*batches, *updates], seed)


def _compare_all(
    baseline: Build,
    candidate: Build,
    batches: Sequence[Any],
    contract: Exact | Close,
    seed: int,
) -> Verdict:
    is_close = isinstance(contract, Close)
    try:
        cases = adversarial_cases(baseline, batches, seed, is_close)
    except StepError as error:
        return error.verdict(HEALTH, baseline)
    updates = [case.update for case in cases]
    verdict = _compare(baseline, candidate, batches, contract, seed, updates)
    difference = verdict.evidence.get("difference")
    if verdict.outcome is not Outcome.FAIL or not difference:
        return verdict
    # The numbers of single updates are not those of the trajectory.
    if "rounding" in verdict.evidence:
        return verdict
    number = difference["update"] - len(batches)
    if number <= 0:
        return verdict
    return replace(verdict, summary=cases[number - 1].name + verdict.summary)


def fresh(
    baseline: Build,
    changed: Build,
    batches: Sequence[Any],
    contract: Exact | Close,
    seed: int = 0,
) -> Verdict:
    """Returns whether parameters that change between two steps take effect in the next.

    One batch, the very same object, is given three times: between the first two the step itself has
    changed the parameters, before the third another state is loaded. A cache by batch is detected.
    Arguments and exceptions are those of ``verify``.
    """
    verdict = compare_steps(baseline, changed, batches[:1], contract, seed)
    return replace(
        verdict, contract=HEALTH, summary=FRESH if verdict else verdict.summary
    )
