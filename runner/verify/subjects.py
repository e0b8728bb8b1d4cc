"""Converts a recipe with some of its stages to subjects of a comparison: its training, or the
predictions of its model.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from runner.plugin.registry import Registry
from runner.plugin.source import Batch, State
from runner.proof.isolation import Isolation
from runner.proof.subject import Build, Listener, Subject
from runner.proof.subject_states import clones
from runner.proof.trajectory import Update
from runner.recipe.loader import from_values
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.errors import RunnerError
from runner.training.pipeline import Assembly, assemble
from runner.training.stage_watch import StageReport
from runner.training.step import Drawn, Step

_ASKED_EVERY = 10  # updates on sampled batches between two predictions of a subject


class Recorded(NamedTuple):
    """The input of one update."""

    batch: Batch
    noise: Batch
    # The input of the learner's ``predict`` in this batch; predictions are
    # compared, too, unless it is None.
    inputs: Any
    progress: dict[
        str, int
    ]  # before the update: learning rates depend on it, and what is not done in every update


class BuildError(Exception):
    """A pipeline cannot be built with a change: an exception in a stage's ``attach``, which is the cause."""


def built(make: Build) -> Build:
    """Makes the same subjects; what is raised meanwhile, and has no message for the user, becomes a BuildError."""

    def build() -> Subject:
        try:
            return make()
        except (RunnerError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}, in {last.name}"
            raise BuildError(
                f"the pipeline cannot be built: {type(error).__name__}: {error} ({where})"
            ) from error

    return build


def recipe_with(recipe: Recipe, registry: Registry, stages: Collection[str]) -> Recipe:
    """The recipe with only these kinds of stages on, none for the baseline, and what they require.

    A stage that the recipe does not switch on gets its default settings; ``UsageError`` if it cannot have them all.
    """
    values = recipe.values(masked=False)
    settings, on, wanted = values["optimization"], dict[str, Any](), list(stages)
    while wanted:
        kind = wanted.pop()
        if kind not in on:
            on[kind] = settings[kind] if kind in recipe.stages else "on"
            wanted += registry.get("optimization", kind).requires
    values["optimization"] = dict.fromkeys(settings, "off") | on
    return from_values(
        values, str(recipe.path), recipe.origins, registry, recipe.tuning
    )


def subject(
    recipe: Recipe,
    registry: Registry,
    stages: Collection[str],
    built: Callable[[Assembly], None] = lambda _: None,
) -> Build:
    """Makes subjects that train the recipe with only these stages on.

    A step uses the result of ``recorded``; for any other input, which it ignores, it collects,
    samples and feeds back like a training, from the recipe's source after its warm-up. Then the
    state of the source and of the recipe's random generators is compared, too, and sometimes a
    prediction. ``built`` is called with every pipeline that is assembled.
    """
    chosen = recipe_with(recipe, registry, stages)

    def build() -> Subject:
        pipeline = assemble(chosen, registry.files)
        built(pipeline)
        training = Training(pipeline)
        return Subject(
            training.step, {"learner": LearnerState(training.whole_step), "source": training},
            seed=training.whole_step.seed,
            parameters=pipeline.learner.named_parameters, gradients=pipeline.learner.gradients, watch=training.watch,
        )  # fmt: skip

    return build


def recorded(
    recipe: Recipe, registry: Registry, updates: int, late: Sequence[float] = ()
) -> list[Recorded]:
    """Batches and noise of the first updates of the baseline's training, after its warm-up.

    The last one comes again as if these shares of the training were over.
    """
    found: list[Recorded] = []
    with baseline_step(recipe, registry) as step:
        found.extend(_recorded(step) for _ in range(updates))
        ended = step.progress.whole / step.progress.position
    for share in late:
        counts = {
            unit: round(share * ended * count)
            for unit, count in step.progress.state_dict().items()
        }
        found.append(found[-1]._replace(progress=counts))
    return found


def course(
    recipe: Recipe, registry: Registry, updates: int, apart: int
) -> Generator[Update]:
    """Yields the updates of the baseline's training, at most ``updates``; every ``apart``-th has
    the state before it.

    Every tenth update has the input of a prediction: a value that each prediction renews should
    have time to become stale.
    """
    with baseline_step(recipe, registry) as step:
        for number in range(updates):
            if step.progress.position >= step.progress.whole:
                return
            state = (
                {"learner": clones(step.learner.complete_state())}
                if number % apart == 0
                else None
            )
            update = _recorded(step)
            yield Update(
                update._replace(inputs=None) if (number + 1) % _ASKED_EVERY else update,
                state,
                number,
            )


def _recorded(step: Step) -> Recorded:
    """Returns the input of the next update, and performs that update."""
    drawn = step.next()
    inputs = _inputs(step.pipeline, drawn.batch)
    found: Recorded = clones(Recorded(*drawn, inputs, step.progress.state_dict()))
    step(drawn)
    return found


def _inputs(pipeline: Assembly, batch: Batch) -> Any:
    """Returns the inputs of a prediction after an update: of one sample where predictions are slow."""
    if pipeline.learner.config.prediction_batch is not None:
        batch = next(pipeline.source.split(batch, 1))
    return pipeline.learner.inputs(batch)


def draws_unsaid(recipe: Recipe, registry: Registry, batch: Any) -> bool:
    """Returns whether an update of the baseline uses random numbers that the
    model's settings do not declare.
    """
    if recipe.model.draws():
        return False
    alone = Isolation(subject(recipe, registry, ()), recipe.seed)
    alone.step(batch)
    return alone.drew


@contextmanager
def baseline_step(recipe: Recipe, registry: Registry) -> Iterator[Step]:
    """The baseline's training, with the recipe's seed; the global random generators are left as they were."""
    with generators.Globals().apart():
        generators.seed(recipe.seed)
        yield Step(assemble(recipe_with(recipe, registry, ()), registry.files))


class Training:
    """A pipeline that is stepped update by update, with the state of its source."""

    def __init__(self, pipeline: Assembly) -> None:
        self.pipeline, self.whole_step = pipeline, Step(pipeline)
        self.draws = self.answers = False

    def step(self, given: Any) -> dict[str, Any]:
        """Performs one update, on the given input if it was recorded."""
        if not isinstance(given, Recorded):
            self.draws = True
            while (output := self.whole_step()) is None:
                pass
            if self.pipeline.progress.updates % _ASKED_EVERY:
                return output
            return output | self._answer(_inputs(self.pipeline, self.whole_step.batch))
        batch, noise, inputs, counts = self.pipeline.transfer(given)
        self.pipeline.progress.load_state_dict(counts)
        output = self.whole_step.update(Drawn(batch, noise))
        return output if inputs is None else output | self._answer(inputs)

    def _answer(self, inputs: Any) -> dict[str, Any]:
        self.answers = (
            True  # slots of predictions are not part of the update's sequence
        )
        # As in an evaluation and a server: the graph of a large prediction may take gigabytes.
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
        """Returns the state of the source, the recipe's random generators and the counts, if
        batches are sampled from the source.
        """
        if not self.draws:
            return {}
        drawn = {
            name: each.get_state()
            for name, each in self.pipeline.context.generators.items()
        }
        return {
            **self.pipeline.source.state_dict(),
            "generators": drawn,
            "progress": vars(self.pipeline.progress),
        }

    def load_state_dict(self, state: State) -> None:
        """Refuses one."""
        if state:
            raise ValueError(
                "the state of a source is compared, but does not move between subjects"
            )


class LearnerState:
    """A learner's state; loading it restarts the stages from their state, as in a resumed run."""

    def __init__(self, step: Step) -> None:
        self.step, self.state_dict = step, step.learner.complete_state

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""
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
    if draws_unsaid(recipe, registry, batches[0]):
        kind = recipe.model.kind
        yield f"an update of '{kind}' draws random numbers (dropout), which draws() of its settings does not declare"
