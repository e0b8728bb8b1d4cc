"""Trainings with other data than the recipe's, which show on which data a training
depends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from runner.plugin.configs import DatasetConfig
from runner.plugin.generators import seeded
from runner.plugin.inspection import is_stream, length
from runner.plugin.rows import Rows
from runner.plugin.source import Source
from runner.proof.difference import MISSING, digest
from runner.proof.trees import clones, leaves
from runner.recipe.recipe import Recipe

if TYPE_CHECKING:
    from runner.plugin.dataset import DatasetSource

HELD_OUT_BATCHES = 2
"""Batches of held-out samples in each part, at most."""
_SEEDED_SIZE = 4
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
        dataset = _as_dataset(source)
        if dataset is None:
            return
        count = _count(dataset.held_out)
        size = min(count // 2, HELD_OUT_BATCHES * dataset.context.batch_size)
        first = 0 if self.number == 0 else count - size
        dataset.select(held_out=torch.arange(first, first + size))
        self._rows = dataset.held_out if isinstance(dataset.held_out, Rows) else None
        self._copy = clones(self._read())

    def modified(self) -> str | None:
        """Returns the name of the first tensor of the samples that has changed."""
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
        The worlds; None if a source has neither held-out samples nor a seed for its
        evaluation.
    """
    data = recipe.data
    path = data.evaluation_seed
    if path is None:
        if not isinstance(data, DatasetConfig):
            return None
        return World(recipe, HeldOutPart(0)), World(recipe, HeldOutPart(1))
    size = data.evaluation_size
    if size is not None:
        data = with_setting(data, size, min(attrgetter(size)(data), _SEEDED_SIZE))
    other_seed = with_setting(data, path, attrgetter(path)(data) + 1)
    first = World(replace(recipe, data=data), HeldOutPart(0))
    return first, World(replace(recipe, data=other_seed), HeldOutPart(1))


def other_world(recipe: Recipe, *, has_other_samples: bool) -> World:
    """Returns a world with another seed and, optionally, with samples of other numbers.

    A dataset has as many samples as before, and another sample at every number.
    """
    # The largest seed of a generator is limited.
    seed = recipe.seed + 1 if recipe.seed < 2**31 else recipe.seed - 1
    return World(replace(recipe, seed=seed), renumber if has_other_samples else None)


def renumber(source: Source) -> None:
    """Gives training samples other numbers, and replaces half of the held-out ones by
    the other half.
    """
    dataset = _as_dataset(source)
    if dataset is None:
        return
    numbers = torch.arange(_count(dataset.train))
    half = _count(dataset.held_out) // 2
    held_out = torch.arange(_count(dataset.held_out))
    held_out = torch.where(held_out < half, held_out + half, held_out)
    dataset.select(train=numbers.roll(len(numbers) // 2), held_out=held_out)


def _as_dataset(source: Source) -> DatasetSource | None:
    # The module of a source is loaded with it, and has a long chain of imports.
    from runner.plugin.dataset import DatasetSource

    return source if isinstance(source, DatasetSource) else None


def _count(data: Any) -> int:
    """Returns the number of samples.

    Raises:
        UnchangeableDataError: There are fewer than two, or they have no numbers.
    """
    count = None if is_stream(data) else length(data)
    if count is None or count < 2:
        raise UnchangeableDataError("the data have no two samples by number")
    return count


def with_setting(config: Any, path: str, value: Any) -> Any:
    """Returns a copy of settings with another value at a dotted path."""
    name, _, inner = path.partition(".")
    changed = with_setting(getattr(config, name), inner, value) if inner else value
    return config.model_copy(update={name: changed})


def differing_metrics(
    expected: dict[str, Any],
    metrics: dict[str, Any],
    *,
    is_exact: bool,
    tolerance: float = 1e-4,
) -> str | None:
    """Returns the name of the first metric that differs; None if all are the same."""
    for name, value in expected.items():
        metric = metrics.get(name, MISSING)
        if digest(value) == digest(metric):
            continue
        allowed = tolerance * max(1.0, abs(value))
        is_close = isinstance(metric, float) and abs(metric - value) <= allowed
        if is_exact or not is_close:
            return name
    return None
