"""From a recipe, with some of its stages, to what a gate compares."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from runner.compare.state import clones
from runner.compare.subject import Build, Listener, Subject
from runner.plugin.registry import Registry
from runner.plugin.source import Batch, State
from runner.plugin.stage import StageConfig
from runner.recipe.constraints import conflicts
from runner.recipe.document import Node, Place, RecipeError
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.tree import map_tensors
from runner.train.assemble import Assembly, assemble
from runner.train.step import Drawn, Step


class Recorded(NamedTuple):
    """What one update needs."""

    batch: Batch
    noise: Batch
    inputs: Any
    """What of the batch the learner's ``predict`` answers to; its answers are compared, too."""
    progress: dict[str, int]
    """Counts before the update: on them depend learning rates, and what is not done in every update."""


def recipe_with(recipe: Recipe, registry: Registry, stages: Collection[str]) -> Recipe:
    """The recipe with only these stages on, and what they require.

    Args:
        recipe: the settings of its stages are kept; a stage that it does not switch on gets its default settings.
        registry: where stages come from.
        stages: their kinds; none is the baseline.

    Raises:
        UsageError: there is no such stage, or the recipe cannot have them together.
    """
    kinds: set[str] = set()
    wanted = list(stages)
    while wanted:
        kind = wanted.pop()
        if kind not in kinds:
            kinds.add(kind)
            wanted += registry.get("optimization", kind).requires
    made = [_stage(recipe, registry, kind) for kind in kinds]
    on = {stage.kind: stage for stage in sorted(made, key=lambda stage: (stage.phase, stage.kind))}
    off = tuple(kind for kind in (*recipe.stages, *recipe.off) if kind not in on)
    switched = dict.fromkeys(on, True) | dict.fromkeys(off, False)
    root = Node({}, Place(recipe.path))
    problems = list(conflicts(root, recipe.model, recipe.data, recipe.train, on, switched))
    if problems:
        raise RecipeError(problems)
    return replace(recipe, stages=on, off=off)


def _stage(recipe: Recipe, registry: Registry, kind: str) -> StageConfig:
    """The recipe's settings of a stage, or those that nobody wrote."""
    if kind in recipe.stages:
        return recipe.stages[kind]
    stage: StageConfig = registry.get("optimization", kind)()
    return stage


def subject(
    recipe: Recipe, registry: Registry, stages: Collection[str], built: Callable[[Assembly], None] = lambda _: None
) -> Build:
    """Makes subjects that train the recipe with only these stages on.

    A step takes what ``recorded`` returns, or anything else, of which it takes no notice: then it collects, samples and
    feeds back as a training does, from the recipe's own source after its warm-up, and the state of the source and of
    the recipe's random generators is compared, too.

    Args:
        recipe: what to train.
        registry: where its plugins come from.
        stages: kinds of stages, as in ``recipe_with``.
        built: told of every pipeline that is made.

    Raises:
        UsageError: the recipe cannot have these stages together.
    """
    recipe_with(recipe, registry, stages)

    def build() -> Subject:
        pipeline = assemble(recipe_with(recipe, registry, stages), registry.files)
        built(pipeline)
        return _Training(pipeline).subject()

    return build


def recorded(recipe: Recipe, registry: Registry, updates: int) -> list[Recorded]:
    """Batches and noise of the first updates of the baseline's training, after its warm-up.

    The global random generators are left as they were.
    """
    before = generators.state_dict()
    try:
        generators.seed(recipe.seed)
        training = _Training(assemble(recipe_with(recipe, registry, ()), registry.files))
        return [training.record() for _ in range(updates)]
    finally:
        generators.load_state_dict(before)


class _Training:
    """A pipeline that is stepped update by update."""

    def __init__(self, pipeline: Assembly) -> None:
        self.pipeline, self.slots, self.learner = pipeline, pipeline.slots, pipeline.learner
        self.whole_step = Step(pipeline)
        self.draws = self.answers = False

    def subject(self) -> Subject:
        return Subject(
            self.step,
            {"learner": LearnerState(self.pipeline), "source": _SourceState(self)},
            parameters=self.learner.named_parameters,
            gradients=self.learner.gradients,
            seed=self.whole_step.seed,
            watch=self.watch,
        )

    def step(self, given: Any) -> dict[str, Any]:
        """One update, on what is given if it was recorded."""
        if not isinstance(given, Recorded):
            self.draws = True
            while (output := self.whole_step()) is None:
                pass
            return output
        batch, noise, inputs, counts = map_tensors(self._on_device, given)
        self.pipeline.progress.load_state_dict(counts)
        self.whole_step.reset()  # another state may have been loaded, with the learning rates of another update
        output = self.whole_step.update(Drawn(batch, noise))
        self.answers = True  # slots that answer tell no story of the update
        try:
            return output | {"predict": self.learner.predict(inputs)}
        finally:
            self.answers = False

    def record(self) -> Recorded:
        """What the next update learns from, which is then done."""
        while (drawn := self.whole_step.draw()) is None:
            pass
        progress = self.pipeline.progress
        recorded: Recorded = clones(Recorded(*drawn, self.learner.inputs(drawn.batch), progress.state_dict()))
        self.whole_step.seed(progress.updates)
        output = self.whole_step.update(drawn)
        self.pipeline.source.feedback(drawn.batch, output)
        progress.updates += 1
        self.whole_step.count(drawn.batch)
        return recorded

    def watch(self, listener: Listener) -> None:
        """Wraps the slots that tell the story of an update."""
        for name in dict.fromkeys(("next_batch", *self.learner.story)):
            self.slots.wrap(name, partial(self._observed, name, listener))

    def _observed(self, name: str, listener: Listener, step: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            if not self.answers:
                listener(name, output)
            return output

        return observed

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.pipeline.device)


class LearnerState:
    """A learner's state; loading it makes the stages begin anew with what they have of their own, as a resumed run."""

    def __init__(self, pipeline: Assembly) -> None:
        self.learner, self.stages = pipeline.learner, pipeline.stages

    def state_dict(self) -> State:
        """The learner's."""
        return self.learner.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Restores it."""
        self.learner.load_state_dict(state)
        for stage in self.stages.values():
            stage.load_state_dict(stage.state_dict())


class _SourceState:
    """The source and the recipe's random generators, once a subject draws its batches from there."""

    def __init__(self, training: _Training) -> None:
        self.training = training

    def state_dict(self) -> State:
        pipeline = self.training.pipeline
        if not self.training.draws:
            return {}
        drawn = {name: each.get_state() for name, each in pipeline.context.generators.items()}
        return {**pipeline.source.state_dict(), "generators": drawn}

    def load_state_dict(self, state: State) -> None:
        if state:
            raise ValueError("the state of a source is compared, but does not move between subjects")
