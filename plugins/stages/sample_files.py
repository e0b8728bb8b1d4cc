"""Samples as bytes: tensors and arrays in safetensors, the rest in JSON, with a checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

_DIGEST_BYTES = 16
_LENGTH_BYTES = 8
_PLAIN = (str, int, float, bool, type(None))


class UncachableError(Exception):
    """Raised for a sample that contains something else than tensors, arrays, numbers and texts."""


def encode_sample(sample: Any) -> bytes:
    """Returns the bytes of a sample.

    Raises:
        UncachableError: It cannot be encoded.
    """
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_described(sample, tensors)).encode()
    content = save(tensors)
    length = len(structure).to_bytes(_LENGTH_BYTES, "big")
    body = length + structure + content
    return _digest(body) + body


def decode_sample(content: bytes) -> Any:
    """Returns the sample that ``encode_sample`` has encoded.

    Raises:
        ValueError: The bytes are not complete.
    """
    body = content[_DIGEST_BYTES:]
    if len(body) < _LENGTH_BYTES or content[:_DIGEST_BYTES] != _digest(body):
        raise ValueError("the checksum is wrong")
    start = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "big")
    return _restored(json.loads(body[_LENGTH_BYTES:start]), load(body[start:]))


def copy_tree(sample: Any) -> Any:
    """Returns a copy of a sample that shares no memory with it, as decoding would.

    Raises:
        UncachableError: It cannot be encoded.
    """
    if type(sample) is Tensor:
        return _checked(sample).clone()
    if type(sample) is np.ndarray:
        return _checked_array(sample).copy()
    return _mapped(sample, copy_tree, "is none of tensors, arrays, numbers and texts")


def sample_bytes(sample: Any) -> int:
    """Returns about the memory of a sample."""
    if isinstance(sample, Tensor | np.ndarray):
        return int(sample.nbytes) + 200
    if isinstance(sample, dict):
        return 200 + sum(map(sample_bytes, sample.values()))
    if isinstance(sample, list | tuple):
        return 100 + sum(map(sample_bytes, sample))
    return 50 + (len(sample) if isinstance(sample, str) else 0)


def _mapped(sample: Any, copy: Callable[[Any], Any], problem: str) -> Any:
    """Returns a container with copies of its values, and other plain values themselves."""
    kind = type(sample)
    if kind is dict and all(type(key) is str for key in sample):
        return {key: copy(value) for key, value in sample.items()}
    if kind is list:
        return [copy(value) for value in sample]
    if kind is tuple:
        return tuple(copy(value) for value in sample)
    if kind in _PLAIN:
        return sample
    raise UncachableError(f"a {kind.__name__} {problem}")


def _described(sample: Any, tensors: dict[str, Tensor]) -> Any:
    """Returns a sample as JSON: its kind and its values; tensors are collected by number."""
    kind = type(sample)
    name = str(len(tensors))
    if kind is Tensor:
        # Tensors that share memory cannot be written together.
        tensors[name] = _checked(sample).clone(memory_format=torch.contiguous_format)
        return ["tensor", name]
    if kind is np.ndarray:
        tensors[name] = torch.from_numpy(_checked_array(sample).copy(order="C"))
        return ["array", name]
    if kind is dict and all(type(key) is str for key in sample):
        return ["dict", {key: _described(value, tensors) for key, value in sample.items()}]
    if kind in (list, tuple):
        return [kind.__name__, [_described(value, tensors) for value in sample]]
    if kind in _PLAIN:
        return ["value", sample]
    raise UncachableError(f"a {kind.__name__} cannot be encoded")


def _restored(described: Any, tensors: dict[str, Tensor]) -> Any:
    kind, value = described
    match kind:
        case "tensor":
            return tensors[value]
        case "array":
            return tensors[value].numpy()
        case "dict":
            return {key: _restored(inner, tensors) for key, inner in value.items()}
        case "list":
            return [_restored(inner, tensors) for inner in value]
        case "tuple":
            return tuple(_restored(inner, tensors) for inner in value)
    return value


def _checked(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or tensor.requires_grad:
        raise UncachableError("a tensor is sparse or needs a gradient")
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        raise UncachableError("a tensor is not in the memory of the host")
    return tensor


def _checked_array(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "biuf" or not array.dtype.isnative:
        raise UncachableError(f"an array is of type {array.dtype}")
    if array.dtype.itemsize > _LENGTH_BYTES:
        raise UncachableError(f"an array is of type {array.dtype}")
    return array


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
