"""The code behind a run, as digests that do not depend on where or how it is installed."""

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import runner

_OWN = "runner"
_ELSEWHERE = ("plugins", "recipes")
"""Folders that only an installed package holds; in a checkout they lie beside it."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of what distributions have installed, in whichever environment."""


def code_digests(faces: Iterable[type]) -> dict[str, str]:
    """SHA-256 of the Python sources that take part in a run; imports none of them.

    Args:
        faces: the classes of the plugins in use.

    Returns:
        By package: ``runner`` with the plugins that ship, for every other plugin the package that its face is defined
        in, and what these import from outside of installed packages, whose versions a lock has; by file name where that
        is a single file.
    """
    sources = {_OWN: _own_sources()}
    for name in sorted({face.__module__ for face in faces}):
        module = _outermost(name)
        if module.__name__ != _OWN:
            sources.setdefault(_title(module), {}).update(_sources_of(module))
    _add_imported(sources)
    return {name: _digest(files) for name, files in sources.items()}


def _add_imported(sources: dict[str, dict[str, Path]]) -> None:
    """Adds what plugins import from outside of installed packages, and what that imports."""
    seen = {path for files in sources.values() for path in files.values()}
    queue = [path for name, files in sources.items() if name != _OWN for path in files.values()]
    while queue:
        for name in sorted(_imports(queue.pop())):
            spec = _outside(name)
            if spec is None or spec.origin is None:
                continue
            origin = Path(spec.origin)
            folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
            files = {each: path for folder in folders for each, path in _below(folder).items()} or {origin.name: origin}
            new = {each: path for each, path in files.items() if path not in seen}
            sources.setdefault(spec.name if folders else origin.name, {}).update(new)
            seen.update(new.values())
            queue += new.values()


def _imports(path: Path) -> Iterator[str]:
    """Absolute names of all that a file says it imports, also inside functions."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # templates and the like; what is imported in truth has been parsed by Python
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _outside(name: str) -> ModuleSpec | None:
    """The outermost package or module of that name which is not a mere namespace, if no distribution installed it."""
    parts = name.split(".")
    if parts[0] == _OWN or parts[0] in sys.stdlib_module_names:
        return None
    for depth in range(1, len(parts) + 1):
        try:
            spec = find_spec(".".join(parts[:depth]))  # above it are namespaces alone, which run no code
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        if spec.origin is not None:
            path = Path(spec.origin)
            return None if path.suffix != ".py" or _INSTALLED & set(path.parts) else spec
    return None


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
