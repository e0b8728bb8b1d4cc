"""The results of one recipe's baseline that all comparisons share, computed once."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from runner.plugin.progress import Progress
from runner.plugin.registry import Registry
from runner.plugin.source import Source
from runner.proof.isolation import Frame
from runner.proof.long_runs import LongRun, long_run
from runner.proof.trajectory import Update
from runner.proof.trees import clones, on_host
from runner.recipe.recipe import Recipe
from runner.training.pipeline import resolve_device
from runner.verify.evaluation_checks import (
    Evaluated,
    Query,
    answers,
    evaluated,
    evaluations,
    is_evaluation,
    questions,
    resized,
    sizes_of_questions,
)
from runner.verify.global_patches import global_values
from runner.verify.input_shapes import keep_answered, reshape_inputs
from runner.verify.options import (
    LATE,
    TRAINED_UPDATES,
    UPDATES_BETWEEN_EVALUATIONS,
    Options,
)
from runner.verify.sampling_checks import depends_on_learner
from runner.verify.subjects import baseline_step, recorded, subject
from runner.verify.trained_model import (
    Exports,
    Restoration,
    choose_exports,
    run_exports,
    trained_models,
    updates_before,
)
from runner.verify.variants import variants_of

_EXPORTED_SIZES = (5, 2)
"""Samples with which exported modules are called."""
EVALUATION_SECONDS = 5.0
"""Time after which no further evaluation of a part of the held-out samples starts."""


class SourceFacts(NamedTuple):
    """Properties of a source that determine which checks apply."""

    epoch_samples: int | None
    """Samples of an epoch; None without epochs."""
    depends_on_learner: bool
    """Whether batches may depend on what was learned."""
    acts: bool
    """Whether it receives the learner to act with it."""


class Baseline:
    """A recipe without its stages: its batches, predictions, evaluations and long run.

    Args:
        recipe: The recipe with all of its stages.
        registry: The plugins.
        options: How many updates are compared.
    """

    def __init__(self, recipe: Recipe, registry: Registry, options: Options) -> None:
        self.recipe = recipe
        self.registry = registry
        self.options = options
        # Stages that are built later may change them.
        self.process = global_values()
        self.input_sizes: tuple[int, ...] = ()
        """Batch sizes of the predictions that were compared."""
        self._evaluated: dict[bool, Evaluated] = {}
        self._long_run: LongRun | None = None

    @cached_property
    def active(self) -> tuple[str, ...]:
        """The recipe's stages that are active on this machine, in their order."""
        variants = variants_of(self.recipe, resolve_device(self.recipe.device))
        return tuple(
            kind for kind in self.recipe.stages if kind not in variants.inactive
        )

    @cached_property
    def batches(self) -> list[Any]:
        """Recorded batches of the first updates, with the last one again late in the training."""
        return recorded(self.recipe, self.registry, self.options.updates, LATE)

    @property
    def progress(self) -> Progress:
        """The progress before the last of the first updates."""
        progress = Progress(*self.recipe.length, self._source.epoch_samples)
        progress.load_state_dict(self.batches[self.options.updates - 1].progress)
        return progress

    @property
    def has_fixed_epochs(self) -> bool:
        """Returns whether the data have epochs whose batches do not depend on the
        learner.
        """
        has_epochs = self._source.epoch_samples is not None
        return has_epochs and not self._source.depends_on_learner

    @property
    def has_simulator(self) -> bool:
        """Returns whether the source acts with its learner."""
        return self._source.acts

    @cached_property
    def _source(self) -> SourceFacts:
        with baseline_step(self.recipe, self.registry) as step:
            return SourceFacts(
                epoch_samples=step.progress.epoch_samples,
                depends_on_learner=depends_on_learner(step.source),
                acts=type(step.source).bind is not Source.bind,
            )

    @cached_property
    def questions(self) -> list[Update]:
        """Inputs in several sizes, for a model that has made a few updates."""
        with baseline_step(self.recipe, self.registry) as step:
            for _ in range(self.options.updates):
                step(step.next())
            batches = [self.batches[0].batch, self.batches[1].batch]
            self.input_sizes = sizes_of_questions(step.pipeline, batches[0])
            state = clones(step.learner.complete_state())
            return questions(step.pipeline, batches, state)

    @cached_property
    def answered_questions(self) -> list[Update]:
        """The questions that the model answers; all of them if it refuses the first one."""
        first, *others = self.questions
        build = answers(self.recipe, self.registry, ())
        answered = keep_answered(build, first.states or {}, [first])
        if not answered:
            return self.questions
        return [first, *keep_answered(build, first.states or {}, others)]

    @cached_property
    def other_shapes(self) -> list[Update]:
        """Inputs in other shapes than those of the training that the model accepts; none
        where predictions are slow.
        """
        if self.recipe.model.prediction_batch is not None:
            return []
        first = self.questions[0]
        inputs = reshape_inputs(first.batch.inputs)
        variants = [Update(Query(reshaped)) for reshaped in inputs]
        # An index that is out of range is an exception on a CPU; on a GPU, it ends the
        # process.
        build = answers(replace(self.recipe, device="cpu"), self.registry, ())
        return keep_answered(build, on_host(first.states or {}), variants)

    def updates_before(self, request: Restoration | Exports) -> list[Update]:
        """Returns the last of the first updates, from the state after a few updates, and
        then the request.
        """
        count = self.options.updates
        batches = self.batches[max(0, count - TRAINED_UPDATES) : count]
        return updates_before(batches, self.questions[0].states, request)

    @cached_property
    def exports(self) -> Exports:
        """The modules that a prediction calls, with inputs of several batch sizes."""
        with baseline_step(self.recipe, self.registry) as step:
            batch = self.batches[0].batch
            batches = [batch, *resized(step.source, batch, _EXPORTED_SIZES)]
            return choose_exports(step.learner, list(map(step.learner.inputs, batches)))

    @cached_property
    def programs(self) -> Frame:
        """Results of exported modules; empty if none can be exported."""
        if not self.exports.calls:
            return {}
        build = trained_models(self.recipe, self.registry, ())
        return run_exports(build, self.updates_before(self.exports))

    @cached_property
    def evaluations(self) -> list[Update]:
        """Several evaluations with updates between them and after them."""
        first_batches = self.batches[: self.options.updates]
        updates = first_batches[-UPDATES_BETWEEN_EVALUATIONS - 1 :]
        batch_size = self.recipe.train.batch_size
        return evaluations(self.questions[0].states, updates, batch_size)

    def count_evaluations(self) -> int:
        """Returns how many evaluations were compared in a precision at most."""
        # Slow evaluations end before all of them are made.
        updates = max(
            (len(results.frames) for results in self._evaluated.values()), default=0
        )
        return sum(map(is_evaluation, self.evaluations[:updates]))

    def evaluated(self, in_float64: bool) -> Evaluated:
        """Returns the results of the baseline's evaluations."""
        if in_float64 not in self._evaluated:
            build = answers(self.recipe, self.registry, ())
            self._evaluated[in_float64] = evaluated(
                build, self.evaluations, in_float64, EVALUATION_SECONDS
            )
        return self._evaluated[in_float64]

    def long_run(self, seconds: float) -> LongRun:
        """Returns fingerprints of many updates: those that fit into the seconds of the
        first call.
        """
        if self._long_run is None:
            build = subject(self.recipe, self.registry, ())
            self._long_run = long_run(build, range(1), self.options.horizon, seconds)
        return self._long_run
