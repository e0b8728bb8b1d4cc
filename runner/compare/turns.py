"""Updates that an ordinary training rarely shows: the same again, memory used again, numbers at their ends."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.compare.difference import as_float64
from runner.compare.isolation import StepError, Trajectory, Update, leaves, saved
from runner.compare.subject import Build
from runner.system.errors import RunnerError
from runner.system.tree import map_tensors

STALE = "with the same batch again and other parameters, "
_PLACE = "with another batch in the memory of the one before, "
_LARGER, _GROWN = 10, 3  # times, of inputs and of a state: enough for a clamp, too little to overflow


class Turn(NamedTuple):
    """One of them."""

    name: str  # how a verdict on it begins
    update: Update


def again(baseline: Build, batches: Sequence[Any], seed: int, float64: bool) -> list[Turn]:
    """Two more updates with the last batch, the very same object, and one with another batch in its memory.

    Before the second of them a state is loaded: that of the baseline after its first update. Raises ``StepError``.
    """
    state, last = _state(baseline, batches, seed, float64), batches[-1]
    turns = [Turn(STALE, Update(last)), Turn(STALE, Update(last, state))]
    return turns + [Turn(_PLACE, Update(batches[0], place=last))] * (len(batches) > 1)


def at_the_ends(baseline: Build, batches: Sequence[Any], seed: int, float64: bool) -> list[Turn]:
    """Updates with the last batch, its numbers and those of the state at ends that trainings seldom reach.

    All from the baseline's state after its first update; only those at which the baseline's numbers stay finite. Raises
    ``StepError``.
    """
    state, last = _state(baseline, batches, seed, float64), batches[-1]
    found = [Turn(name, Update(batch, state, seed)) for name, batch in _ends(last)]
    grown = map_tensors(lambda tensor: tensor * _GROWN if tensor.is_floating_point() else tensor, state)
    found.append(Turn(f"with a state {_GROWN} times as large, ", Update(last, grown, seed)))
    return [turn for turn in found if _is_finite(baseline, turn.update, seed, float64)]


def _state(baseline: Build, batches: Sequence[Any], seed: int, float64: bool) -> Mapping[str, Any]:
    """The baseline's after its first update."""
    first = Trajectory(batches[:1], seed, float64)
    isolation = first.isolated(baseline)
    next(first.updated(isolation))
    return saved(isolation.subject)


def _ends(batch: Any) -> Iterator[tuple[str, Any]]:
    """A batch with its zeros and ones (the end of an episode, a mask) all alike, and with its other numbers larger."""
    flags = {id(each) for _, each in leaves(batch) if isinstance(each, Tensor) and _is_flag(each)}
    for value in (0, 1) if flags else ():
        same = partial(_filled, flags, value)
        yield f"with every flag of the batch {value}, ", map_tensors(same, batch)

    def larger(tensor: Tensor) -> Tensor:
        return tensor * _LARGER if tensor.is_floating_point() and id(tensor) not in flags else tensor

    yield f"with a batch {_LARGER} times as large, ", map_tensors(larger, batch)


def _filled(flags: Container[int], value: int, tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, value) if id(tensor) in flags else tensor


def _is_flag(tensor: Tensor) -> bool:
    values = as_float64(tensor)
    return values.numel() > 0 and bool(((values == 0) | (values == 1)).all())


def _is_finite(baseline: Build, update: Update, seed: int, float64: bool) -> bool:
    """Whether the baseline survives an update with nothing but finite numbers."""
    trajectory = Trajectory([update], seed, float64)
    try:
        frame = next(trajectory.updated(trajectory.isolated(baseline)))
    except (StepError, RunnerError):
        return False
    return all(bool(as_float64(value).isfinite().all()) for value in frame.values() if isinstance(value, Tensor))
