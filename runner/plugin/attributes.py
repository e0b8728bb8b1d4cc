"""Attributes of objects, read without a call of the objects' code."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from types import MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor

_WITHOUT_PARTS = (
    bool | int | float | complex | str | bytes | bytearray | range | type | ModuleType
)


def has_parts(value: Any) -> bool:
    """Returns whether an object may contain others."""
    return value is not None and not isinstance(
        value, _WITHOUT_PARTS | Tensor | np.ndarray | np.generic
    )


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes that an object holds itself, in the order in which they were set.

    Neither properties nor ``__getattr__`` are called.
    """
    attributes: dict[str, Any] = {}
    # A proxy may forward the access to an attribute to another object.
    with suppress(AttributeError, TypeError):
        instance = object.__getattribute__(value, "__dict__")
        if isinstance(instance, Mapping):
            attributes.update(instance)
    # mypy takes a class of any type for an unhashable object.
    cls: Any = type(value)
    for name, member in _slots(cls):
        # A slot may be empty.
        with suppress(AttributeError, TypeError):
            attributes.setdefault(name, member.__get__(value))
    return attributes


@cache
def _slots(cls: Any) -> list[tuple[str, MemberDescriptorType]]:
    return [
        (name, member)
        for base in cls.__mro__
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    ]
