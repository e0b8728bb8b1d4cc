"""Data that are completely in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from runner.plugin.source import Batch
from runner.system.errors import RunnerError

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


@runtime_checkable
class Rows(Protocol):
    """Data that are completely in memory, and return many samples in one call."""

    nbytes: int

    def __len__(self) -> int: ...

    def take(self, index: Tensor) -> Batch:
        """Returns the samples with these numbers, [B], as a batch."""

    def to(self, device: torch.device) -> Rows:
        """Returns the same data on a device."""


class TensorRows:
    """Tensors by name, with one row for each sample."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Checks the tensors.

        Raises:
            RunnerError: A value is not a tensor, or tensors have different numbers of rows.
        """
        self.tensors = dict(tensors)
        rows = {name: _row_count(name, value) for name, value in self.tensors.items()}
        if len(set(rows.values())) != 1:
            counts = [f"'{name}' has {count:,}" for name, count in rows.items()]
            actual = ", ".join(counts) or "got no tensor"
            raise RunnerError(
                f"every tensor should have one row for each sample, but {actual}"
            )
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def take(self, index: Tensor) -> Batch:
        """Returns the rows with these numbers."""
        batch = {}
        for name, tensor in self.tensors.items():
            # ``index_select`` is faster, and has no unsigned numbers of a single dimension.
            is_selectable = tensor.dtype not in _UNSIGNED
            batch[name] = (
                tensor.index_select(0, index) if is_selectable else tensor[index]
            )
        return batch

    def to(self, device: torch.device) -> TensorRows:
        """Returns the same rows on a device."""
        return TensorRows(
            {name: tensor.to(device) for name, tensor in self.tensors.items()}
        )


def _row_count(name: str, value: Any) -> int:
    # A tensor without dimensions has no rows and no length.
    if isinstance(value, Tensor):
        return len(value) if value.dim() else 0
    hint = "; torch.from_numpy makes it one" if isinstance(value, np.ndarray) else ""
    raise RunnerError(f"'{name}' should be a tensor, got {type(value).__name__}{hint}")


class SelectedRows:
    """Some rows of other data, in the order of their numbers."""

    def __init__(self, rows: Rows, index: Tensor) -> None:
        self.rows = rows
        self.index = index
        self.nbytes = rows.nbytes

    def __len__(self) -> int:
        return len(self.index)

    def take(self, index: Tensor) -> Batch:
        """Returns the rows with these numbers among the selected ones."""
        return self.rows.take(self.index[index])

    def to(self, device: torch.device) -> SelectedRows:
        """Returns the same rows on a device."""
        return SelectedRows(self.rows.to(device), self.index.to(device))
