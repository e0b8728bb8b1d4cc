"""From a recipe, with some of its stages, to what a gate compares."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from runner import generators
from runner.api import Batch, Stage, State
from runner.pipeline import Pipeline, assemble
from runner.proof.state import clones, mapped
from runner.proof.subject import Build, Report, Subject
from runner.recipe import Place, Recipe, RecipeError
from runner.recipe.constraints import Draft, conflicts
from runner.recipe.source import Node
from runner.registry import Registry

BURST = 16
"""Updates from a dataset that follow each other before anything else is done, as in a training."""


class Recorded(NamedTuple):
    """What one update needs."""

    batch: Batch
    noise: Batch
    seen: Tensor | None
    """Observations that were acted on last, for which the learner's answers are compared, too; None for a dataset."""


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
    draft = Draft(
        root=Node({}, Place(recipe.path)), model=recipe.model, data=recipe.data, train=recipe.train,
        tracking=recipe.tracking, stages=on, switched=dict.fromkeys(on, True) | dict.fromkeys(off, False),
    )  # fmt: skip
    problems = list(conflicts(draft))
    if problems:
        raise RecipeError(problems)
    return replace(recipe, stages=on, off=off)


def _stage(recipe: Recipe, registry: Registry, kind: str) -> Stage:
    """A stage that has not been attached to anything yet."""
    face = registry.get("optimization", kind)
    stage: Stage = face(recipe.stages[kind].config if kind in recipe.stages else face.Config())
    return stage


def subject(recipe: Recipe, registry: Registry, stages: Collection[str]) -> Build:
    """Makes subjects that train the recipe with only these stages on.

    A step takes what ``recorded`` returns, or anything else, of which it takes no notice: then it collects, samples and
    feeds back as a training does, from the recipe's own source after its warm-up, and the state of the source and of
    the recipe's random generators is compared, too.

    Args:
        recipe: what to train.
        registry: where its plugins come from.
        stages: kinds of stages, as in ``recipe_with``.

    Raises:
        UsageError: the recipe cannot have these stages together.
    """
    recipe_with(recipe, registry, stages)

    def build() -> Subject:
        return _Training(assemble(recipe_with(recipe, registry, stages), registry.files)).subject()

    return build


def recorded(recipe: Recipe, registry: Registry, updates: int) -> list[Recorded]:
    """Batches and noise of the first updates of the baseline's training, after its warm-up.

    The global random generators are left as they were.
    """
    before = generators.state_dict()
    try:
        generators.seed(recipe.seed)
        training = _Training(assemble(recipe_with(recipe, registry, ()), registry.files))
        found = []
        for _ in range(updates):
            drawn = training.draw()
            found.append(clones(drawn))
            training.update(drawn)
        return found
    finally:
        generators.load_state_dict(before)


class _Training:
    """A pipeline that is stepped update by update."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.slots, self.learner = pipeline, pipeline.slots, pipeline.learner
        self.noise = pipeline.context.generator("noise")
        self.exploration = pipeline.context.generator("policy")
        self.goal, _ = pipeline.recipe.goal
        self.done = 0
        """Environment steps of a simulator, updates from a dataset."""
        self.credit = 0.0
        self.due = 0
        self.seen: Tensor | None = None
        self.draws = False

    def subject(self) -> Subject:
        return Subject(
            self.step,
            {"learner": _LearnerState(self.pipeline), "source": _SourceState(self)},
            parameters=self.learner.named_parameters,
            gradients=self.learner.gradients,
            watch=self.watch,
        )

    def step(self, given: Any) -> Batch:
        """One update, on what is given if it was recorded."""
        if not isinstance(given, Recorded):
            self.draws = True
            return self.update(self.draw())
        batch, noise, seen = mapped(self._on_device, given)
        output: Batch = self.slots.update(batch, noise)
        return output if seen is None else output | {"predict": self.learner.predict(seen)}

    def draw(self) -> Recorded:
        """Collects until an update is due, and draws for it."""
        while not self.due:
            self.due = self._collect() if self.pipeline.recipe.data.simulates else BURST
        self.due -= 1
        size = self.pipeline.batch_size
        batch = self.slots.next_batch(size, min(1.0, self.done / self.goal), self.due)
        if not self.pipeline.recipe.data.simulates:
            self.done += 1
        return Recorded(batch, self.learner.noise(size, self.noise), self.seen)

    def update(self, drawn: Recorded) -> Batch:
        output: Batch = self.slots.update(drawn.batch, drawn.noise)
        self.pipeline.source.feedback(drawn.batch, output)
        return output

    def watch(self, report: Report) -> None:
        """Wraps the slots that tell the story of an update."""
        for name in dict.fromkeys(("next_batch", *self.learner.story)):
            self.slots.wrap(name, partial(_reported, name, report))

    def _collect(self) -> int:
        """Steps the simulation once; returns how many updates are due."""
        pipeline, train = self.pipeline, self.pipeline.recipe.train
        warming_up = self.done < train.warmup_steps
        taken = pipeline.source.collect(None if warming_up else self._act)
        self.done += taken
        if warming_up or not pipeline.source.ready(pipeline.batch_size):
            return 0
        self.credit += taken * pipeline.updates_per_step
        due = int(self.credit)
        self.credit -= due
        return due

    def _act(self, seen: Tensor) -> Tensor:
        self.seen = seen
        return self.learner.act(seen, self.exploration)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.pipeline.device)


def _reported(name: str, report: Report, step: Callable[..., Any]) -> Callable[..., Any]:
    def reported(*args: Any, **kwargs: Any) -> Any:
        output = step(*args, **kwargs)
        report(name, output)
        return output

    return reported


class _LearnerState:
    """A learner's state; loading it makes the stages begin anew with what they have of their own, as a resumed run."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.learner, self.stages = pipeline.learner, pipeline.stages

    def state_dict(self) -> State:
        return self.learner.state_dict()

    def load_state_dict(self, state: State) -> None:
        self.learner.load_state_dict(state)
        for stage in self.stages:
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
