"""Memory that eager operators use beside their results, and sums that need none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_ADD = torch.ops.aten.add.Tensor
_CONVERTING = frozenset(
    {
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "remainder",
        "fmod",
        "pow",
        "maximum",
        "minimum",
        "atan2",
        "hypot",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    }
)
"""Operators of two tensors that compute in the type to which both are promoted."""
_DIVIDING = frozenset({"div", "atan2"})
"""Those of them that promote integers to floating-point numbers."""
_PACKING = frozenset(
    {
        "avg_pool2d",
        "avg_pool2d_backward",
        "max_pool2d_with_indices",
        "max_pool2d_with_indices_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
        "_softmax",
        "_softmax_backward_data",
        "_log_softmax",
        "_log_softmax_backward_data",
        "embedding_dense_backward",
    }
)
"""Operators that copy operands whose elements do not follow each other."""
_MULTIPLYING = frozenset({"mm", "addmm"})
"""Operators that copy matrices of which neither rows nor columns are contiguous."""
_OWNED = 4
"""References to a tensor that a backward pass owns alone, while an operator is intercepted."""
_OWNED_STORAGE = 2
"""The same for its storage."""


def copied_bytes(
    operator: Any, operands: Sequence[Any], options: Mapping[str, Any]
) -> int:
    """Returns the bytes of the copies that an operator on a CPU makes of its operands.

    An operand of another type than the result of their promotion, or than a sum, is copied to that
    type as a whole (operators on a GPU convert element by element), and some operators copy
    operands that are not contiguous.

    Args:
        operator: Of torch's dispatcher.
        operands: Its positional arguments.
        options: Its named arguments.
    """
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return 0
    name = operator.overloadpacket.__name__.removesuffix("_")
    if name in _PACKING:
        return sum(t.nbytes for t in tensors if not t.is_contiguous())
    if name in _MULTIPLYING:
        return sum(t.nbytes for t in tensors if t.dim() == 2 and not _is_matrix(t))
    if name == "sum" and tensors:
        (summed,) = tensors
        dtype = options.get("dtype") or _type_of_sum(summed)
        return 0 if dtype is summed.dtype else summed.numel() * dtype.itemsize
    if name not in _CONVERTING or len(tensors) != 2:
        return 0
    dtype = torch.result_type(*tensors)
    if name in _DIVIDING and not dtype.is_floating_point and not dtype.is_complex:
        dtype = torch.get_default_dtype()
    return sum(t.numel() * dtype.itemsize for t in tensors if t.dtype is not dtype)


def _type_of_sum(summed: Tensor) -> torch.dtype:
    is_whole = not summed.dtype.is_floating_point and not summed.dtype.is_complex
    return torch.int64 if is_whole else summed.dtype


def _is_matrix(tensor: Tensor) -> bool:
    rows, columns = tensor.shape[-2:]
    row_stride, column_stride = tensor.stride()[-2:]
    has_rows = column_stride == 1 and row_stride >= columns
    has_columns = row_stride == 1 and column_stride >= rows
    return has_rows or has_columns


def in_place_operands(
    operator: Any, operands: Sequence[Any]
) -> tuple[Tensor, Tensor] | None:
    """Returns the operands of a sum of gradients that changes the first of them.

    A backward pass adds the gradients of a tensor in place if nothing else refers to one of them.
    It does not where operators are intercepted.
    """
    if operator is not _ADD or torch._C._current_graph_task_id() < 0:
        return None
    if torch.is_grad_enabled() or len(operands) != 2:
        return None
    accumulated, added = operands
    if not (isinstance(accumulated, Tensor) and isinstance(added, Tensor)):
        return None
    if accumulated.shape != added.shape or accumulated.dtype is not added.dtype:
        return None
    if _is_owned(accumulated):
        return accumulated, added
    return (added, accumulated) if _is_owned(added) else None


def _is_owned(tensor: Tensor) -> bool:
    storage = tensor.untyped_storage()
    references: int = tensor._use_count()  # type: ignore[attr-defined]
    storage_references = torch._C._storage_Use_Count(storage._cdata)
    return references == _OWNED and storage_references == _OWNED_STORAGE
