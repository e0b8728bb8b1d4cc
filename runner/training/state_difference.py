"""Differences between two training states, by entry."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.plugin.source import Ring
from runner.training.packing import sparse_parts, stored


def differences(before: Any, after: Any, entry: str = "") -> Iterator[str]:
    """Yields one line for every entry in which two states differ: types, shapes, and values to the bit."""
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        yield from _tensor_differences(before, after, entry)
    elif type(before) is not type(after):
        yield f"{entry}: {type(before).__name__} has become {type(after).__name__}"
    elif isinstance(before, dict):
        yield from _mapping_differences(before, after, entry)
    elif isinstance(before, list | tuple | deque):
        if len(before) != len(after):
            yield f"{entry}: {len(before)} items have become {len(after)}"
        for number, (left, right) in enumerate(zip(before, after, strict=False)):
            yield from differences(left, right, f"{entry}/{number}")
    elif isinstance(before, Ring):
        yield from differences(
            (before.capacity, before.written), (after.capacity, after.written), entry
        )
    elif not _is_same(before, after):
        yield f"{entry}: {before!r:.60} has become {after!r:.60}"


def _mapping_differences(
    before: Mapping[Any, Any], after: Mapping[Any, Any], entry: str
) -> Iterator[str]:
    # NaN is not equal to itself as a key either, so keys are compared by what they look like.
    left, right = (
        {repr(key): (key, item) for key, item in state.items()}
        for state in (before, after)
    )
    for text in left.keys() - right.keys():
        yield f"{entry}/{left[text][0]}: is lost"
    for text in right.keys() - left.keys():
        yield f"{entry}/{right[text][0]}: was not there before"
    for text, (key, item) in left.items():
        if text in right:
            yield from differences(item, right[text][1], f"{entry}/{key}")


def _tensor_differences(before: Tensor, after: Tensor, entry: str) -> Iterator[str]:
    if before is after:
        return
    for name in ("dtype", "layout", "shape"):
        left, right = getattr(before, name), getattr(after, name)
        if left != right:
            yield f"{entry}: its {name} {_shown(left)} has become {_shown(right)}"
            return
    if before.layout is torch.strided and _is_same_memory(before, after):
        return
    if before.layout is not torch.strided:
        yield from differences(
            sparse_parts(before.detach()), sparse_parts(after.detach()), entry
        )
    elif not torch.equal(_as_bytes(before), _as_bytes(after)):
        yield f"{entry}: its values have changed"


def _shown(value: Any) -> str:
    return (
        str(list(value))
        if isinstance(value, torch.Size)
        else str(value).removeprefix("torch.")
    )


def _as_bytes(tensor: Tensor) -> Tensor:
    return stored(tensor).reshape(-1).view(torch.uint8)


def _is_same_memory(before: Tensor, after: Tensor) -> bool:
    same = before.device == after.device and before.stride() == after.stride()
    return (
        same
        and before.data_ptr() == after.data_ptr()
        and before.is_conj() == after.is_conj()
    )


def _is_same(before: Any, after: Any) -> bool:
    if isinstance(before, np.ndarray | np.generic):
        same = before.dtype == after.dtype and before.shape == after.shape
        return bool(same and before.tobytes() == after.tobytes())
    if isinstance(before, float) and math.isnan(before):
        return math.isnan(after)
    if isinstance(before, complex | set | frozenset):
        return repr(before) == repr(after) or before == after
    return bool(before == after)
