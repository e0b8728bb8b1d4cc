"""Differences between two training states, by entry."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.plugin.ring import Ring
from runner.training.packing import sparse_parts, stored


def differences(before: Any, after: Any, entry: str = "") -> Iterator[str]:
    """Yields one line for every entry in which two states differ.

    Types, shapes and the bits of values are compared.
    """
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        yield from _tensor_differences(before, after, entry)
    elif type(before) is not type(after):
        yield f"{entry}: {type(before).__name__} has become {type(after).__name__}"
    elif isinstance(before, dict):
        yield from _mapping_differences(before, after, entry)
    elif isinstance(before, list | tuple | deque):
        if len(before) != len(after):
            yield f"{entry}: {len(before)} items have become {len(after)}"
        pairs = zip(before, after, strict=False)
        for number, (old_item, new_item) in enumerate(pairs):
            yield from differences(old_item, new_item, f"{entry}/{number}")
    elif isinstance(before, Ring):
        old_size = (before.capacity, before.written)
        new_size = (after.capacity, after.written)
        yield from differences(old_size, new_size, entry)
    elif not _is_same(before, after):
        yield f"{entry}: {before!r:.60} has become {after!r:.60}"


def _mapping_differences(
    before: Mapping[Any, Any], after: Mapping[Any, Any], entry: str
) -> Iterator[str]:
    # NaN is not equal to itself as a key either, so keys are compared by their texts.
    old_items = {repr(key): (key, item) for key, item in before.items()}
    new_items = {repr(key): (key, item) for key, item in after.items()}
    for text in old_items.keys() - new_items.keys():
        yield f"{entry}/{old_items[text][0]}: is lost"
    for text in new_items.keys() - old_items.keys():
        yield f"{entry}/{new_items[text][0]}: was not there before"
    for text, (key, item) in old_items.items():
        if text in new_items:
            yield from differences(item, new_items[text][1], f"{entry}/{key}")


def _tensor_differences(before: Tensor, after: Tensor, entry: str) -> Iterator[str]:
    if before is after:
        return
    for name in ("dtype", "layout", "shape"):
        old = getattr(before, name)
        new = getattr(after, name)
        if old != new:
            yield f"{entry}: its {name} {_text(old)} has become {_text(new)}"
            return
    if before.layout is not torch.strided:
        old_parts = sparse_parts(before.detach())
        new_parts = sparse_parts(after.detach())
        yield from differences(old_parts, new_parts, entry)
    # Comparing the same memory would only cost time.
    elif _is_same_memory(before, after):
        return
    elif not torch.equal(_as_bytes(before), _as_bytes(after)):
        yield f"{entry}: its values have changed"


def _text(value: Any) -> str:
    if isinstance(value, torch.Size):
        return str(list(value))
    return str(value).removeprefix("torch.")


def _as_bytes(tensor: Tensor) -> Tensor:
    return stored(tensor).reshape(-1).view(torch.uint8)


def _is_same_memory(before: Tensor, after: Tensor) -> bool:
    return (
        before.device == after.device
        and before.stride() == after.stride()
        and before.data_ptr() == after.data_ptr()
        and before.is_conj() == after.is_conj()
    )


def _is_same(before: Any, after: Any) -> bool:
    if isinstance(before, np.ndarray | np.generic):
        has_same_form = before.dtype == after.dtype and before.shape == after.shape
        return bool(has_same_form and before.tobytes() == after.tobytes())
    if isinstance(before, float) and math.isnan(before):
        return math.isnan(after)
    # These may contain NaN, which is not equal to itself.
    if isinstance(before, complex | set | frozenset):
        return repr(before) == repr(after) or before == after
    return bool(before == after)
