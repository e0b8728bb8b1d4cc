"""Arrays, rows and files in the attributes of datasets, and of the objects in these."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

from runner.plugin.attributes import attributes_of, has_parts
from runner.plugin.source import Source
from runner.plugin.value_content import is_table

_DEEPEST = 8
LARGEST_CONTAINER = 1000
"""Longer lists hold samples, not datasets or readers."""


class NestedContent:
    """Arrays, rows and inner objects of datasets, which a fingerprint covers.

    It is collected before anything is read, because reading may fill attributes. Arrays and rows
    are references.

    Attributes:
        arrays: Tensors and arrays, in the order of attributes.
        rows: Lists, tuples, mappings and tables that are attributes.
        objects: Attributes of inner datasets and other objects, which may name files.
        outer_objects: Attributes of the datasets themselves.
    """

    def __init__(self, datasets: Iterable[Any]) -> None:
        self.arrays: list[Tensor | np.ndarray[Any, Any]] = []
        self.rows: list[Any] = []
        self.objects: list[dict[str, Any]] = []
        self.outer_objects: list[dict[str, Any]] = []
        self._visited: dict[int, Any] = {}
        for data in datasets:
            self._collect_rows(data)
            self._collect(data, 0)

    def _collect(self, value: Any, depth: int) -> None:
        if id(value) in self._visited or depth > _DEEPEST:
            return
        if isinstance(value, Tensor | np.ndarray):
            self._visited[id(value)] = value
            self._collect_array(value)
        elif has_parts(value) and not is_table(value):
            self._visited[id(value)] = value
            for part in self._parts(value, depth):
                self._collect(part, depth + 1)

    def _collect_rows(self, value: Any) -> None:
        if isinstance(value, dict | list | tuple) or is_table(value):
            self.rows.append(value)

    def _collect_array(self, value: Tensor | np.ndarray[Any, Any]) -> None:
        if isinstance(value, np.memmap):
            if value.filename is not None:
                self.objects.append({"filename": os.fspath(value.filename)})
        elif isinstance(value, Tensor) or not value.dtype.hasobject:
            self.arrays.append(value)

    def _parts(self, value: Any, depth: int) -> Iterator[Any]:
        if isinstance(value, dict | list | tuple):
            if len(value) <= LARGEST_CONTAINER:
                yield from value.values() if isinstance(value, dict) else value
            return
        # Loggers and locks are not data.
        module = type(value).__module__.partition(".")[0]
        if module in sys.stdlib_module_names:
            return
        # Weights of a module may be drawn at random.
        if isinstance(value, nn.Module | Source):
            return
        # Arrays of other packages' objects, such as random generators, may change.
        if module in ("numpy", "torch") and not isinstance(value, Dataset):
            return
        # Reading samples fills caches.
        attributes = {
            name: part
            for name, part in attributes_of(value).items()
            if "cache" not in name.lower()
        }
        (self.objects if depth else self.outer_objects).append(attributes)
        for part in attributes.values():
            self._collect_rows(part)
        yield from attributes.values()
