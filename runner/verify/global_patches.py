"""Finds changes of a stage to global objects of the process."""

from __future__ import annotations

import ast
import os
import sys
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from runner.proof.difference import MISSING

_PLAIN = frozenset({bool, int, float, str, tuple, frozenset, partial})
_TABLES = frozenset({dict, list, set})
_WITHOUT_PARTIALS = frozenset({"torch.nn.functional", "torch.optim"})
_EVERYBODYS = frozenset({"torch", "numpy", "random", "math", "runner"})
_INSTALLED = frozenset(
    {"site-packages", "dist-packages"}
)  # folders of installed packages
_NO_PART = tuple(
    f"runner.{room}." for room in ("ablation", "cli", "serve", "study", "tracking")
)
"""Rooms that neither train nor compare."""
_MODES = "the stack of torch's modes"


def patches(files: Collection[str]) -> Iterator[str]:
    """Yields global objects that were created in one of these plugin files, or in a module that one
    imports from its folder.

    Global objects are attributes of modules and of their classes, hooks for every module or
    optimizer, modes that are still active, and kernels of torch's operators; also partial functions
    in torch.nn.functional and torch.optim, which have no file, and constants and default values
    that differ from their source code, for whatever reason.
    """
    made = Made(files)
    for name, module in list(sys.modules.items()):
        if (
            name.partition(".")[0] not in _EVERYBODYS
            or getattr(module, "__file__", None) in made.files
        ):
            continue
        for attribute, value in list(vars(module).items()):
            hooks = (
                value.values()
                if attribute.startswith("_global_")
                and type(value) in (dict, OrderedDict)
                else ()
            )
            if any(map(made.has, (value, *hooks))) or (
                type(value) is partial and name in _WITHOUT_PARTIALS
            ):
                yield f"{name}.{attribute}"
            elif _is_class_of(name, value):
                yield from (
                    f"{name}.{attribute}.{own}"
                    for own, each in list(vars(value).items())
                    if made.has(each)
                )
    yield from (
        f"{_MODES} ({type(mode).__name__})" for mode in _modes() if made.has(mode)
    )
    for operator, key in (
        each.split("/")[1:] for each in torch.library._impls if each.startswith("aten/")
    ):
        if key != "Meta" and any(
            file in torch._C._dispatch_dump(f"aten::{operator}") for file in made.files
        ):
            yield f"torch.ops.aten.{operator}"
    yield from _unlike_their_source()


def files_of(faces: Iterable[type]) -> set[str]:
    """Returns the files with the code of settings, except those of the runner."""
    modules = {
        each.__module__ for each in faces if not each.__module__.startswith("runner.")
    }
    return {str(sys.modules[each].__file__) for each in modules}


def belongings() -> dict[str, Any]:
    """Numbers, texts, tables and functions by name: of the runner's modules, torch's functional one, and their classes.

    The modes that are on, too.
    """
    found: dict[str, Any] = {_MODES: [type(mode) for mode in _modes()]}
    for name, module in list(sys.modules.items()):
        if not _is_looked_into(name):
            continue
        inside = {name: vars(module)}
        inside |= {
            f"{name}.{each.__name__}": vars(each)
            for each in vars(module).values()
            if _is_class_of(name, each)
        }
        for owner, values in inside.items():
            plain = [(own, value) for own, value in values.items() if own[:2] != "__"]
            found |= {
                f"{owner}.{own}": value for own, value in plain if type(value) in _PLAIN
            }
            tables = (
                (own, value)
                for own, value in plain
                if type(value) in _TABLES and own.isupper()
            )
            found |= {f"{owner}.{own}": repr(value) for own, value in tables}
            functions = (
                (own, value) for own, value in plain if type(value) is FunctionType
            )
            found |= {
                f"{owner}.{own}": (value, value.__code__, _defaults(value))
                for own, value in functions
            }
    return found


class Made:
    """Recognises objects that were created in the given files, or in modules that they name and
    that are in their folders.
    """

    def __init__(self, files: Collection[str]) -> None:
        folders = {Path(file).resolve().parent for file in files}
        # Installed modules are excluded.
        self._folders = {folder for folder in folders if folder.name not in _INSTALLED}
        self.files, self._modules = {*files}, set[str]()
        found = [
            name
            for name, module in list(sys.modules.items())
            if getattr(module, "__file__", None) in files
        ]
        while found:
            name = found.pop()
            file = getattr(sys.modules.get(name), "__file__", None)
            if (
                name not in self._modules
                and isinstance(file, str)
                and (file in files or self._is_beside(name, file))
            ):
                self._modules.add(name)
                self.files.add(file)
                named = list(vars(sys.modules[name]).values())
                found += [
                    each.__name__
                    if type(each) is ModuleType
                    else getattr(each, "__module__", "")
                    for each in named
                ]
                found += _imports(file, sys.modules[name].__package__ or "")

    def _is_beside(self, name: str, file: str) -> bool:
        inside = (
            Path(file[len(f"{each}") :]).parts
            for each in self._folders
            if file.startswith(f"{each}{os.sep}")
        )
        return name.partition(".")[0] not in _EVERYBODYS and any(
            map(_INSTALLED.isdisjoint, inside)
        )

    def has(self, value: Any) -> bool:
        """Returns whether a value is a function, a class, or an instance of a
        class from these files.
        """
        kind = type(
            value
        )  # not ``isinstance``, which calls objects that warn, or look for a GPU
        if issubclass(kind, type):
            return value.__module__ in self._modules
        if kind is partial:
            value = value.func
        elif kind is property:
            value = value.fget
        elif kind in (classmethod, staticmethod, MethodType):
            value = value.__func__
        if type(value) is FunctionType:
            return value.__code__.co_filename in self.files
        return kind.__module__ in self._modules


@cache
def _imports(file: str, package: str) -> list[str]:
    """The modules that a source imports: some only inside a function, where the module has no name for them."""
    found: list[str] = []
    for node in (
        ast.walk(ast.parse(Path(file).read_bytes())) if file.endswith(".py") else ()
    ):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = (
                package.split(".")[: package.count(".") + 2 - node.level]
                if node.level
                else []
            )
            module = ".".join([*above, *filter(None, [node.module])])
            found += [module, *(f"{module}.{each.name}" for each in node.names)]
    return found


def _modes() -> list[Any]:
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]  # type: ignore[no-untyped-call]


def _is_looked_into(module: str) -> bool:
    name = f"{module}."
    return name.startswith(("runner.", "torch.nn.functional.")) and not name.startswith(
        _NO_PART
    )


def _is_class_of(module: str, value: Any) -> bool:
    return issubclass(type(value), type) and value.__module__ == module


def _unlike_their_source() -> Iterator[str]:
    """Constants of the runner's modules and torch's functional one, and their functions' defaults, that were changed.

    The change may have happened early: when a plugin's file was imported.
    """
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not _is_looked_into(name) or file is None:
            continue
        for attribute, written in _literals(file).items():
            value = vars(module).get(attribute)
            if type(value) is FunctionType and value.__code__.co_filename == file:
                pairs = zip(written, _defaults(value), strict=False)
                if any(own is not None and own != other for own, other in pairs):
                    yield f"{name}.{attribute}.__defaults__"
            elif type(value) in _PLAIN and written != [repr(value)]:
                yield f"{name}.{attribute}"


@cache
def _literals(file: str) -> dict[str, list[str | None]]:
    """Returns constants and default values of functions in a module's source, as texts; of names
    that it assigns once.
    """
    tree = ast.parse(Path(file).read_bytes())
    stored = Counter(
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and type(node.ctx) is ast.Store
    )
    stored.update(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
    found: dict[str, list[str | None]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            found[node.name] = [
                _literal(each)
                for each in (*node.args.defaults, *filter(None, node.args.kw_defaults))
            ]
        elif (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and node.value is not None
            and _literal(node.value)
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {
                each.id: [_literal(node.value)]
                for each in targets
                if isinstance(each, ast.Name)
            }
    return {name: written for name, written in found.items() if stored[name] == 1}


def _literal(node: ast.expr) -> str | None:
    try:
        return repr(ast.literal_eval(node))
    except ValueError:
        return None


def _defaults(function: FunctionType) -> list[str]:
    return [
        repr(each)
        for each in (
            *(function.__defaults__ or ()),
            *(function.__kwdefaults__ or {}).values(),
        )
    ]


def changed_since(before: Mapping[str, Any]) -> Iterator[str]:
    """The belongings of this process that are not what they were."""
    now = belongings()
    return (name for name, value in before.items() if now.get(name, MISSING) != value)
