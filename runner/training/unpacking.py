"""Converts JSON and named tensors back into a training state, the inverse of ``packing``.

The JSON of a checkpoint may come from anyone. Every value is compared with the form that
``packing`` writes, and anything else is a ``ValueError``.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.plugin.ring import Ring
from runner.system.stored_json import is_count
from runner.training.packing import (
    COMPRESSED,
    FACTORIES,
    MOST_LEVELS,
    NATIVE,
    SEQUENCES,
)

_RING_NAME = re.compile(r"[0-9]{1,9}")
_Rings = Callable[..., Ring]
_COMPRESSED_NAMES = {
    str(layout).removeprefix("torch."): (layout, names)
    for layout, names in COMPRESSED.items()
}
# Sets of keys that a node may have in addition to its kind; other kinds have no more keys.
_KEYS: dict[str, tuple[set[str], ...]] = {
    "tensor": ({"stride"}, {"stride", "dtype", "shape"}),
    "items": (set(), {"default"}, {"class"}, {"class", "versions"}),
    "deque": ({"maxlen"},),
    "sparse": ({"size", "parts"}, {"size", "parts", "coalesced"}),
    "array": ({"shape", "dtype"},),
    "scalar": ({"shape", "dtype"},),
}
_NO_KEYS: tuple[set[str], ...] = (set(),)
# JSON has the values of these types as they are.
_PLAIN = frozenset({type(None), bool, str, int, float})
_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "complex": lambda parts: complex(*parts),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda bounds: range(*bounds),
    "path": Path,
    "dtype": lambda name: _dtype(name),
    "device": torch.device,
}


def unpack(
    node: Any,
    tensors: Mapping[str, Tensor],
    ring: _Rings,
    live: Mapping[str, Tensor] | None = None,
) -> Any:
    """Restores a state from the result of ``pack``.

    Args:
        node: What ``pack`` returned, after JSON.
        tensors: The contents of the files, as ``stored`` made them.
        ring: Makes a ring from its description.
        live: Tensors that are used as they are instead of a copy from a file, by name.

    Raises:
        ValueError: ``pack`` returns nothing of this form, or a file has tensors that the state does
            not refer to.
    """
    unpacker = _Unpacker(tensors, ring, live or {})
    state = unpacker.value(node)
    unused = tensors.keys() - unpacker.used
    if unused:
        raise ValueError(
            f"refers to no tensor {min(unused)!r:.80}, which is in a file "
            f"({len(unused)} such tensors)"
        )
    return state


class _Unpacker:
    """Converts the nodes of one state.

    Attributes:
        used: Names of the tensors that the state refers to.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], ring: _Rings, live: Mapping[str, Tensor]
    ) -> None:
        self.used: set[str] = set()
        self._tensors = tensors
        self._ring = ring
        self._live = live
        self._copies: dict[str, Tensor] = {}
        self._levels = 0

    def value(self, node: Any) -> Any:
        """Returns the value that a node represents."""
        if not isinstance(node, dict) or not node:
            raise ValueError(
                f"an entry should be a mapping with its kind, got {node!r:.60}"
            )
        # Most of a state are plain values: the numbers in the states of generators.
        if len(node) == 1 and type(node.get("value", self)) in _PLAIN:
            return node["value"]
        kind, content = next(iter(node.items()))
        if node.keys() - {kind} not in _KEYS.get(kind, _NO_KEYS):
            raise ValueError(
                f"an entry of kind {kind!r:.60} has the keys {sorted(node)!r:.120}"
            )
        # Two levels more than a state has, for the strided tensors of a sparse one.
        if self._levels > MOST_LEVELS + 2:
            raise ValueError(f"is nested deeper than {MOST_LEVELS} levels")
        self._levels += 1
        value = self._value_of(kind, content, node)
        self._levels -= 1
        return value

    def _value_of(self, kind: str, content: Any, node: Mapping[str, Any]) -> Any:
        if kind == "tensor":
            return self._tensor(content, node)
        if kind == "items":
            return self._mapping(content, node)
        if kind in SEQUENCES:
            return SEQUENCES[kind]([self.value(item) for item in content])
        if kind == "deque":
            return deque([self.value(item) for item in content], node["maxlen"])
        if kind == "ring":
            return self._ring(**_ring_description(content))
        if kind == "sparse":
            return self._sparse(content, node)
        if kind in ("array", "scalar"):
            return self._array(kind, content, node)
        if kind not in _SCALARS:
            raise ValueError(f"{kind!r:.60} is not a kind of entry")
        return _SCALARS[kind](content)

    def _mapping(self, pairs: list[Any], node: Mapping[str, Any]) -> dict[Any, Any]:
        items = []
        for key, item in pairs:
            plain_key = self.value(key) if isinstance(key, dict) else _plain(key)
            items.append((plain_key, self.value(item)))
        if "default" in node:
            name = node["default"]
            return defaultdict(None if name is None else FACTORIES[name], items)
        if node.get("class") == "OrderedDict":
            return _with_versions(OrderedDict(items), node.get("versions", {}))
        if node.get("class") == "Counter":
            return Counter(dict(items))
        return dict(items)

    def _tensor(self, name: Any, node: Mapping[str, Any]) -> Tensor:
        if isinstance(name, str) and name in self._live:
            self.used.add(name)
            return self._live[name].detach()
        tensor = self._stored(name)
        if name not in self._copies:
            if "dtype" in node:
                tensor = _of_type(name, tensor, node)
            # A copy where torch allocates, in the layout that it had: tensors of a safetensors file
            # have any alignment, and matrix products round differently with other alignment or
            # strides, so a state that is used where it was read would not continue bit for bit.
            stride = _stride(name, node["stride"], tensor)
            copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype)
            self._copies[name] = copy.copy_(tensor)
        return self._copies[name]

    def _stored(self, name: Any) -> Tensor:
        """Returns a tensor of a file."""
        if not isinstance(name, str) or name not in self._tensors:
            raise ValueError(f"refers to a tensor that is in no file: {name!r:.80}")
        self.used.add(name)
        return self._tensors[name]

    def _sparse(self, layout: str, node: Mapping[str, Any]) -> Tensor:
        size = _shape(node["size"])
        is_compressed = layout != "sparse_coo"
        kind = torch.sparse_coo
        names: tuple[str, ...] = ("indices",)
        if is_compressed:
            kind, names = _COMPRESSED_NAMES[layout]
        if tuple(node["parts"]) != (*names, "values"):
            components = ", ".join(names)
            raise ValueError(
                f"a tensor of layout {layout} is made of {components} and values"
            )
        tensors = [self.value(entry) for entry in node["parts"].values()]
        if is_compressed:
            compressed, plain, values = tensors
            return torch.sparse_compressed_tensor(
                compressed, plain, values, size, layout=kind, check_invariants=True
            )
        indices, values = tensors
        return torch.sparse_coo_tensor(
            indices, values, size, is_coalesced=node["coalesced"], check_invariants=True
        )

    def _array(self, kind: str, content: Any, node: Mapping[str, Any]) -> Any:
        dtype = np.dtype(node["dtype"])
        shape = _shape(node["shape"])
        if dtype.hasobject or dtype.fields is not None:
            raise ValueError(f"an array of type {dtype} is never written")
        if kind == "scalar":
            return np.frombuffer(bytes.fromhex(content), dtype).reshape(shape)[()]
        # The array gets its own memory, which can be written.
        memory = bytearray(self._stored(content).numpy().tobytes())
        return np.frombuffer(memory, dtype).reshape(shape)


def _of_type(name: str, tensor: Tensor, node: Mapping[str, Any]) -> Tensor:
    """Returns a tensor of a type that safetensors does not support."""
    dtype = _dtype(node["dtype"])
    shape = _shape(node["shape"])
    if dtype in NATIVE or tensor.dtype is not torch.uint8 or tensor.dim() != 1:
        raise ValueError(
            f"tensor {name!r:.80} is not stored as the bytes of {node['dtype']}"
        )
    # Copied first, because the bytes in a file may be misaligned for such a number.
    return tensor.clone().view(dtype).view(shape)


def _with_versions(
    state: OrderedDict[Any, Any], versions: Any
) -> OrderedDict[Any, Any]:
    """Returns the state of a module with the versions of its submodules, by name."""
    if not isinstance(versions, dict) or not all(map(is_count, versions.values())):
        raise ValueError(
            f"versions of modules should be integers by name, got {versions!r:.60}"
        )
    if versions:
        # The attribute in which torch keeps them.
        state._metadata = {  # type: ignore[attr-defined]
            name: {"version": version} for name, version in versions.items()
        }
    return state


def _plain(value: Any) -> Any:
    if type(value) not in _PLAIN:
        raise ValueError(
            "a plain value should be a number, a text, true, false or null, "
            f"got {value!r:.60}"
        )
    return value


def _ring_description(content: Any) -> dict[str, Any]:
    is_valid = (
        isinstance(content, dict)
        and content.keys() == {"name", "capacity", "written"}
        and isinstance(content["name"], str)
        and _RING_NAME.fullmatch(content["name"]) is not None
        and is_count(content["capacity"])
        and is_count(content["written"])
    )
    if not is_valid:
        raise ValueError(
            f"a ring should have a name, capacity and written, got {content!r:.80}"
        )
    return dict(content)


def _shape(sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, list) or not all(map(is_count, sizes)):
        raise ValueError(f"a shape should be a list of sizes, got {sizes!r:.80}")
    return tuple(sizes)


def _stride(name: str, stride: Any, tensor: Tensor) -> tuple[int, ...]:
    """Returns the stride of a copy.

    Raises:
        ValueError: Its elements would overlap, or would not fill their memory.
    """
    if stride is None:
        return tuple(tensor.stride())
    shape = tensor.shape
    is_valid = (
        isinstance(stride, list)
        and len(stride) == len(shape)
        and all(map(is_count, stride))
    )
    if not is_valid:
        raise ValueError(
            f"tensor {name!r:.80}: its stride should be {len(shape)} numbers, "
            f"got {stride!r:.80}"
        )
    # A tensor without elements has no memory.
    if math.prod(shape) == 0:
        return tuple(stride)
    # Torch never uses the stride of a dimension of size 1.
    dimensions = zip(stride, shape, strict=True)
    used_dimensions = sorted((step, size) for step, size in dimensions if size > 1)
    expected = 1
    for step, size in used_dimensions:
        if step != expected:
            raise ValueError(
                f"tensor {name!r:.80}: stride {stride!r:.80} does not fit "
                f"shape {[*shape]!r:.80}"
            )
        expected *= size
    return tuple(stride)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r:.60} is not a type of tensors")
    return dtype
