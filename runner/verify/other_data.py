"""Trainings with other data than the recipe's: they show on which data a training depends."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from runner.compare.difference import MISSING, digest
from runner.compare.isolation import Isolation, StepError
from runner.compare.states import clones, leaves
from runner.compare.subject import Build
from runner.plugin.batches import seeded
from runner.plugin.dataset import DatasetSource
from runner.plugin.inspection import length
from runner.plugin.registry import Registry
from runner.plugin.rows import Rows
from runner.plugin.source import Source
from runner.plugin.works import imported
from runner.recipe.recipe import Recipe
from runner.system.errors import RunnerError
from runner.verify.drawing import EVALUATION, draws

UPDATES = (3, 4, 4)
"""Updates before the first evaluation, between both, and after the second."""
HELD_OUT_BATCHES = 2
"""Batches of held-out samples in each part, at most."""
_EPISODES = 4
"""Size of an evaluation whose data follow from a seed."""


class UnchangeableDataError(Exception):
    """A source whose samples cannot be replaced by others: a stream, or too few."""


class World(NamedTuple):
    """Data for a training.

    Attributes:
        recipe: The recipe.
        change: Changes the data of its source before learner and stages are made.
    """

    recipe: Recipe
    change: Callable[[Source], None] | None

    def training(self, registry: Registry, stages: Collection[str]) -> Build:
        """Returns a maker of trainings with these stages, as ``draws`` does."""
        return draws(self.recipe, registry, stages, change=self.change)


class HeldOutPart:
    """Keeps a part of the held-out samples of a dataset; parts of different numbers share none.

    Args:
        number: 0 for the first samples, 1 for the last.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._rows: Rows | None = None
        self._copy: Any = None

    def __call__(self, source: Source) -> None:
        """Selects the samples, and copies them if they are in memory."""
        if not isinstance(source, DatasetSource):
            return
        count = length(source.held_out)
        if count is None or count < 2:
            raise UnchangeableDataError(f"'{source.config.kind}' has no two held-out samples by number")
        size = min(count // 2, HELD_OUT_BATCHES * source.context.batch_size)
        first = 0 if self.number == 0 else count - size
        source.select(held_out=torch.arange(first, first + size))
        self._rows = source.held_out if isinstance(source.held_out, Rows) else None
        self._copy = clones(self._read())

    def modified(self) -> str | None:
        """Returns the name of the first tensor of the samples that has changed since then."""
        present = dict(leaves(self._read()))
        for name, value in leaves(self._copy):
            if digest(present.get(name, MISSING)) != digest(value):
                return name
        return None

    def _read(self) -> Any:
        if self._rows is None:
            return {}
        # Rows may be augmented at random.
        with seeded(0):
            return self._rows.take(torch.arange(len(self._rows)))


def held_out_worlds(recipe: Recipe) -> tuple[World, World] | None:
    """Returns two worlds with the same training data and different held-out data.

    Returns:
        The worlds; None if a source has neither held-out samples nor a seed for its evaluation.
    """
    is_dataset = issubclass(imported(recipe.data), DatasetSource)
    path = recipe.data.evaluation_seed
    if path is None:
        return (World(recipe, HeldOutPart(0)), World(recipe, HeldOutPart(1))) if is_dataset else None
    data = recipe.data
    size = data.evaluation_size
    if size is not None:
        data = _with_setting(data, size, min(_setting(data, size), _EPISODES))
    seeds = (_setting(data, path), _setting(data, path) + 1)
    first, second = (replace(recipe, data=_with_setting(data, path, seed)) for seed in seeds)
    return World(first, HeldOutPart(0)), World(second, HeldOutPart(1))


def other_world(recipe: Recipe, *, has_other_samples: bool) -> World:
    """Returns a world with another seed and, optionally, with samples of other numbers.

    A dataset has as many samples as before, and a number stands for another one.
    """
    seed = recipe.seed + 1 if recipe.seed < 2**31 else recipe.seed - 1
    return World(replace(recipe, seed=seed), renumber if has_other_samples else None)


def renumber(source: Source) -> None:
    """Gives training samples other numbers, and repeats half of the held-out ones in place of the others."""
    if not isinstance(source, DatasetSource):
        return
    numbers = torch.arange(_count(source.train))
    half = _count(source.held_out) // 2
    held_out = torch.arange(_count(source.held_out))
    source.select(
        train=numbers.roll(len(numbers) // 2), held_out=torch.where(held_out < half, held_out + half, held_out)
    )


def _count(data: Any) -> int:
    count = length(data)
    if count is None or count < 2:
        raise UnchangeableDataError("a dataset has no two samples by number")
    return count


def _setting(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def _with_setting(config: Any, path: str, value: Any) -> Any:
    name, _, inner = path.partition(".")
    changed = _with_setting(getattr(config, name), inner, value) if inner else value
    return config.model_copy(update={name: changed})


class Observation(NamedTuple):
    """A training with evaluations in it.

    Attributes:
        prints: Fingerprints of the results of every update, and of the state at the end.
        metrics: Fingerprints of the results of every evaluation.
    """

    prints: list[dict[str, bytes]]
    metrics: list[dict[str, bytes]]

    def parting(self, other: Observation) -> tuple[int, str] | None:
        """Returns the first update, from 1, and the name of a value that differs; None if none does."""
        for number, (prints, others) in enumerate(zip(self.prints, other.prints, strict=True), start=1):
            names = dict.fromkeys((*prints, *others))
            name = next((name for name in names if prints.get(name) != others.get(name)), None)
            if name is not None:
                return number, name
        return None


def observe(build: Build) -> Observation:
    """Makes ``UPDATES``, with an evaluation after each series but the last.

    Args:
        build: Made by ``draws``.
    """
    isolation = Isolation(build, 0)
    observation = Observation([], [])
    for number, count in enumerate(UPDATES):
        if number:
            observation.metrics.extend(isolation.advance([EVALUATION], _prints))
        observation.prints.extend(isolation.advance([None] * count, _prints))
    state = {str(location): digest(value) for location, value in isolation.initial().items()}
    observation.prints.append(state)
    return observation


def observe_or_message(build: Build) -> Observation | str:
    """Returns the training; a message if it fails."""
    try:
        return observe(build)
    except (StepError, RunnerError) as error:
        return str(error)


def _prints(returned: Any) -> dict[str, bytes]:
    return {path: digest(value) for path, value in leaves(returned)}


def differing_metrics(
    expected: dict[str, Any], metrics: dict[str, Any], *, is_exact: bool, tolerance: float = 1e-4
) -> str | None:
    """Returns the name of the first metric that is another number; None if there is none."""
    for name, value in expected.items():
        other = metrics.get(name, MISSING)
        if digest(value) == digest(other):
            continue
        is_close = isinstance(other, float) and abs(other - value) <= tolerance * max(1.0, abs(value))
        if is_exact or not is_close:
            return name
    return None


def evaluate(isolation: Isolation) -> dict[str, Any]:
    """Returns the metrics of a subject of ``draws``."""
    (returned,) = isolation.advance([EVALUATION], partial(dict))
    metrics: dict[str, Any] = returned["metrics"]
    return metrics
