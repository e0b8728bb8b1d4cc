"""Updates that an ordinary training rarely shows: the same again, memory used again, numbers at their ends."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.compare.difference import as_float64
from runner.compare.isolation import Isolation, StepError, Trajectory, Update
from runner.compare.states import leaves, saved
from runner.compare.subject import Build
from runner.system.errors import RunnerError
from runner.system.tree import map_tensors

STALE = "with the same batch again and other parameters, "
_PLACE = "with another batch in the memory of the one before, "
_OBJECTS = "with another batch in the objects of the one before, "
_LARGER, _GROWN = 10, 3  # times, of inputs and of a state: enough for a clamp, too little to overflow


class Turn(NamedTuple):
    """One of them."""

    name: str  # how a verdict on it begins
    update: Update


def turns(baseline: Build, batches: Sequence[Any], seed: int, float64: bool, ends: bool = True) -> list[Turn]:
    """All of them for these batches; of ends only those at which the baseline's numbers stay finite.

    Raises ``StepError`` if the baseline fails in its first update, after which its state is loaded again and again.
    """
    first = Trajectory(batches[:1], seed, float64)
    isolation = first.isolated(baseline)
    next(first.updated(isolation))
    state = saved(isolation.subject)
    found = _again(batches, state)
    if ends:
        ended = (Turn(name, Update(batch, given, seed)) for name, batch, given in _ends(batches[-1], state))
        found += [turn for turn in ended if _is_finite(isolation, Trajectory([turn.update], seed, float64))]
    return found


def _again(batches: Sequence[Any], state: Mapping[str, Any]) -> list[Turn]:
    """The last batch, the very same object: with another state, too; and others in its memory and objects."""
    last = batches[-1]
    found = [Turn(STALE, Update(last)), Turn(STALE, Update(last, state))]
    if len(batches) > 1:
        found.append(Turn(_PLACE, Update(batches[0], place=last)))
        found.append(Turn(_OBJECTS, Update(batches[1], place=last, in_memory=False)))
    return found


def _ends(batch: Any, state: Mapping[str, Any]) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """A batch with its flags (a mask, an end) all alike; larger numbers in it, or in a state."""
    flags = {id(each) for _, each in leaves(batch) if isinstance(each, Tensor) and _is_flag(each)}
    for value in (0, 1) if flags else ():
        yield f"with every flag of the batch {value}, ", map_tensors(partial(_filled, flags, value), batch), state
    larger = map_tensors(lambda tensor: tensor if id(tensor) in flags else _times(_LARGER, tensor), batch)
    yield f"with a batch {_LARGER} times as large, ", larger, state
    yield f"with a state {_GROWN} times as large, ", batch, map_tensors(partial(_times, _GROWN), state)


def _times(factor: float, tensor: Tensor) -> Tensor:
    return tensor * factor if tensor.is_floating_point() else tensor


def _filled(flags: Container[int], value: int, tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, value) if id(tensor) in flags else tensor


def _is_flag(tensor: Tensor) -> bool:
    values = as_float64(tensor)
    return values.numel() > 0 and bool(((values == 0) | (values == 1)).all())


def _is_finite(isolation: Isolation, trajectory: Trajectory) -> bool:
    """Whether a subject survives an update with nothing but finite numbers."""
    try:
        frame = next(trajectory.updated(isolation))
    except (StepError, RunnerError):
        return False
    return all(bool(as_float64(value).isfinite().all()) for value in frame.values() if isinstance(value, Tensor))
