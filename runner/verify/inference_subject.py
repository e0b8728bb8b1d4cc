"""From a recipe, with some of its stages, to what its model answers, how fast, and how large it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from runner.compare.subject import Build, Subject
from runner.plugin.registry import Registry
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.tree import map_tensors, tensors
from runner.train.assemble import assemble
from runner.train.step import Step
from runner.verify.training_subject import LearnerState, recipe_with

BATCH_SIZES = (1, 3, 200)
"""Other sizes than the training's: who serves a model decides what it is asked at once."""


def inference_subject(recipe: Recipe, registry: Registry, stages: Collection[str]) -> Build:
    """Makes subjects whose step answers inputs with ``predict``; nothing is trained.

    What compares training steps compares these too: ``verify`` their answers, ``clock`` their latency.

    Args:
        recipe: whose model answers.
        registry: where its plugins come from.
        stages: kinds of stages, as in ``recipe_with``.
    """

    def build() -> Subject:
        pipeline = assemble(recipe_with(recipe, registry, stages), registry.files)

        def answer(inputs: Any) -> dict[str, Any]:
            on_device = map_tensors(lambda tensor: tensor.to(pipeline.device), inputs)
            return {"answer": pipeline.learner.predict(on_device)}

        return Subject(answer, {"learner": LearnerState(pipeline)}, parameters=lambda: ())

    return build


def recorded_inputs(recipe: Recipe, registry: Registry, sizes: Sequence[int] = BATCH_SIZES) -> list[Any]:
    """What the learner of a recipe is asked in its training, in batches of these sizes."""
    before = generators.state_dict()
    try:
        generators.seed(recipe.seed)
        found = []
        for size in sizes:
            pipeline = assemble(recipe_with(recipe, registry, ()), registry.files, batch_size=size)
            step = Step(pipeline)
            while (drawn := step.draw()) is None:
                pass
            found.append(map_tensors(lambda tensor: tensor.clone(), pipeline.learner.inputs(drawn.batch)))
        return found
    finally:
        generators.load_state_dict(before)


def model_bytes(recipe: Recipe, registry: Registry, stages: Collection[str]) -> int:
    """Bytes of all parameters and buffers of the model with these stages."""
    learner = assemble(recipe_with(recipe, registry, stages), registry.files).learner
    return sum(tensor.nbytes for module in learner.modules().values() for tensor in tensors(dict(module.state_dict())))
