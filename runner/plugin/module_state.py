"""Loading the state of a module whose buffers are not all plain tensors of a constant shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def load_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads a module's state, also into buffers that torch cannot copy into.

    These are sparse buffers, expanded ones (whose elements share memory), and those that have grown
    since the module was built or were None then. They are replaced; parameters and all other
    buffers are loaded in place.

    Raises:
        RuntimeError: names or shapes of parameters differ.
    """
    loaded = dict(state)
    for submodule, name, key in _persistent_buffers(module):
        value = state.get(key)
        buffer = submodule._buffers[name]
        if value is None:
            continue
        if buffer is None or not _is_copyable(value, buffer):
            replacement = _replacement(value, buffer)
            submodule._buffers[name] = replacement
            # torch copies a tensor to itself without a check, so the replacement stays as it is.
            loaded[key] = replacement
    module.load_state_dict(loaded)


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    for prefix, submodule in module.named_modules(remove_duplicate=False):
        for name in submodule._buffers.keys() - submodule._non_persistent_buffers_set:
            yield submodule, name, f"{prefix}.{name}" if prefix else name


def _is_copyable(value: Tensor, buffer: Tensor) -> bool:
    import torch

    if value.layout is not torch.strided or buffer.layout is not torch.strided:
        return False
    return value.shape == buffer.shape and not _expanded_dimensions(buffer)


def _replacement(value: Tensor, buffer: Tensor | None) -> Tensor:
    """Returns the value on the buffer's device, expanded as the buffer is if that is possible."""
    import torch

    if buffer is None:
        return value.detach().clone()
    value = value.detach().to(buffer.device, buffer.dtype, copy=True)
    if buffer.shape != value.shape:
        return value
    dimensions = _expanded_dimensions(buffer)
    if not dimensions:
        return value
    base = value
    for dimension in dimensions:
        base = base.narrow(dimension, 0, 1)
    expanded = base.clone().expand(value.shape)
    # The layout of a tensor decides how matrix products with it are rounded.
    return expanded if torch.equal(expanded, value) else value


def _expanded_dimensions(tensor: Tensor) -> list[int]:
    """Returns the dimensions whose elements share memory."""
    import torch

    if tensor.layout is not torch.strided:
        return []
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [
        dimension
        for dimension, (size, stride) in enumerate(sizes)
        if size > 1 and stride == 0
    ]
