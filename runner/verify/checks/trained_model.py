"""Compares the model that a training leaves: without its stages, and exported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.plugin.contract import Close, Exact
from runner.proof.isolation import Frame, Isolation, Location, StepError
from runner.proof.single_updates import same_updates
from runner.proof.subject import Build
from runner.proof.verdict import Verdict
from runner.system.errors import RunnerError
from runner.verify.evaluation_checks import alike
from runner.verify.likeness import describe, unlike
from runner.verify.options import TRAINED_UPDATES
from runner.verify.subjects import built
from runner.verify.trained_model import (
    MOST_MODULES,
    Restoration,
    run_exports,
    trained_models,
)

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair


class TrainedModelCheck(Check):
    """Restores the trained model without the stages, as for serving, and exports its
    modules.
    """

    name = "the trained model"
    question = (
        "Is the model that is left after a training the baseline's, "
        "also without the stages and exported?"
    )
    catches = (
        "weights that are not in the model but in a stage; a model that cannot be "
        "restored without it; an exported program that computes something else"
    )
    is_optional = True

    def applies(self, pair: StagePair) -> bool:
        """Returns False without a long run, and for stages that are inactive or choose
        the batch size.
        """
        return pair.has_long_run and not pair.chooses_batches

    def cost(self, pair: StagePair) -> str:
        """Returns the number of updates and exports."""
        export = f"the export of up to {MOST_MODULES} modules"
        return f"{TRAINED_UPDATES} updates, 2 predictions, and {export}"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Compares predictions by bits or algebra, and those of programs up to rounding."""
        builds = pair.builds(trained_models)
        try:
            verdict = _compare_restored(pair, *builds)
        except RunnerError as error:
            if not _is_restored(pair, builds[0]):
                return pair.passed("the baseline's model cannot be restored either")
            return pair.failed(
                f"the trained model cannot be restored without the stages: {error}"
            )
        if not verdict:
            return verdict
        # Code is not watched here: the watcher reads settings by operators, which an
        # export records.
        build = trained_models(pair.recipe, pair.registry, pair.stages)
        return _compare_exported(pair, built(build))


def _compare_restored(pair: StagePair, baseline: Build, candidate: Build) -> Verdict:
    # The first question is a batch of the training.
    restoration = Restoration(pair.baseline.questions[0].batch.inputs)
    updates = pair.baseline.updates_before(restoration)
    if isinstance(pair.contract, Exact | Close):
        words = "of the trained model and what is restored of it"
        named = ((words, update) for update in updates)
        return same_updates(baseline, candidate, named, pair.contract)
    return alike(baseline, candidate, updates)


def _is_restored(pair: StagePair, baseline: Build) -> bool:
    try:
        isolation = Isolation(baseline, 0)
        inputs = pair.baseline.questions[0].batch.inputs
        isolation.advance([Restoration(inputs)], lambda _: None)
    except (StepError, RunnerError):
        return False
    return True


def _compare_exported(pair: StagePair, candidate: Build) -> Verdict:
    """Compares programs in the precision of the training, as far as modules can be
    exported.
    """
    exports = pair.baseline.exports
    expected = pair.baseline.programs
    if not expected:
        return pair.passed(
            "the trained model is the same; the baseline cannot be exported"
        )
    try:
        actual = run_exports(candidate, pair.baseline.updates_before(exports))
    except StepError as error:
        return error.verdict(pair.promise_name, None)
    if not actual:
        return pair.passed(
            "the trained model is the same; with the stages it cannot be exported"
        )
    # A program may refuse other sizes than those of its export.
    results = [
        name
        for name in exports.results
        if _select(expected, name) and _select(actual, name)
    ]
    expected = _join(expected, results)
    actual = _join(actual, results)
    is_form = not isinstance(pair.contract, Exact | Close)
    location = unlike(expected, actual, form=is_form)
    if location is None:
        return pair.passed(
            "the trained model is the same, also without stages and exported"
        )
    difference = describe(1, location, expected, actual)
    return pair.failed(f"an exported program is another one: {difference}")


def _join(frame: Frame, results: Sequence[str]) -> Frame:
    """Returns the values of some results, in their order."""
    return {
        location: frame[location]
        for name in results
        for location in _select(frame, name)
    }


def _select(frame: Frame, name: str) -> list[Location]:
    """Returns the locations of a result, which may be a tensor or a tree of them."""
    return [
        location for location in frame if f"{location.name}.".startswith(f"{name}.")
    ]
