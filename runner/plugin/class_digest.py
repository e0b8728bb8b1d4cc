"""Digest of the classes of a notebook or an interpreter, which have no file."""

import hashlib
from collections.abc import Iterator
from types import CodeType
from typing import Any

_PLAIN = (str, int, float, bool, tuple, type(None))
_OF_DEFINITION = {"__doc__", "__firstlineno__", "__static_attributes__"}
"""Attributes that depend on comments and positions."""


def digest_classes(*classes: type[Any]) -> str:
    """Returns the SHA-256 of classes, and of their bases in the same module.

    Compiled code is compared instead of the source: a cell that is executed twice
    has no newest text, and comments change nothing. Functions and values that the
    classes use from outside are not part of it.
    """
    lines: list[str] = []
    for cls in classes:
        for base in cls.__mro__:
            if base.__module__ == cls.__module__:
                lines += [base.__qualname__, *_lines_of(base)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _lines_of(cls: type[Any]) -> Iterator[str]:
    for name, field in getattr(cls, "model_fields", {}).items():
        yield f"{name}: {field.annotation} = {field.default!r}"
    for name, value in vars(cls).items():
        functions = [value, getattr(value, "__func__", None)]
        # A property consists of functions.
        functions += [getattr(value, part, None) for part in ("fget", "fset", "func")]
        for function in functions:
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType):
                yield f"{name}: {_describe_code(code)}"
        # What pydantic notes about a class changes when it is first used.
        if name in _OF_DEFINITION or name.startswith("__pydantic"):
            continue
        if isinstance(value, _PLAIN):
            yield f"{name} = {value!r}"


def _describe_code(code: CodeType) -> str:
    """Returns all of a function that its result depends on."""
    constants = [_describe_constant(constant) for constant in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars)
    return f"{code.co_code.hex()} {names} {constants}"


def _describe_constant(constant: Any) -> str:
    if isinstance(constant, CodeType):
        return _describe_code(constant)
    # The order of a set of text differs between processes.
    if isinstance(constant, frozenset):
        return str(sorted(map(repr, constant)))
    return repr(constant)
