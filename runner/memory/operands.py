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
"""Operators of two operands that compute in the type to which both are promoted."""
_DIVIDING = frozenset({"div", "atan2"})
"""Those of them that promote integers to floating-point numbers."""
_POOLING = frozenset(
    {
        "avg_pool2d",
        "avg_pool2d_backward",
        "max_pool2d_with_indices",
        "max_pool2d_with_indices_backward",
    }
)
"""Operators that copy images that are not contiguous in one of two formats."""
_PACKING = frozenset(
    {
        "native_layer_norm",
        "native_layer_norm_backward",
        "_softmax",
        "_softmax_backward_data",
        "_log_softmax",
        "_log_softmax_backward_data",
        "embedding_dense_backward",
    }
)
"""Operators that copy operands that are not contiguous."""
_MULTIPLYING = frozenset({"mm", "addmm"})
"""Operators that copy matrices of which neither rows nor columns are contiguous."""
_OWNED = 4
"""References to a gradient that a backward pass owns alone, while an operator is intercepted: those
of the pass, of the arguments of the operator, and of the tensor in Python.
"""
_OWNED_STORAGE = 2
"""The same for its storage: those of the gradient, and of the storage in Python."""


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
    is_plain = isinstance(operator, torch._ops.OpOverload) and bool(tensors)
    if not is_plain or any(tensor.device.type != "cpu" for tensor in tensors):
        return 0
    name = operator.overloadpacket.__name__
    if name in _POOLING:
        return _pooled_bytes(tensors)
    if name in _PACKING:
        return sum(t.nbytes for t in tensors if not t.is_contiguous())
    if name in _MULTIPLYING:
        return sum(t.nbytes for t in tensors[-2:] if not _is_matrix(t))
    if name == "sum":
        (summed,) = tensors
        dtype = options.get("dtype") or _type_of_sum(summed)
        return 0 if dtype is summed.dtype else summed.numel() * dtype.itemsize
    return _converted_bytes(name, operands, options)


def _pooled_bytes(tensors: Sequence[Tensor]) -> int:
    """Returns the bytes of copies in the format of the first tensor: an image, or in a backward
    pass a gradient, before the image and the positions of maxima.
    """
    first, *others = tensors
    memory_format = _format_of(first)
    read = [first, *others[1:]]
    copied = [
        tensor
        for tensor in read
        if not tensor.is_contiguous(memory_format=memory_format)
    ]
    # The gradient of the image is computed in that format, and copied to the image's.
    copied += [image for image in others[:1] if _format_of(image) != memory_format]
    return sum(tensor.nbytes for tensor in copied)


def _converted_bytes(
    name: str, operands: Sequence[Any], options: Mapping[str, Any]
) -> int:
    function = name.removesuffix("_")
    if function not in _CONVERTING or len(operands) < 2:
        return 0
    pair = operands[:2]
    dtype = torch.result_type(*pair)
    is_whole = not dtype.is_floating_point and not dtype.is_complex
    if function in _DIVIDING and is_whole and not options.get("rounding_mode"):
        dtype = torch.get_default_dtype()
    converted = [
        tensor
        for tensor in pair
        if isinstance(tensor, Tensor) and tensor.dtype is not dtype
    ]
    # A result of that type is converted back.
    if name != function and pair[0].dtype is not dtype:
        converted.append(pair[0])
    return sum(tensor.numel() * dtype.itemsize for tensor in converted)


def _type_of_sum(summed: Tensor) -> torch.dtype:
    is_whole = not summed.dtype.is_floating_point and not summed.dtype.is_complex
    return torch.int64 if is_whole else summed.dtype


def _format_of(image: Tensor) -> torch.memory_format:
    is_last = image.dim() == 4 and image.is_contiguous(
        memory_format=torch.channels_last
    )
    if is_last and not image.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format


def _is_matrix(tensor: Tensor) -> bool:
    if tensor.dim() != 2:
        return True
    rows, columns = tensor.shape
    row_stride, column_stride = tensor.stride()
    has_rows = column_stride == 1 and row_stride >= columns
    has_columns = row_stride == 1 and column_stride >= rows
    return has_rows or has_columns


def reused_bytes(
    operator: Any, operands: Sequence[Any], options: Mapping[str, Any]
) -> int:
    """Returns the bytes of an operand that a backward pass changes in place.

    It adds the gradients of a tensor in place if nothing else refers to one of them, but not where
    operators are intercepted. A sum that a function of Python computes in a backward pass looks the
    same if nothing else refers to one of its operands.

    Args:
        operator: Of torch's dispatcher.
        operands: Its positional arguments.
        options: Its named arguments.
    """
    is_gradient_sum = operator is _ADD and len(operands) == 2 and not options
    if not is_gradient_sum or torch._C._current_graph_task_id() < 0:
        return 0
    if torch.is_grad_enabled():
        return 0
    accumulated, added = operands
    if not isinstance(accumulated, Tensor) or not isinstance(added, Tensor):
        return 0
    if accumulated.shape != added.shape or accumulated.dtype is not added.dtype:
        return 0
    is_owned = _is_owned(accumulated) or _is_owned(added)
    return accumulated.nbytes if is_owned else 0


def _is_owned(tensor: Tensor) -> bool:
    storage = tensor.untyped_storage()
    references: int = tensor._use_count()  # type: ignore[attr-defined]
    storage_references = torch._C._storage_Use_Count(storage._cdata)
    return references == _OWNED and storage_references == _OWNED_STORAGE
