"""Compares trainings whose held-out data differ."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.plugin.registry import Registry
from runner.proof.subject import Build
from runner.proof.verdict import Verdict
from runner.verify.other_data import HeldOutPart, World, held_out_worlds
from runner.verify.sampling_checks import (
    OBSERVED,
    Observation,
    draws,
    observe_or_message,
)
from runner.verify.subjects import BuildError, built

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair


class HeldOutDataCheck(Check):
    """Trains the candidate twice, with different held-out data, and compares the
    trainings by bits.
    """

    name = "held-out data"
    question = (
        "Is the training independent of held-out data, and do these stay as they are?"
    )
    catches = (
        "held-out samples that are trained on, or from which a threshold is derived; "
        "held-out samples that are modified; an evaluation of other data than the "
        "held-out ones"
    )
    is_optional = True

    def applies(self, pair: StagePair) -> bool:
        """Returns False without a long run, and for stages that are inactive or choose
        the batch size.
        """
        if not pair.has_long_run or pair.chooses_batches:
            return False
        return held_out_worlds(pair.recipe) is not None

    def cost(self, pair: StagePair) -> str:
        """Returns the number of updates and evaluations."""
        return f"twice {sum(OBSERVED)} updates and {len(OBSERVED) - 1} evaluations of a few samples"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Compares the candidate with itself; a dependence of the baseline excuses it."""
        worlds = held_out_worlds(pair.recipe)
        assert worlds is not None
        try:
            problem = _problem(pair, worlds)
        except BuildError as error:
            return pair.passed(
                "held-out data were not compared, "
                f"because they cannot be replaced: {error}"
            )
        if problem is not None:
            return pair.failed(problem)
        count = f"{sum(OBSERVED)} updates and {len(OBSERVED) - 1} evaluations"
        return pair.passed(f"{count} use held-out data as the baseline does")


def _problem(pair: StagePair, worlds: tuple[World, World]) -> str | None:
    """Returns how the candidate uses held-out data, and the baseline does not."""
    # The candidate is compared with itself, because only the data may matter.
    builds = [_candidate(pair, world) for world in worlds]
    problem = _first_problem(builds, worlds)
    if problem is None or observe_or_message(builds[0]) != observe_or_message(
        builds[0]
    ):
        # A training that is not the same twice cannot be compared with itself.
        return None
    baselines = [built(_training(world, pair.registry, ())) for world in worlds]
    return None if _first_problem(baselines, worlds) else problem


def _first_problem(builds: Sequence[Build], worlds: tuple[World, World]) -> str | None:
    trainings: list[Observation] = []
    for result in [observe_or_message(build) for build in builds]:
        if isinstance(result, str):
            return f"a training with a part of the held-out data raises {result}"
        trainings.append(result)
    first, second = trainings
    difference = first.first_difference(second)
    if difference is not None:
        update, name = difference
        moment = (
            f"update {update}" if update <= sum(OBSERVED) else "the state at the end"
        )
        message = f"{moment}: '{name}' is another one with other held-out samples"
        return f"the training depends on held-out data: {message}"
    for world in worlds:
        change = world.change
        modified = change.modified() if isinstance(change, HeldOutPart) else None
        if modified is not None:
            return (
                f"held-out data are modified: '{modified}' "
                "is not what it was before the training"
            )
    if first.metrics == second.metrics:
        return "evaluations with different held-out data have the same results"
    return None


def _candidate(pair: StagePair, world: World) -> Build:
    """Makes trainings of the candidate with the world's recipe in the place of the pair's."""
    return pair.candidate(lambda _, *arguments: _training(world, *arguments))


def _training(world: World, registry: Registry, stages: Collection[str]) -> Build:
    return draws(world.recipe, registry, stages, change=world.change)
