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
"""Types of values that are compared with ``==``."""
_TABLES = frozenset({dict, list, set})
_BUILT_IN = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        tuple,
        frozenset,
        dict,
        list,
        set,
        ModuleType,
    }
)
"""Types of objects that no file creates a class or a function for: most attributes."""
_WITHOUT_PARTIALS = frozenset({"torch.nn.functional", "torch.optim"})
_SHARED_PACKAGES = frozenset({"torch", "numpy", "random", "math", "runner"})
"""Packages whose objects all code of the process uses."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of folders of installed packages."""
# These packages neither train nor compare.
_EXCLUDED = tuple(
    f"runner.{package}."
    for package in ("ablation", "cli", "serve", "study", "tracking")
)
_MODES = "the stack of torch's modes"


def patches(files: Collection[str]) -> Iterator[str]:
    """Yields global objects that were created in one of these plugin files, or in a
    module that one imports from its folder.

    Global objects are attributes of modules and of their classes, hooks for every
    module or optimizer, modes that are still active, and kernels of torch's operators;
    also partial functions in torch.nn.functional and torch.optim, which have no file,
    and constants and default values that differ from their source code, for whatever
    reason.
    """
    plugin = PluginObjects(files)
    for name, module in list(sys.modules.items()):
        is_shared = name.partition(".")[0] in _SHARED_PACKAGES
        if is_shared and getattr(module, "__file__", None) not in plugin.files:
            yield from _patched_attributes(name, module, plugin)
    for mode in _modes():
        if plugin.has(mode):
            yield f"{_MODES} ({type(mode).__name__})"
    yield from _patched_operators(plugin)
    yield from _changed_constants()


def _patched_attributes(
    name: str, module: ModuleType, plugin: PluginObjects
) -> Iterator[str]:
    has = plugin.has
    for attribute, value in list(vars(module).items()):
        if attribute.startswith("_global_") and type(value) in (dict, OrderedDict):
            is_patched = any(map(has, value.values()))
        else:
            is_patched = has(value)
        is_partial = type(value) is partial and name in _WITHOUT_PARTIALS
        if is_partial or is_patched:
            yield f"{name}.{attribute}"
        elif _is_class_of(name, value):
            for member, member_value in list(vars(value).items()):
                if has(member_value):
                    yield f"{name}.{attribute}.{member}"


def _patched_operators(plugin: PluginObjects) -> Iterator[str]:
    for implementation in torch.library._impls:
        if not implementation.startswith("aten/"):
            continue
        _, operator, key = implementation.split("/")
        # Kernels for ``Meta`` compute shapes only.
        if key == "Meta":
            continue
        kernels = torch._C._dispatch_dump(f"aten::{operator}")
        if any(file in kernels for file in plugin.files):
            yield f"torch.ops.aten.{operator}"


def files_of(configs: Iterable[type]) -> set[str]:
    """Returns the files with the code of settings, except those of the runner."""
    modules = {config.__module__ for config in configs}
    return {
        str(sys.modules[module].__file__)
        for module in modules
        if not module.startswith("runner.")
    }


def global_values() -> dict[str, Any]:
    """Returns numbers, texts, tables and functions by name: of the runner's modules,
    torch's functional one, and their classes; and the active modes.
    """
    values: dict[str, Any] = {_MODES: [type(mode) for mode in _modes()]}
    for name, module in list(sys.modules.items()):
        if not _is_compared(name):
            continue
        owners = {name: vars(module)}
        for value in vars(module).values():
            if _is_class_of(name, value):
                owners[f"{name}.{value.__name__}"] = vars(value)
        for owner, attributes in owners.items():
            values |= _comparable_attributes(owner, attributes)
    return values


def _comparable_attributes(owner: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    functions: dict[str, Any] = {}
    for attribute, value in attributes.items():
        if attribute.startswith("__"):
            continue
        name = f"{owner}.{attribute}"
        if type(value) in _PLAIN:
            plain[name] = value
        elif type(value) in _TABLES and attribute.isupper():
            # The table itself would change with its content.
            tables[name] = repr(value)
        elif type(value) is FunctionType:
            functions[name] = value, value.__code__, _defaults(value)
    return plain | tables | functions


class PluginObjects:
    """Recognises objects that were created in the given files, or in modules that they
    name and that are in their folders.

    Args:
        files: Plugin files.

    Attributes:
        files: These files and those of the modules.
    """

    def __init__(self, files: Collection[str]) -> None:
        folders = {Path(file).resolve().parent for file in files}
        # Installed modules are excluded.
        self._folders = {folder for folder in folders if folder.name not in _INSTALLED}
        self.files = {*files}
        self._modules = set[str]()
        remaining = [
            name
            for name, module in list(sys.modules.items())
            if getattr(module, "__file__", None) in files
        ]
        while remaining:
            name = remaining.pop()
            file = getattr(sys.modules.get(name), "__file__", None)
            if name in self._modules or not isinstance(file, str):
                continue
            if file in files or self._is_in_folders(name, file):
                module = sys.modules[name]
                self._modules.add(name)
                self.files.add(file)
                remaining += map(_module_of, list(vars(module).values()))
                remaining += _imports(file, module.__package__ or "")

    def _is_in_folders(self, name: str, file: str) -> bool:
        if name.partition(".")[0] in _SHARED_PACKAGES:
            return False
        for folder in self._folders:
            if file.startswith(f"{folder}{os.sep}"):
                # A virtual environment may be in the folder.
                path = Path(file.removeprefix(str(folder)))
                if _INSTALLED.isdisjoint(path.parts):
                    return True
        return False

    def has(self, value: Any) -> bool:
        """Returns whether a value is a function, a class, or an instance of a
        class from these files.
        """
        # ``isinstance`` would call objects that warn, or look for a GPU.
        kind = type(value)
        # These two are most of the attributes of modules and classes.
        if kind is FunctionType:
            return value.__code__.co_filename in self.files
        if kind in _BUILT_IN:
            return False
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


def _module_of(value: Any) -> str:
    if type(value) is ModuleType:
        return value.__name__
    name: str = getattr(value, "__module__", "")
    return name


@cache
def _imports(file: str, package: str) -> list[str]:
    """Returns the modules that a source imports: some only inside a function, where the
    module has no name for them.
    """
    if not file.endswith(".py"):
        return []
    names: list[str] = []
    for node in ast.walk(ast.parse(Path(file).read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents: list[str] = []
            if node.level:
                depth = package.count(".") + 2 - node.level
                parents = package.split(".")[:depth]
            module = ".".join([*parents, *filter(None, [node.module])])
            # An imported name may be a module, too.
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return names


def _modes() -> list[Any]:
    functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [*functions, *_get_current_dispatch_mode_stack()]


def _is_compared(module: str) -> bool:
    name = f"{module}."
    is_included = name.startswith(("runner.", "torch.nn.functional."))
    return is_included and not name.startswith(_EXCLUDED)


def _is_class_of(module: str, value: Any) -> bool:
    return issubclass(type(value), type) and value.__module__ == module


def _changed_constants() -> Iterator[str]:
    """Yields constants of the runner's modules and torch's functional one, and defaults
    of their functions, that differ from the source code.

    The change may have happened early: when a plugin's file was imported.
    """
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not _is_compared(name) or file is None:
            continue
        for attribute, literals in _literals(file).items():
            value = vars(module).get(attribute)
            if type(value) is FunctionType and value.__code__.co_filename == file:
                # Only literals can be compared.
                pairs = zip(literals, _defaults(value), strict=False)
                if any(literal not in (None, default) for literal, default in pairs):
                    yield f"{name}.{attribute}.__defaults__"
            elif type(value) in _PLAIN and literals != [repr(value)]:
                yield f"{name}.{attribute}"


@cache
def _literals(file: str) -> dict[str, list[str | None]]:
    """Returns constants and default values of functions in a module's source, as texts;
    of names that it assigns once.
    """
    tree = ast.parse(Path(file).read_bytes())
    assignments = _assigned_names(tree)
    assignments.update(
        node.name for node in tree.body if isinstance(node, ast.FunctionDef)
    )
    literals: dict[str, list[str | None]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            keywords = filter(None, node.args.kw_defaults)
            defaults = [*node.args.defaults, *keywords]
            literals[node.name] = [_literal(default) for default in defaults]
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            literal = _literal(node.value)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if literal and isinstance(target, ast.Name):
                    literals[target.id] = [literal]
    return {name: texts for name, texts in literals.items() if assignments[name] == 1}


def _assigned_names(tree: ast.Module) -> Counter[str]:
    """Counts the assignments to every name, also those inside of functions."""
    names = Counter[str]()
    remaining: list[Any] = [tree]
    # ``ast.walk`` makes two generators for each of hundreds of thousands of nodes.
    while remaining:
        node = remaining.pop()
        if isinstance(node, ast.Name):
            if type(node.ctx) is ast.Store:
                names[node.id] += 1
        elif isinstance(node, ast.AST):
            for value in vars(node).values():
                if type(value) is list:
                    remaining += value
                elif isinstance(value, ast.AST):
                    remaining.append(value)
    return names


def _literal(node: ast.expr) -> str | None:
    try:
        return repr(ast.literal_eval(node))
    except ValueError:
        return None


def _defaults(function: FunctionType) -> list[str]:
    positional = function.__defaults__ or ()
    keywords = function.__kwdefaults__ or {}
    return [_identified(default) for default in (*positional, *keywords.values())]


def _identified(default: Any) -> str:
    """Returns a text that differs if a default is another one."""
    if type(default).__module__ == "builtins":
        return repr(default)
    # Others, such as the variables of the environment, may change by themselves.
    return f"{type(default).__name__} {id(default)}"


def changed_values(earlier: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of global values that differ from earlier ones."""
    current = global_values()
    for name, value in earlier.items():
        if current.get(name, MISSING) != value:
            yield name
