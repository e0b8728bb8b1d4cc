"""The code behind a run, as digests that do not depend on where or how it is installed."""

import ast
import hashlib
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

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
    own, shipped = _files(find_spec(_OWN)), _files(find_spec(f"{_OWN}.plugins"))
    own = {name: path for name, path in own.items() if name.split("/")[0] not in _ELSEWHERE}
    sources = {_OWN: own | {f"plugins/{name}": path for name, path in shipped.items()}}
    seen = set(sources[_OWN].values())
    names = sorted({face.__module__ for face in faces if face.__module__.split(".")[0] != _OWN})
    queue = [(name, _outermost(name)) for name in names]
    for name, spec in queue:  # which grows by what is imported
        files = {each: path for each, path in _files(spec).items() if path not in seen}
        if spec is not None and spec.origin is not None:
            name = spec.name if spec.submodule_search_locations else Path(spec.origin).name
        sources.setdefault(name, {}).update(files)
        seen.update(files.values())
        queue += [(each, spec) for path in files.values() for each in _imports(path) if (spec := _outside(each))]
    return {name: _digest(files) for name, files in sources.items()}


def _files(spec: ModuleSpec | None) -> dict[str, Path]:
    """The Python files of a package that can be imported, by their path in it; or the file that a module is."""
    if spec is None or spec.origin is None:
        return {}
    if not spec.submodule_search_locations:
        path = Path(spec.origin)
        return {path.name: path} if path.is_file() else {}
    files = {}
    for folder in spec.submodule_search_locations:
        for path in Path(folder).rglob("*.py"):
            name = path.relative_to(folder)
            # An editor's backup or lock (``.#loop.py``) cannot.
            if path.is_file() and all(part.isidentifier() for part in name.with_suffix("").parts):
                files[name.as_posix()] = path
    return files


def _imports(path: Path) -> list[str]:
    """Absolute names of all that a file says it imports, also inside functions; sorted."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):  # templates and the like; what is imported in truth has been parsed by Python
        return []
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return sorted(found)


def _outside(name: str) -> ModuleSpec | None:
    """As ``_outermost``; None for what ships with the runner or with Python, or a distribution has installed."""
    if name.split(".")[0] in (_OWN, *sys.stdlib_module_names):
        return None
    spec = _outermost(name)
    path = Path(spec.origin or "") if spec is not None else Path()
    return spec if path.suffix == ".py" and not _INSTALLED & set(path.parts) else None


def _outermost(name: str) -> ModuleSpec | None:
    """The outermost package or module around a name that is not a mere namespace; None if there is none."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        try:
            spec = find_spec(".".join(parts[:depth]))  # above it are namespaces alone, which run no code
        except (ImportError, ValueError):
            return None
        if spec is None or spec.origin is not None:
            return spec
    return None


def _digest(files: dict[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
