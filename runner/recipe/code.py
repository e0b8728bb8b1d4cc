"""The code behind a run, as digests that do not depend on where or how it is installed."""

import hashlib
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import runner

_OWN = "runner"
_ELSEWHERE = ("plugins", "recipes")
"""Folders that only an installed package holds; in a checkout they lie beside it."""


def code_digests(faces: Iterable[type]) -> dict[str, str]:
    """SHA-256 of the Python sources that take part in a run; imports none of them.

    Args:
        faces: the classes of the plugins in use.

    Returns:
        By package: ``runner`` with the plugins that ship, and for every other plugin the package that its face is
        defined in; by file name where the face stands in a single file.
    """
    sources = {_OWN: _own_sources()}
    for name in sorted({face.__module__ for face in faces}):
        module = _outermost(name)
        if module.__name__ != _OWN:
            sources.setdefault(_title(module), {}).update(_sources_of(module))
    return {name: _digest(files) for name, files in sources.items()}


def _own_sources() -> dict[str, Path]:
    core = _below(Path(str(runner.__file__)).parent)
    core = {name: path for name, path in core.items() if name.split("/")[0] not in _ELSEWHERE}
    shipped = find_spec(f"{_OWN}.plugins")
    assert shipped is not None  # one distribution installs both
    assert shipped.submodule_search_locations
    return core | {
        f"plugins/{name}": path for name, path in _below(Path(shipped.submodule_search_locations[0])).items()
    }


def _outermost(name: str) -> ModuleType:
    """The outermost package around a module that is not a mere namespace; the module itself if it is in none."""
    parts = name.split(".")
    around = [sys.modules[".".join(parts[:depth])] for depth in range(1, len(parts) + 1)]
    return next((module for module in around if _file(module)), around[-1])


def _file(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or ""


def _title(module: ModuleType) -> str:
    return module.__name__ if hasattr(module, "__path__") else Path(_file(module)).name or module.__name__


def _sources_of(module: ModuleType) -> dict[str, Path]:
    if hasattr(module, "__path__"):
        return {name: path for folder in module.__path__ for name, path in _below(Path(folder)).items()}
    path = Path(_file(module))
    return {path.name: path} if path.is_file() else {}


def _below(folder: Path) -> dict[str, Path]:
    """The Python files in a folder that can be imported, by their path from there."""
    found = {path.relative_to(folder): path for path in folder.rglob("*.py")}
    return {name.as_posix(): path for name, path in found.items() if _is_importable(name) and path.is_file()}


def _is_importable(path: Path) -> bool:
    """An editor's backup or lock (``.#loop.py``) is not."""
    return all(part.isidentifier() for part in path.with_suffix("").parts)


def _digest(files: dict[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
