"""Compares a second training in the same process, with other data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.plugin.contract import Close, Exact
from runner.plugin.registry import Registry
from runner.proof.isolation import Isolation, StepError
from runner.proof.subject import Build
from runner.proof.verdict import Outcome, Verdict
from runner.system.errors import RunnerError
from runner.verify.other_data import World, differing_metrics, other_world
from runner.verify.sampling_checks import ComparisonLength, draws, evaluate, same_draws
from runner.verify.subjects import BuildError, built

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair

UPDATES = 4
"""Updates of the training with other data."""


class OtherDataCheck(Check):
    """Compares updates and an evaluation with another seed and other samples of the same
    numbers.
    """

    name = "other data"
    question = (
        "Is a second training in this process, with other data, the baseline's, too?"
    )
    catches = (
        "a cache in the process or in a file that is not invalidated when the data, the "
        "seed or the model change"
    )
    is_optional = True

    def applies(self, pair: StagePair) -> bool:
        """Returns False without a long run, for stages that are ``Statistical``, or that
        choose the batch size.
        """
        return pair.has_long_checks and not pair.chooses_batches

    def cost(self, pair: StagePair) -> str:
        """Returns the number of updates."""
        return f"{UPDATES} updates and an evaluation"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Compares what is sampled and what updates return, as for sampled batches."""
        # A stage may need the type of the data; then only the seed is another one.
        for has_other_samples in (True, False):
            world = other_world(pair.recipe, has_other_samples=has_other_samples)
            try:
                verdict = _compare(pair, world)
            except (BuildError, StepError, RunnerError):
                continue
            if verdict.outcome is Outcome.FAIL:
                summary = f"in a second training, with other data: {verdict.summary}"
                return replace(verdict, summary=summary)
            return verdict
        return pair.passed(
            "no second training was compared: its data cannot be replaced"
        )


def _compare(pair: StagePair, world: World) -> Verdict:
    baseline = built(_training(world, pair.registry, ()))
    candidate = pair.candidate(lambda _, *arguments: _training(world, *arguments))
    length = ComparisonLength(UPDATES)
    verdict = same_draws(baseline, candidate, pair.contract, length)
    return _compare_metrics(pair, baseline, candidate) if verdict else verdict


def _compare_metrics(pair: StagePair, baseline: Build, candidate: Build) -> Verdict:
    """Compares an evaluation of a model that is not trained."""
    assert isinstance(pair.contract, Exact | Close)
    try:
        # Rounding errors of a training would add up.
        expected = evaluate(Isolation(baseline, 0))
        metrics = evaluate(Isolation(candidate, 0))
    except StepError as error:
        return error.verdict(pair.promise_name, baseline)
    is_exact = isinstance(pair.contract, Exact)
    name = differing_metrics(expected, metrics, is_exact=is_exact)
    if name is None:
        return pair.passed(
            f"{UPDATES} updates and an evaluation with other data are the same"
        )
    values = f"{metrics.get(name)} instead of {expected[name]}"
    return pair.failed(f"an evaluation has the metric '{name}' {values}")


def _training(world: World, registry: Registry, stages: Collection[str]) -> Build:
    return draws(world.recipe, registry, stages, change=world.change)
