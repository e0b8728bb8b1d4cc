"""Inputs of predictions in other shapes than those of the training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runner.proof.isolation import Isolation, StepError
from runner.proof.subject import Build
from runner.proof.trajectory import Update
from runner.proof.trees import clones, leaves, on_host, to_float64
from runner.system.errors import RunnerError
from runner.system.tensor_trees import map_tensors, tensors

MOST_SHAPES = 8
"""Inputs of other shapes that are compared."""


def reshape_inputs(inputs: Any) -> list[Any]:
    """Returns the inputs with other sizes of their dimensions, without the first, the batch.

    All dimensions of one size change together, because they may be one axis of several
    tensors. A size becomes one less, one half, one more and 1. Larger ones repeat
    elements.

    Args:
        inputs: Inputs of a prediction on a training batch.
    """
    dimensions = (size for tensor in tensors(inputs) for size in tensor.shape[1:])
    sizes = sorted({size for size in dimensions if size > 1})
    changes = list(_changes(sizes))[:MOST_SHAPES]
    return [_resize(inputs, *change) for change in dict.fromkeys(changes)]


def _changes(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields old and new sizes; first those that differ least, for every size."""
    yield from ((size, size - 1) for size in sizes)
    yield from ((size, size // 2) for size in sizes)
    yield from ((size, size + 1) for size in sizes)
    yield from ((size, 1) for size in sizes)


def _resize(inputs: Any, size: int, new_size: int) -> Any:
    return map_tensors(partial(_resize_tensor, size, new_size), inputs)


def _resize_tensor(size: int, new_size: int, tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:
        return tensor
    for dimension in range(1, tensor.dim()):
        if tensor.shape[dimension] == size:
            index = torch.arange(new_size, device=tensor.device) % size
            tensor = tensor.index_select(dimension, index)
    return tensor


def keep_answered(
    build: Build, states: Mapping[str, Any], updates: Iterable[Update]
) -> list[Update]:
    """Returns the updates that a subject answers with finite numbers, also in float64.

    Args:
        build: Makes the subject.
        states: The states in which it answers.
        updates: Updates with different inputs of a prediction.
    """
    # A shape that the baseline refuses has no expected result.
    answered = list(updates)
    for in_float64 in (False, True):
        try:
            isolation = Isolation(build, 0, in_float64)
            isolation.load(states)
        except StepError:
            # A baseline need not run in float64.
            continue
        copy = to_float64 if in_float64 else clones
        answered = [
            update
            for update in answered
            if _is_answered(isolation, copy(on_host(update.batch)))
        ]
    return answered


def _is_answered(isolation: Isolation, batch: Any) -> bool:
    try:
        (output,) = isolation.advance([batch], lambda returned: returned)
    except (StepError, RunnerError, torch.OutOfMemoryError):
        return False
    values = [leaf for _, leaf in leaves(output) if isinstance(leaf, Tensor)]
    return all(bool(value.isfinite().all()) for value in values)
