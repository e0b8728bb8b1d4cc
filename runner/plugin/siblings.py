"""Imports of modules in a plugin file's folder, also if two folders have modules of the same
name.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_PREFIX = "runner_folder_"
"""Beginning of the names of the packages that contain the modules of later folders."""


class Folders:
    """The folders of plugin files: modules of the first are imported as usual, those of a later one
    may be private.

    A module is private if an earlier folder has one of the same name. Every plugin file
    imports the module in its folder, at import and later; modules that are in none of
    the folders are imported as usual.
    """

    def __init__(self) -> None:
        self._folders: list[Path] = []

    def paths(self) -> tuple[Path, ...]:
        """Returns the folders, in the order in which they were added."""
        return tuple(self._folders)

    def add(self, folder: Path) -> None:
        """Makes the modules of a folder importable, after everything that is importable already."""
        if folder not in self._folders:
            self._folders.append(folder)
            if not any(isinstance(finder, _PrivateFinder) for finder in sys.meta_path):
                sys.meta_path.insert(0, _PrivateFinder())
        if str(folder) not in sys.path:
            sys.path.append(str(folder))

    def prepare(self, module: ModuleType, folder: Path) -> None:
        """Prepares a module before its execution to import modules in a folder."""
        if self._folders and folder != self._folders[0]:
            importer = _Importer(self, folder)
            vars(module)["__builtins__"] = {**vars(builtins), "__import__": importer}

    def private_name(self, name: str, folder: Path) -> str | None:
        """Returns the name in ``sys.modules`` of a top-level module in a plugin file's folder, or
        None if it is not private.
        """
        if folder not in self._folders or not _contains(folder, name):
            return None
        earlier = self._folders[: self._folders.index(folder)]
        if not any(_contains(path, name) for path in earlier):
            return None
        # A random.py in a plugin file's folder shadows nothing.
        if name in sys.builtin_module_names:
            return None
        folders = {str(path) for path in self._folders}
        system_path = [entry for entry in sys.path if entry not in folders]
        if PathFinder.find_spec(name, system_path) is not None:
            return None
        return f"{_package(folder).__name__}.{name}"


FOLDERS = Folders()
"""The folders of this process."""


class _Importer:
    """The ``__import__`` of modules in a folder that is not the first."""

    def __init__(self, folders: Folders, folder: Path) -> None:
        self._folders = folders
        self._folder = folder

    def __call__(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002
        locals: Mapping[str, Any] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Imports as the statement does."""
        top, _, submodule = name.partition(".")
        private = None if level else self._folders.private_name(top, self._folder)
        if private is None:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        dotted = f"{private}.{submodule}" if submodule else private
        if fromlist:
            return builtins.__import__(dotted, globals, locals, fromlist)
        # ``import a.b`` binds the package a.
        importlib.import_module(dotted)
        return sys.modules[private]


class _PrivateFinder(MetaPathFinder):
    """Finds modules of the private packages, and prepares them to import modules of
    their folder, too.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Returns the specification of a private module."""
        if not fullname.startswith(_PREFIX) or path is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        package = sys.modules[fullname.partition(".")[0]]
        if spec is not None and spec.loader is not None:
            spec.loader = _PrivateLoader(spec.loader, Path(package.__path__[0]))
        return spec


class _PrivateLoader(Loader):
    """Executes a module that can import what is in the folder of its package."""

    def __init__(self, loader: Loader, folder: Path) -> None:
        self._loader = loader
        self._folder = folder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Creates the module as usual."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module."""
        FOLDERS.prepare(module, self._folder)
        self._loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:
        # Tracebacks call get_source and similar methods.
        return getattr(self._loader, name)


def _package(folder: Path) -> ModuleType:
    """Returns the package with the private modules of a folder."""
    name = _PREFIX + hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return sys.modules[name]


def _contains(folder: Path, name: str) -> bool:
    """Returns whether a folder has a module or a package of a name."""
    files = (folder / f"{name}.py", folder / name / "__init__.py")
    return any(file.is_file() for file in files)
