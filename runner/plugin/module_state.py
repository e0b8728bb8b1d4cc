"""States of modules whose buffers are not all plain tensors of a constant shape and type."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Value = TypeVar("Value")


class BufferSnapshot:
    """Buffers of modules, which it restores whether they were written in place or replaced.

    Args:
        modules: The roots.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._buffers: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        # Copies by identity, because several modules may share a buffer.
        self._copies: dict[int, Tensor] = {}
        for root in modules:
            for module in root.modules():
                self._buffers.append((module, dict(module._buffers)))
                for buffer in module._buffers.values():
                    if buffer is not None and id(buffer) not in self._copies:
                        self._copies[id(buffer)] = buffer.detach().clone()

    def restore(self) -> None:
        """Gives every module the tensors that it had, with their numbers at that time."""
        with torch.no_grad():
            for module, buffers in self._buffers:
                module._buffers.clear()
                for name, buffer in buffers.items():
                    module._buffers[name] = self._restored(buffer)
                module._non_persistent_buffers_set &= buffers.keys()

    def _restored(self, buffer: Tensor | None) -> Tensor | None:
        if buffer is None:
            return None
        copy = self._copies[id(buffer)]
        if _is_copyable(copy, buffer):
            return buffer.copy_(copy)
        # torch does not write to a tensor whose elements share memory.
        if buffer.shape == copy.shape and _expanded_dimensions(buffer):
            return buffer
        return copy


def copied_state(state: Mapping[str, Value]) -> dict[str, Value]:
    """Returns the items of a module's state with the versions of modules."""
    copy = OrderedDict(state)
    if hasattr(state, "_metadata"):
        copy._metadata = state._metadata  # type: ignore[attr-defined]
    return copy


def load_module(
    module: nn.Module, state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Loads a module's state, also into buffers that torch cannot copy into.

    These are sparse buffers, expanded ones (whose elements share memory), and those that have grown
    since the module was built, changed their type or were None then. They are replaced; parameters
    and all other buffers are loaded in place.

    Args:
        module: Receives the state.
        state: Parameters and buffers by name.
        strict: Whether the state must contain all names of the module, and no others.

    Raises:
        RuntimeError: names or shapes of parameters differ.
    """
    loaded = copied_state(state)
    is_recast = _is_recast(module, state)
    for submodule, name, key in _persistent_buffers(module):
        value = state.get(key)
        buffer = submodule._buffers[name]
        if value is None:
            continue
        value = value.detach().to(_dtype_of_loaded(value, buffer, is_recast))
        if buffer is None or not _is_copyable(value, buffer):
            replacement = _replacement(value, buffer)
            submodule._buffers[name] = replacement
            # torch copies a tensor to itself without a check, so the replacement stays as it is.
            loaded[key] = replacement
    module.load_state_dict(loaded, strict=strict)


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    for prefix, submodule in module.named_modules(remove_duplicate=False):
        for name in submodule._buffers.keys() - submodule._non_persistent_buffers_set:
            yield submodule, name, f"{prefix}.{name}" if prefix else name


def _is_recast(module: nn.Module, state: Mapping[str, Any]) -> bool:
    """Returns whether the state may be that of a module of another precision."""
    types = [
        (parameter.dtype, state[name].dtype)
        for name, parameter in module.named_parameters()
        if name in state
    ]
    # Without parameters, nothing shows the precision of the saved module.
    return not types or any(present != saved for present, saved in types)


def _dtype_of_loaded(
    value: Tensor, buffer: Tensor | None, is_recast: bool
) -> torch.dtype:
    """Returns the type of a buffer after loading: the saved one, which an update may have changed,
    except in a module of another precision.
    """
    if buffer is None or not is_recast:
        return value.dtype
    # A fraction does not become an integer in any precision.
    can_cast = torch.can_cast(value.dtype, buffer.dtype)
    return buffer.dtype if can_cast else value.dtype


def _is_copyable(value: Tensor, buffer: Tensor) -> bool:
    if value.layout is not torch.strided or buffer.layout is not torch.strided:
        return False
    has_form = value.shape == buffer.shape and value.dtype == buffer.dtype
    return has_form and not _expanded_dimensions(buffer)


def _replacement(value: Tensor, buffer: Tensor | None) -> Tensor:
    """Returns the value on the buffer's device, expanded as the buffer is if that is possible."""
    if buffer is None:
        return value.clone()
    value = value.to(buffer.device, copy=True)
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
    if tensor.layout is not torch.strided:
        return []
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [
        dimension
        for dimension, (size, stride) in enumerate(sizes)
        if size > 1 and stride == 0
    ]
