"""A second copy of a package in which one module has other code."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any


class _Changed(MetaPathFinder, Loader):
    def __init__(self, module: str, code: CodeType) -> None:
        self.module, self.code = module, code

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Of the one module."""
        return ModuleSpec(name, self) if name == self.module else None

    def exec_module(self, module: ModuleType) -> None:
        """Runs the other code."""
        exec(self.code, vars(module))


def classes_of_copy(package: str, module: str, code: CodeType) -> dict[type, type]:
    """Imports what is imported of a package once more, and leaves no trace of it.

    Returns:
        Its classes by those of the first copy.
    """
    parent, _, name = package.rpartition(".")
    first = {each: sys.modules.pop(each) for each in list(sys.modules) if f"{each}.".startswith(f"{package}.")}
    finder = _Changed(module, code)
    sys.meta_path.insert(0, finder)
    try:
        copies = {each: importlib.import_module(each) for each in first}
    finally:
        sys.meta_path.remove(finder)
        for each in [each for each in sys.modules if f"{each}.".startswith(f"{package}.")]:
            del sys.modules[each]
        sys.modules.update(first)
        setattr(sys.modules[parent], name, first[package])
    found = {}
    for each, original in first.items():
        for own, value in vars(original).items():
            if isinstance(value, type) and value.__module__ == each and "__dict__" in dir(value):
                found[value] = vars(copies[each])[own]
    return found
