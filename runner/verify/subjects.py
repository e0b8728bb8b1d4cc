"""Converts a recipe with some of its stages to subjects of a comparison: its training, or the
predictions of its model.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from runner.plugin.learner import Learner
from runner.plugin.progress import Progress
from runner.plugin.registry import Registry
from runner.plugin.source import Batch, State
from runner.proof.isolation import Isolation
from runner.proof.subject import Build, Listener, Subject
from runner.proof.subject_states import widen_complex, widen_held_modules
from runner.proof.trajectory import Update
from runner.proof.trees import clones
from runner.recipe.loader import from_values
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.errors import IndivisibleBatchError, RunnerError
from runner.training.pipeline import Assembly, assemble
from runner.training.stage_watch import StageReport
from runner.training.step import Drawn, Step

T = TypeVar("T")

# A value that each prediction renews should have time to become stale.
_PREDICTED_EVERY = 10
"""Updates on sampled batches between two predictions of a subject."""


class Recorded(NamedTuple):
    """The input of one update.

    Attributes:
        batch: The batch.
        noise: Random numbers of the update.
        inputs: Input of the learner's ``predict`` in this batch; None for an update
            without a prediction.
        progress: Counts before the update: learning rates depend on them, and actions
            that are not performed in every update.
    """

    batch: Batch
    noise: Batch
    inputs: Any
    progress: dict[str, int]


class SameObject(Generic[T]):
    """A key of a cache that equals only a key of the same object.

    Args:
        value: The object; its content need not be hashable.
    """

    def __init__(self, value: T) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        """Returns whether the other key is of the same object."""
        return isinstance(other, SameObject) and other.value is self.value

    def __hash__(self) -> int:
        """Returns the object's identity."""
        return id(self.value)


class BuildError(Exception):
    """A pipeline cannot be built with a change: a stage's ``attach`` raises the cause."""


def built(make: Build) -> Build:
    """Makes the same subjects; an exception without a message for the user becomes a
    BuildError.
    """

    def build() -> Subject:
        try:
            return make()
        except (RunnerError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            # The last frame is in the code of the stage.
            last = traceback.extract_tb(error.__traceback__)[-1]
            location = f"{Path(last.filename).name}:{last.lineno}, in {last.name}"
            problem = f"{type(error).__name__}: {error} ({location})"
            raise BuildError(f"the pipeline cannot be built: {problem}") from error

    return build


def recipe_with(recipe: Recipe, registry: Registry, stages: Collection[str]) -> Recipe:
    """Returns the recipe with only these kinds of stages, and the kinds that they
    require; none for the baseline.

    A stage that is off in the recipe gets its default settings.

    Raises:
        UsageError: A stage cannot have default settings.
    """
    return _recipe_with(SameObject(recipe), SameObject(registry), tuple(stages))


# A set of stages is judged by a dozen checks, and reading its recipe again takes longer than an
# update. A recipe never changes, and pipelines use copies of its settings.
@lru_cache(maxsize=32)
def _recipe_with(
    same_recipe: SameObject[Recipe],
    same_registry: SameObject[Registry],
    stages: tuple[str, ...],
) -> Recipe:
    recipe = same_recipe.value
    registry = same_registry.value
    values = recipe.values(masked=False)
    settings = values["optimization"]
    active: dict[str, Any] = {}
    remaining = list(stages)
    while remaining:
        kind = remaining.pop()
        if kind not in active:
            active[kind] = settings[kind] if kind in recipe.stages else "on"
            remaining += registry.get("optimization", kind).requires
    values["optimization"] = dict.fromkeys(settings, "off") | active
    return from_values(
        values, str(recipe.path), recipe.origins, registry, recipe.tuning
    )


def subject(
    recipe: Recipe,
    registry: Registry,
    stages: Collection[str],
    built: Callable[[Assembly], None] = lambda _: None,
) -> Build:
    """Makes subjects that train the recipe with only these stages.

    A step uses the result of ``recorded``; for any other input, which it ignores, it
    collects, samples and feeds back like a training, from the recipe's source after its
    warm-up. Then the state of the source and of the recipe's random generators is
    compared, too, and sometimes a prediction.

    Args:
        recipe: The recipe.
        registry: The plugins.
        stages: Kinds of stages.
        built: Called with every pipeline that is assembled.
    """
    staged = recipe_with(recipe, registry, stages)

    def build() -> Subject:
        pipeline = assemble(staged, registry.files)
        built(pipeline)
        training = Training(pipeline)
        return Subject(
            training.step,
            {"learner": LearnerState(training.complete_step), "source": training},
            seed=training.complete_step.seed,
            parameters=pipeline.learner.named_parameters,
            gradients=pipeline.learner.gradients,
            watch=training.watch,
        )

    return build


def recorded(
    recipe: Recipe, registry: Registry, updates: int, late: Sequence[float] = ()
) -> list[Recorded]:
    """Returns batches and noise of the first updates of the baseline's training, after
    its warm-up.

    The last one comes again as if these shares of the training were over.
    """
    with baseline_step(recipe, registry) as step:
        records = [_recorded(step) for _ in range(updates)]
        length = step.progress.whole / step.progress.position
        counts = step.progress.state_dict()
    last = records[-1]
    for share in late:
        progress = {
            unit: round(share * length * count) for unit, count in counts.items()
        }
        records.append(last._replace(progress=progress))
    return records


def training_updates(
    recipe: Recipe, registry: Registry, updates: int, distance: int
) -> Generator[Update]:
    """Yields the updates of the baseline's training.

    Args:
        recipe: The recipe.
        registry: The plugins.
        updates: Number of updates, if the training is not shorter.
        distance: Updates between two that have the state before them.
    """
    with baseline_step(recipe, registry) as step:
        for number in range(updates):
            if step.progress.position >= step.progress.whole:
                return
            states = None
            if number % distance == 0:
                states = {"learner": clones(step.learner.complete_state())}
            record = _recorded(step)
            if (number + 1) % _PREDICTED_EVERY:
                record = record._replace(inputs=None)
            yield Update(record, states, number)


def _recorded(step: Step) -> Recorded:
    """Returns the input of the next update, and performs that update."""
    sample = step.next()
    inputs = _inputs(step.pipeline, sample.batch)
    # The update may change its inputs in place.
    record: Recorded = clones(Recorded(*sample, inputs, step.progress.state_dict()))
    step(sample)
    return record


def _inputs(pipeline: Assembly, batch: Batch) -> Any:
    """Returns the inputs of a prediction after an update: of one sample where
    predictions are slow and the batch can be cut.
    """
    if pipeline.learner.config.prediction_batch is not None:
        with suppress(IndivisibleBatchError):
            batch = next(pipeline.source.split(batch, 1))
    return pipeline.learner.inputs(batch)


def has_undeclared_draws(recipe: Recipe, registry: Registry, batch: Any) -> bool:
    """Returns whether an update of the baseline uses random numbers that the
    model's settings do not declare.
    """
    if recipe.model.draws():
        return False
    isolation = Isolation(subject(recipe, registry, ()), recipe.seed)
    isolation.step(batch)
    return isolation.drew


@contextmanager
def baseline_step(recipe: Recipe, registry: Registry) -> Iterator[Step]:
    """Yields the baseline's training, with the recipe's seed; global random generators
    are restored afterwards.
    """
    with generators.Globals().apart():
        generators.seed(recipe.seed)
        yield Step(assemble(recipe_with(recipe, registry, ()), registry.files))


class SimulatedRates:
    """Halves learning rates again and again, in place of a schedule that reacts to evaluations.

    They are a function of the progress, so that all subjects have the same rates in an update.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def rate(self, base_rate: float) -> float:
        """Returns the rate, a half or a quarter of it, by turns."""
        return float(base_rate * 0.5 ** (self._progress.updates % 3))


class Training:
    """A pipeline that is stepped update by update, with the state of its source."""

    def __init__(self, pipeline: Assembly) -> None:
        self.pipeline = pipeline
        self.complete_step = Step(pipeline)
        widen_learner(pipeline.learner)
        # No evaluation of a training is compared here, but stages must follow changed rates.
        if pipeline.recipe.lr_scheduler.reacts_to_evaluations:
            self.complete_step.adaptive_rates = SimulatedRates(pipeline.progress)
        self.draws = False
        """Whether batches are sampled from the source."""
        self.answers = False
        """Whether a prediction is running."""

    def subject(self, step: Callable[[Any], dict[str, Any]]) -> Subject:
        """Makes a subject with the learner's state and another step."""
        state = {"learner": LearnerState(self.complete_step)}
        seed = self.complete_step.seed
        return Subject(step, state, seed=seed, parameters=lambda: ())

    def step(self, record: Any) -> dict[str, Any]:
        """Performs one update, with this input if it was recorded."""
        if not isinstance(record, Recorded):
            return self._sampled_step()
        batch, noise, inputs, counts = self.pipeline.transfer(record)
        self.pipeline.progress.load_state_dict(counts)
        output = self.complete_step.update(Drawn(batch, noise))
        return output if inputs is None else output | self._answer(inputs)

    def _sampled_step(self) -> dict[str, Any]:
        self.draws = True
        while (output := self.complete_step()) is None:
            pass
        if self.pipeline.progress.updates % _PREDICTED_EVERY:
            return output
        inputs = _inputs(self.pipeline, self.complete_step.batch)
        return output | self._answer(inputs)

    def _answer(self, inputs: Any) -> dict[str, Any]:
        # Slots of predictions are not part of the update's sequence.
        self.answers = True
        # The graph of a large prediction may take gigabytes.
        with torch.no_grad():
            answer = self.pipeline.learner.predict(inputs)
        self.answers = False
        return {"predict": answer}

    def watch(self, listener: Listener) -> None:
        """Wraps the slots that are observed in an update."""

        def observed(
            name: str, step: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> Any:
            output = step(*args, **kwargs)
            if not self.answers:
                listener(name, output)
            return output

        for name in dict.fromkeys(("next_batch", *self.pipeline.learner.story)):
            self.pipeline.slots.wrap(name, partial(partial, observed, name))

    def state_dict(self) -> State:
        """Returns the state of the source, the recipe's random generators and the
        counts, if batches are sampled from the source.
        """
        if not self.draws:
            return {}
        return {
            **self.pipeline.source.state_dict(),
            "generators": generator_states(self.pipeline),
            "progress": vars(self.pipeline.progress),
        }

    def load_state_dict(self, state: State) -> None:
        """Raises if there is a state to load."""
        if state:
            raise ValueError(
                "the state of a source is compared, but does not move between subjects"
            )


def widen_learner(learner: Learner) -> None:
    """Makes a learner that was built in float64 compute in it: its complex parameters and modules
    that are not trained have the type with which they were made.
    """
    if torch.get_default_dtype() != torch.float64:
        return
    widen_complex(parameter for _, parameter in learner.named_parameters())
    widen_held_modules(learner, learner.modules().values())


def generator_states(pipeline: Assembly) -> dict[str, torch.Tensor]:
    """Returns the states of the recipe's random generators, by name."""
    return {
        name: generator.get_state()
        for name, generator in pipeline.context.generators.items()
    }


class LearnerState:
    """A learner's state; loading it restarts the stages from their state, as in a
    resumed run.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.state_dict = step.learner.complete_state

    def load_state_dict(self, state: State) -> None:
        """Restores a result of ``state_dict``."""
        self.step.learner.load_complete_state(state)
        self.step.reset()
        for stage in self.step.pipeline.stages.values():
            stage.load_state_dict(stage.state_dict())


def remarks(
    reports: Sequence[StageReport],
    recipe: Recipe,
    registry: Registry,
    batches: Sequence[Any],
) -> Iterator[str]:
    """Yields remarks of stages, and undeclared random numbers of a learner:
    possible reasons for different numbers.
    """
    yield from dict.fromkeys(
        f"{report.kind}: {note}" for report in reports for note in report.notes
    )
    if has_undeclared_draws(recipe, registry, batches[0]):
        yield (
            f"an update of '{recipe.model.kind}' draws random numbers (dropout), "
            "which draws() of its settings does not declare"
        )
