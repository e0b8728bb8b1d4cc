"""Digests of values in memory: arrays, and rows of plain values."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import PurePath
from typing import Any
from uuid import UUID

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from runner.plugin.attributes import attributes_of

Array = Tensor | np.ndarray[Any, Any]
_CHUNK_ROWS = 10_000
# Data that were moved have the same rows.
_FOLDERS = re.compile(r'"(?:[A-Za-z]:)?(?:/|\\\\)[^"\n]*(?:/|\\\\)')


def digest_of_array(array: Array, elements: int | None = None) -> bytes:
    """Returns a digest of an array's type, shape and elements.

    Args:
        array: An array of numbers, or a tensor with any layout on any device.
        elements: Number of elements from the first that are read; None reads all.
    """
    header = f"{array.dtype}\0{tuple(array.shape)}\0".encode()
    covered = array if elements is None else array.reshape(-1)[:elements]
    if isinstance(covered, Tensor):
        return header + digest_of_tensor(covered)
    return header + hashlib.sha256(np.ascontiguousarray(covered).tobytes()).digest()


def digest_of_tensor(tensor: Tensor) -> bytes:
    """Returns a digest of a tensor's elements."""
    plain = tensor.detach().cpu()
    # A sparse tensor has no single block of memory.
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    content = plain.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().data).digest()


def is_table(value: Any) -> bool:
    """Returns whether a value is a table or a column of pandas."""
    module = type(value).__module__.partition(".")[0]
    return module == "pandas" and hasattr(value, "to_numpy")


def digest_of_rows(rows: Any, with_arrays: bool = True) -> bytes | None:
    """Returns a digest of the elements of a list, a tuple, a mapping or a table.

    Elements may be plain values, containers, arrays, and objects with attributes. Left out are
    folders of absolute paths, attributes with ``cache`` in their name, and the content of modules,
    datasets, and objects of the standard library, of numpy and of torch.

    Args:
        rows: The container.
        with_arrays: Whether the elements of arrays in it are covered.

    Returns:
        The digest; None without elements, or if a container contains itself.
    """
    digest = hashlib.sha256()
    is_empty = True
    default = partial(_encodable, with_arrays=with_arrays)
    try:
        for chunk in _chunks(rows):
            text = json.dumps(chunk, default=default, skipkeys=True)
            digest.update(_FOLDERS.sub('"', text).encode() + b"\n")
            is_empty = False
    except (RecursionError, ValueError):
        return None
    return None if is_empty else digest.digest()


def _chunks(rows: Any) -> Iterator[Any]:
    """Yields the elements in chunks, because the encoded text takes memory."""
    if is_table(rows):
        # A column has no columns.
        columns = rows.items() if hasattr(rows, "columns") else [("", rows)]
        for name, column in columns:
            yield str(name), _encodable(column.to_numpy(), with_arrays=True)
        return
    elements = iter(rows.items() if isinstance(rows, Mapping) else rows)
    while chunk := list(islice(elements, _CHUNK_ROWS)):
        yield chunk


def _encodable(value: Any, with_arrays: bool) -> Any:
    """Returns what JSON can encode instead of a value."""
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return value.tolist()
    if isinstance(value, Tensor | np.ndarray):
        return digest_of_array(value).hex() if with_arrays else "array"
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes | bytearray):
        return hashlib.sha256(value).hexdigest()
    if isinstance(
        value, PurePath | date | time | timedelta | Decimal | Fraction | UUID | complex
    ):
        return str(value)
    # Sets of texts have another order in every process.
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(item, default=str) for item in value)
    if isinstance(value, deque | range):
        return list(value)
    if is_table(value):
        return list(_chunks(value))
    if isinstance(value, Enum):
        return value.value
    return _attributes(value)


def _attributes(value: Any) -> dict[str, Any] | str:
    cls = value if isinstance(value, type) else type(value)
    name = f"{cls.__module__}.{cls.__qualname__}"
    module = cls.__module__.partition(".")[0]
    is_foreign = module in sys.stdlib_module_names or module in ("numpy", "torch")
    if value is cls or is_foreign or isinstance(value, nn.Module | Dataset):
        return name
    attributes = attributes_of(value)
    return {key: item for key, item in attributes.items() if "cache" not in key.lower()}
