"""What a stage has put into places that belong to everybody."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

_PLAIN = frozenset({bool, int, float, str, tuple, frozenset, FunctionType, partial})
_WITHOUT_PARTIALS = frozenset({"torch.nn.functional", "torch.optim"})
_EVERYBODYS = frozenset({"torch", "numpy", "random", "math", "runner"})


def patches(files: Collection[str]) -> Iterator[str]:
    """The attributes of modules, and of their classes, that were made in one of these files of plugins.

    Partial functions in torch.nn.functional and torch.optim, too, which have none of their own.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _EVERYBODYS or getattr(module, "__file__", None) in files:
            continue
        for attribute, value in list(vars(module).items()):
            if _is_made_in(value, files) or (type(value) is partial and name in _WITHOUT_PARTIALS):
                yield f"{name}.{attribute}"
            elif _is_class_of(name, value):
                made = (own for own, method in list(vars(value).items()) if _is_made_in(method, files))
                yield from (f"{name}.{attribute}.{own}" for own in made)


def belongings() -> dict[str, Any]:
    """Numbers, texts and functions by name: of the runner's modules, torch's functional one, and their classes."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if not f"{name}.".startswith(("runner.", "torch.nn.functional.")):
            continue
        inside = {name: vars(module)}
        inside |= {f"{name}.{each.__name__}": vars(each) for each in vars(module).values() if _is_class_of(name, each)}
        for owner, values in inside.items():
            plain = ((own, value) for own, value in values.items() if type(value) in _PLAIN and own[:2] != "__")
            found |= {f"{owner}.{own}": value for own, value in plain}
    return found


def _is_class_of(module: str, value: Any) -> bool:
    return issubclass(type(value), type) and value.__module__ == module


def _is_made_in(value: Any, files: Collection[str]) -> bool:
    kind = type(value)  # not ``isinstance``, which asks objects that warn, or look for a GPU
    if issubclass(kind, type):
        return getattr(sys.modules.get(value.__module__), "__file__", None) in files
    if kind is partial:
        value = value.func
    elif kind is property:
        value = value.fget
    elif kind in (classmethod, staticmethod, MethodType):
        value = value.__func__
    return type(value) is FunctionType and value.__code__.co_filename in files
