"""Finds changes that seed the global random generators of Python, NumPy or torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from runner.plugin.registry import Registry
from runner.proof.difference import digest
from runner.proof.isolation import Isolation
from runner.proof.subject import Build, Subject
from runner.recipe.recipe import Recipe
from runner.training import evaluation
from runner.training.pipeline import assemble
from runner.training.step import Step
from runner.verify.interruption import interrupted_evaluation
from runner.verify.subjects import recipe_with

ASSEMBLY = "the assembly"
UPDATE = "an update"
PREDICTION = "a prediction"
EVALUATION = "an evaluation"
MOMENTS = (ASSEMBLY, UPDATE, UPDATE, UPDATE, PREDICTION, EVALUATION, UPDATE)
"""Actions in their order."""
_MEASURED = 2
"""Batches or predictions of an evaluation."""
_SEEDS = (0, 1)
_TORCH = "torch"


def seed_uses(recipe: Recipe, registry: Registry, stages: Collection[str]) -> Build:
    """Makes subjects whose step does one of ``MOMENTS``, and returns the states of
    generators.

    For torch's generators, which every update seeds by its number, the state is whether
    their seed is the same as before.
    """
    staged = recipe_with(recipe, registry, stages)

    def build() -> Subject:
        seeds = _torch_seeds()
        pipeline = assemble(staged, registry.files)
        assembled = _states(seeds)
        step = Step(pipeline)

        def act(moment: str) -> dict[str, Any]:
            if moment == ASSEMBLY:
                return assembled
            if moment == UPDATE:
                return _states(_update(step))
            seeds = _torch_seeds()
            if moment == PREDICTION:
                pipeline.learner.predict(pipeline.learner.inputs(step.batch))
            else:
                with interrupted_evaluation(pipeline.learner, _MEASURED):
                    evaluation.evaluated(pipeline)
            return _states(seeds)

        return Subject(act, {}, parameters=lambda: ())

    return build


def _update(step: Step) -> list[int]:
    """Makes an update, and returns torch's seeds at its start."""
    inputs = step.next()
    seeds: list[int] = []
    # The step seeds torch when it starts the update.
    set_seed: Callable[[int], None] = step.seed

    def seed(update: int) -> None:
        set_seed(update)
        seeds[:] = _torch_seeds()

    vars(step)["seed"] = seed
    try:
        step(inputs)
    finally:
        del vars(step)["seed"]
    return seeds


def _torch_seeds() -> list[int]:
    gpus = torch.cuda.default_generators if torch.cuda.is_available() else ()
    return [torch.initial_seed(), *(generator.initial_seed() for generator in gpus)]


def _states(seeds: list[int]) -> dict[str, Any]:
    """Returns fingerprints of the states of generators; of torch's, whether their seeds
    are these.
    """
    kind, keys, *position = np.random.get_state()
    return {
        "Python": digest(random.getstate()),
        "NumPy": digest([kind, np.asarray(keys).tobytes(), *position]),
        _TORCH: _torch_seeds() == seeds,
    }


def find_seeds(build: Build) -> list[tuple[str, str]]:
    """Returns the generators that are seeded, each with the moment.

    A generator of Python or NumPy has been seeded if two processes with other seeds have
    the same state afterwards.

    Args:
        build: Made by ``seed_uses``.
    """
    first, second = (Isolation(build, seed) for seed in _SEEDS)
    seeds = []
    for moment in MOMENTS:
        (states,) = first.advance([moment], dict)
        (expected,) = second.advance([moment], dict)
        for name, state in states.items():
            is_seeded = not state if name == _TORCH else state == expected[name]
            if is_seeded:
                seeds.append((name, moment))
    return seeds
