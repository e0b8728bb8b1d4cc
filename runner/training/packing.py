"""Translation of a training state into JSON and named tensors; ``unpacking`` translates back.

Only data are translated, never code: the content of a checkpoint cannot run anything when it is
read. Every value of the state becomes a JSON object with one key, its kind, or a few more for
tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.plugin.ring import Ring
from runner.plugin.source import State
from runner.system.errors import RunnerError

# Characters of a tensor's name in a file; its number alone makes it unique.
LONGEST_NAME = 200
NATIVE = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    }
)  # fmt: skip
"""Types that every safetensors file can hold; tensors of other types are written as bytes."""
COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
FACTORIES = {
    factory.__name__: factory for factory in (int, float, list, dict, set, str, bool)
}
"""Factories that a ``defaultdict`` in a checkpoint may have."""
SEQUENCES = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
# Python refuses to write decimal numbers of more than 4,300 digits, so larger integers are
# hexadecimal.
_LARGEST_JSON_INTEGER = 2**63
_HINTS = {
    "Enum": "keep its .value",
    "Generator": "keep what its get_state() returns",
    "Module": "keep its state_dict()",
    "Optimizer": "keep its state_dict()",
    "UninitializedParameter": "call the lazy module once in build()",
}
# Containers inside one another; a reader's stack is limited.
MOST_LEVELS = 100


def module_versions(state: Any) -> dict[str, int]:
    """Returns the versions of modules by name, except the first version, from what a module's
    ``state_dict`` returned: a module may convert a state without a version when it is loaded.
    """
    versions = {
        name: entry.get("version")
        for name, entry in getattr(state, "_metadata", {}).items()
    }
    return {
        name: version
        for name, version in versions.items()
        if type(version) is int and version > 1
    }


class UnpackableError(RunnerError, TypeError):
    """A value that no checkpoint can contain; the message starts with the entry of the state."""


class Packer:
    """Converts one state to JSON and named tensors.

    Attributes:
        tensors: The strided tensors of the state by their names in a file, not copied.
        rings: The ring buffers by their names.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.rings: dict[str, Ring] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._open: set[int] = set()

    def pack(self, value: Any, entry: str = "") -> Any:
        """Returns what JSON can hold of a value.

        Raises:
            UnpackableError: A checkpoint cannot hold the value.
        """
        if type(value) is float or _is_key(value):
            return {"value": value}
        if isinstance(value, Tensor):
            return self._tensor(value, entry)
        if id(value) in self._open:
            name = type(value).__name__
            raise _unpackable(entry or "/", f"a {name} that contains itself")
        if len(self._open) >= MOST_LEVELS:
            raise _unpackable("/", f"a state nested deeper than {MOST_LEVELS} levels")
        self._open.add(id(value))
        try:
            return self._container(value, entry) or self._scalar(value, entry)
        finally:
            self._open.discard(id(value))

    def _container(self, value: Any, entry: str) -> dict[str, Any] | None:
        kind = type(value)
        if kind in (dict, OrderedDict, Counter, defaultdict):
            items = [self._item(key, item, entry) for key, item in value.items()]
            node: dict[str, Any] = {"items": items}
            if kind is defaultdict:
                node["default"] = self._factory(value, entry)
            elif kind is not dict:
                node["class"] = kind.__name__
            versions = module_versions(value) if kind is OrderedDict else {}
            return {**node, "versions": versions} if versions else node
        if kind is deque:
            return {"deque": self._members(value, entry), "maxlen": value.maxlen}
        for name, sequence in SEQUENCES.items():
            if kind is sequence:
                return {name: self._members(value, entry)}
        return None

    def _item(self, key: Any, item: Any, entry: str) -> list[Any]:
        text = key if type(key) in (str, int) else repr(key)
        path = f"{entry}/{text}"
        packed_key = key if _is_key(key) else self.pack(key, path)
        return [packed_key, self.pack(item, path)]

    def _members(self, values: Any, entry: str) -> list[Any]:
        return [
            self.pack(value, f"{entry}/{number}") for number, value in enumerate(values)
        ]

    def _factory(self, value: defaultdict[Any, Any], entry: str) -> str | None:
        factory: Any = value.default_factory
        if factory is None:
            return None
        name = getattr(factory, "__name__", repr(factory))
        if FACTORIES.get(name) is not factory:
            names = ", ".join(FACTORIES)
            raise _unpackable(entry, f"a defaultdict of {name}; it can of {names}")
        return name

    def _scalar(self, value: Any, entry: str) -> dict[str, Any]:
        kind = type(value)
        if isinstance(value, Ring):
            return self._ring(value, entry)
        if kind is int:
            return {"int": hex(value)}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind in (bytes, bytearray):
            return {kind.__name__: value.hex()}
        if kind is range:
            return {"range": [value.start, value.stop, value.step]}
        if isinstance(value, PurePath) and kind in (type(Path()), type(PurePath())):
            return {"path": str(value)}
        if kind is torch.dtype:
            return {"dtype": _dtype_name(value)}
        if kind is torch.device:
            return {"device": str(value)}
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value, entry)
        raise _unpackable(entry or "/", _described(value))

    def _array(self, value: Any, entry: str) -> dict[str, Any]:
        if value.dtype.hasobject or value.dtype.fields is not None:
            raise _unpackable(entry, f"an array of type {value.dtype}")
        node = {"shape": list(value.shape), "dtype": value.dtype.str}
        if isinstance(value, np.generic):
            return {"scalar": value.tobytes().hex(), **node}
        content = np.frombuffer(bytearray(value.tobytes()), np.uint8)
        return {"array": self._named(torch.from_numpy(content), entry), **node}

    def _ring(self, value: Ring, entry: str) -> dict[str, Any]:
        if value.written:
            row = value.read(value.first, value.first + 1)
            if row.dtype not in NATIVE:
                raise _unpackable(entry, f"a ring of type {_dtype_name(row.dtype)}")
        name = str(len(self.rings))
        self.rings[name] = value
        node = {"name": name, "capacity": value.capacity, "written": value.written}
        return {"ring": node}

    def _tensor(self, value: Tensor, entry: str) -> dict[str, Any]:
        reason = _unreadable(value)
        if reason:
            raise _unpackable(entry, reason)
        plain = value.detach()
        if type(plain) is not Tensor:
            plain = plain.as_subclass(Tensor)
        if plain.layout is torch.strided:
            return self._strided(plain, entry)
        node: dict[str, Any] = {
            "sparse": str(plain.layout).removeprefix("torch."),
            "size": list(plain.shape),
            "parts": {
                name: self.pack(tensor, f"{entry}/{name}")
                for name, tensor in sparse_parts(plain).items()
            },
        }
        if plain.layout is torch.sparse_coo:
            node["coalesced"] = plain.is_coalesced()
        return node

    def _strided(self, tensor: Tensor, entry: str) -> dict[str, Any]:
        # The stride of a copy, which differs from the default for a tensor that fills its memory in
        # another order of dimensions.
        stride = None
        if not tensor.is_contiguous():
            stride = list(torch.empty_like(tensor, device="meta").stride())
        node: dict[str, Any] = {"tensor": self._named(tensor, entry), "stride": stride}
        if tensor.dtype not in NATIVE:
            node |= {"dtype": _dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        return node

    def _named(self, tensor: Tensor, entry: str) -> str:
        """Returns the name of a tensor in a file.

        Tensors of the same memory have the same name, and are one tensor when they are read.
        """
        memory = (
            tensor.data_ptr(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.device,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        if tensor.numel() and memory in self._names:
            return self._names[memory]
        # A number makes the name unique: keys may have any character, and names only Unicode.
        text = entry.encode("ascii", "backslashreplace").decode()
        name = f"{len(self.tensors)}{text}"[:LONGEST_NAME]
        self.tensors[name] = tensor
        self._names[memory] = name
        return name


def pack(state: State) -> tuple[Any, dict[str, Tensor], dict[str, Ring]]:
    """Converts a state to JSON and named tensors.

    Returns:
        The JSON, in which dictionaries are lists of pairs; and by the names that it refers to, the
            tensors of the state, not copies, and its rings.

    Raises:
        UnpackableError: A checkpoint cannot hold some value.
    """
    packer = Packer()
    return packer.pack(state), packer.tensors, packer.rings


def stored(tensor: Tensor) -> Tensor:
    """Returns a copy of a strided tensor in host memory, as a file contains it.

    It is a tensor of bytes if safetensors does not support its type.
    """
    resolved = tensor.detach().resolve_conj().resolve_neg()
    copy = resolved.to("cpu", copy=True).contiguous()
    if copy.dtype in NATIVE:
        return copy
    return copy.reshape(-1).view(torch.uint8)


def sparse_parts(tensor: Tensor) -> dict[str, Tensor]:
    """Returns the strided tensors that a sparse one is made of."""
    if tensor.layout is torch.sparse_coo:
        # Coalescing would change the tensor that the training adds to.
        return {"indices": tensor._indices(), "values": tensor._values()}
    names = (*COMPRESSED[tensor.layout], "values")
    return {name: getattr(tensor, name)() for name in names}


def _unreadable(tensor: Tensor) -> str:
    """Returns why a tensor cannot be written, or an empty text."""
    kind = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        return _described(tensor)
    if hasattr(kind, "__tensor_flatten__") or tensor.is_nested:
        hint = "keep the plain tensors that it is made of"
        return f"a tensor of type {kind.__name__}; {hint}"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values"
    if tensor.is_quantized:
        return "a quantized tensor; keep its int_repr(), scale and zero point"
    if tensor.layout not in (torch.strided, torch.sparse_coo, *COMPRESSED):
        return f"a tensor of layout {tensor.layout}"
    return ""


def _described(value: Any) -> str:
    bases = [base.__name__ for base in type(value).__mro__]
    hints = [hint for name, hint in _HINTS.items() if name in bases]
    if isinstance(value, dict):
        hints.append("keep dict(...) of it")
    elif isinstance(value, tuple):
        hints.append("keep tuple(...) of it")
    return "; ".join([f"a {type(value).__name__}", *hints[:1]])


def _is_key(value: Any) -> bool:
    """Returns whether JSON has a value as it is, also as a key of a mapping."""
    kind = type(value)
    if kind is int:
        return bool(abs(value) < _LARGEST_JSON_INTEGER)
    return value is None or kind in (bool, str)


def _unpackable(entry: str, description: str) -> UnpackableError:
    return UnpackableError(f"{entry}: a checkpoint cannot hold {description}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
