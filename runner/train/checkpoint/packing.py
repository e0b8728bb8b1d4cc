"""Takes a state apart into what JSON can hold, tensors and rings, and puts it together again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runner.plugin.source import Ring, State


@dataclass
class Packed:
    """A state in three parts, held together by names; the tensors are those of the state, not copies."""

    rest: Any = None
    """What JSON can hold; dictionaries are lists of pairs, to keep integer keys."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    rings: dict[str, Ring] = field(default_factory=dict)


def pack(state: State) -> Packed:
    """Takes a state apart.

    Raises:
        TypeError: a value is none that a checkpoint can hold; the message has its place.
    """
    packed = Packed()
    packed.rest = _pack(state, "", packed)
    return packed


def _pack(value: Any, path: str, packed: Packed) -> Any:
    if isinstance(value, Tensor):
        name = f"{len(packed.tensors)}{path}"  # counted, because keys may hold any character
        packed.tensors[name] = value
        return {"tensor": name, "stride": None if value.is_contiguous() else _dense_stride(value)}
    if isinstance(value, Ring):
        name = str(len(packed.rings))
        packed.rings[name] = value
        return {"ring": {"name": name, "capacity": value.capacity, "written": value.written}}
    if isinstance(value, dict):
        return {"items": [[key, _pack(item, f"{path}/{key}", packed)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_pack(item, f"{path}/{i}", packed) for i, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"{path}: a checkpoint cannot hold a {type(value).__name__}")


def unpack(node: Any, tensors: Mapping[str, Tensor], ring: Callable[..., Ring]) -> Any:
    """Puts together what ``pack`` took apart.

    Args:
        node: ``Packed.rest``.
        tensors: by name.
        ring: makes the ring of a ``name``, a ``capacity`` and the number of rows ``written``.
    """
    (kind, value), *_ = node.items()
    match kind:
        case "tensor":
            return _in_own_memory(tensors[value], node["stride"])
        case "ring":
            return ring(**value)
        case "items":
            return {key: unpack(item, tensors, ring) for key, item in value}
        case "list" | "tuple":
            items = [unpack(item, tensors, ring) for item in value]
            return items if kind == "list" else tuple(items)
    return value


def _dense_stride(tensor: Tensor) -> list[int] | None:
    """The strides of a tensor that fills its memory in another order than that of its dimensions, else None."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return list(tensor.stride())


def _in_own_memory(tensor: Tensor, stride: list[int] | None) -> Tensor:
    """A copy where torch allocates, in the layout that it had.

    Tensors of a safetensors file begin anywhere in it. Matrix products round differently with other alignment or
    strides, so a state that is used where it was read would not continue bit for bit.
    """
    if stride is None:
        return tensor.clone()
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
