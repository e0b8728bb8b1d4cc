"""Compares trainings whose held-out data differ."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.plugin.registry import Registry
from runner.proof.subject import Build
from runner.proof.verdict import Outcome, Verdict
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
    """Trains the candidate twice, with different held-out data, and compares the trainings by bits."""

    name = "held-out data"
    question = (
        "Is the training independent of held-out data, and do these stay as they are?"
    )
    catches = (
        "held-out samples that are trained on, or from which a threshold is derived; held-out samples that are "
        "modified; an evaluation of other data than the held-out ones"
    )
    is_optional = True

    def applies(self, pair: StagePair) -> bool:
        """Returns False without a long run, and for stages that are inactive or choose the batch size."""
        if (
            not pair.baseline.options.horizon
            or pair.is_inactive
            or pair.chooses_batches
        ):
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
            summary = _problem(pair, worlds)
        except BuildError as error:
            summary = f"held-out data were not compared, because they cannot be replaced: {error}"
            return Verdict(Outcome.PASS, pair.promise_name, summary)
        if summary is not None:
            return Verdict(Outcome.FAIL, pair.promise_name, summary)
        count = f"{sum(OBSERVED)} updates and {len(OBSERVED) - 1} evaluations"
        return Verdict(
            Outcome.PASS,
            pair.promise_name,
            f"{count} use held-out data as the baseline does",
        )


def _problem(pair: StagePair, worlds: tuple[World, World]) -> str | None:
    """Returns what the candidate does with held-out data, and the baseline does not."""
    builds = [_candidate(pair, world) for world in worlds]
    problem = _first_problem(builds, worlds)
    if problem is None or observe_or_message(builds[0]) != observe_or_message(
        builds[0]
    ):
        # A training that is not the same twice cannot be compared with itself.
        return None
    baselines = [
        built(_training(world, pair.baseline.registry, ())) for world in worlds
    ]
    return None if _first_problem(baselines, worlds) else problem


def _first_problem(builds: Sequence[Build], worlds: tuple[World, World]) -> str | None:
    trainings = [observe_or_message(build) for build in builds]
    for training in trainings:
        if isinstance(training, str):
            return f"a training with a part of the held-out data raises {training}"
    first, second = (
        training for training in trainings if isinstance(training, Observation)
    )
    difference = first.first_difference(second)
    if difference is not None:
        update, name = difference
        moment = (
            f"update {update}" if update <= sum(OBSERVED) else "the state at the end"
        )
        message = f"{moment}: '{name}' is another one with other held-out samples"
        return f"the training depends on held-out data: {message}"
    changes = (
        world.change for world in worlds if isinstance(world.change, HeldOutPart)
    )
    modified = next(
        (
            name
            for name in (change.modified() for change in changes)
            if name is not None
        ),
        None,
    )
    if modified is not None:
        return f"held-out data are modified: '{modified}' is not what it was before the training"
    if first.metrics == second.metrics:
        return "evaluations with different held-out data have the same results"
    return None


def _candidate(pair: StagePair, world: World) -> Build:
    """Makes trainings of the candidate with the world's recipe in the place of the pair's."""
    return pair.candidate(lambda _, *arguments: _training(world, *arguments))


def _training(world: World, registry: Registry, stages: Collection[str]) -> Build:
    return draws(world.recipe, registry, stages, change=world.change)
