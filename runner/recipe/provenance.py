"""The code, the commit and the packages with which a run computes."""

import ast
import hashlib
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from email.parser import HeaderParser
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import runner
from runner.plugin.siblings import FOLDERS
from runner.plugin.static_checks import split_name
from runner.recipe.repository import GitError, open_repository

_PACKAGE = "runner"
_DISTRIBUTION = "proven-runner"
# Folders of an installed package; in a checkout they are next to it.
_ELSEWHERE = ("plugins", "recipes")
# Folders of distributions, in whichever environment.
_INSTALLED = frozenset({"site-packages", "dist-packages"})
# Excluded from a patch even if they are tracked:
_SECRETS = (
    ".env*",
    "*.pem",
    "*.key",
    "id_*",
    ".netrc",
    ".pypirc",
    "*credential*",
    "*secret*",
)
_COMPUTES = ("torch", "numpy")
# Packages of these extras are tools; those of others compute, so that results depend on them.
_TOOL_EXTRAS = frozenset({"nvidia", "plots", "serve", "wandb"})
# No run uses the packages of these extras.
_DEVELOPMENT = frozenset(
    {"dev", "docs", "lint", "reference", "test", "testing", "tests"}
)


def code_digests(faces: Iterable[type]) -> dict[str, str]:
    """SHA-256 of the Python sources that take part in a run with these classes of plugins; imports
    none of them.

    They do not depend on where or how it is installed. By package: ``runner`` with the plugins that
    ship, for every other plugin the package that its face is defined in, and what these import from
    outside of installed packages, whose versions a lock has; by file name where that is a single
    file.
    """
    sources = _sources(faces)
    plugin_digests = {
        name: _digest(files) for name, files in sources.items() if name != _PACKAGE
    }
    return {_PACKAGE: _runner_digest(), **plugin_digests}


def plugin_sources(faces: Iterable[type], plugin_files: Iterable[Path]) -> list[Path]:
    """Returns plugin files and the sources that they import from their folders, sorted."""
    paths = {path.absolute() for path in plugin_files}
    folders = {path.resolve().parent for path in paths}
    sources = _sources(faces)
    del sources[_PACKAGE]
    imported = {path.resolve() for files in sources.values() for path in files.values()}
    imported -= {path.resolve() for path in paths}
    paths |= {
        path
        for path in imported
        if any(path.is_relative_to(folder) for folder in folders)
    }
    return sorted(paths)


def _sources(faces: Iterable[type]) -> dict[str, dict[str, Path]]:
    """Returns the files of ``code_digests``, by package and by name in it."""
    sources = {_PACKAGE: dict(_runner_files())}
    visited = set(sources[_PACKAGE].values())
    modules = sorted(
        {face.__module__ for face in faces if face.__module__.split(".")[0] != _PACKAGE}
    )
    queue = [(name, _outermost(name)) for name in modules]
    # The queue grows by the imports of the files.
    for name, spec in queue:
        files = {
            file_name: path
            for file_name, path in _files(spec).items()
            if path not in visited
        }
        package = _package_name(name, spec, files, sources)
        sources.setdefault(package, {}).update(files)
        visited.update(files.values())
        for path in files.values():
            for imported in _imports(path):
                imported_spec = _outside(imported, path)
                if imported_spec is not None:
                    queue.append((imported, imported_spec))
    return sources


def _package_name(
    module: str,
    spec: ModuleSpec | None,
    files: dict[str, Path],
    sources: dict[str, dict[str, Path]],
) -> str:
    """Returns the name under which files are listed: of their package, or of the single file."""
    if spec is None or spec.origin is None:
        return module
    path = Path(spec.origin)
    name = spec.name if spec.submodule_search_locations else path.name
    # Plugin files in two folders, and what they import, may have one name.
    if files.keys() & sources.get(name, {}).keys():
        return f"{path.parent.name}/{name}"
    return name


# Imported code does not change with its files, so the digest is computed once.
@cache
def _runner_digest() -> str:
    """Returns the digest of the runner and the plugins that ship."""
    return _digest(_runner_files())


@cache
def _runner_files() -> dict[str, Path]:
    """Returns the files of the runner and of the plugins that ship, by name."""
    package = _files(find_spec(_PACKAGE))
    plugins = _files(find_spec(f"{_PACKAGE}.plugins"))
    files = {
        name: path
        for name, path in package.items()
        if name.split("/")[0] not in _ELSEWHERE
    }
    return files | {f"plugins/{name}": path for name, path in plugins.items()}


def _files(spec: ModuleSpec | None) -> dict[str, Path]:
    """The Python files of a package that can be imported, by their path in it; or the file that a
    module is.
    """
    if spec is None or spec.origin is None:
        return {}
    if not spec.submodule_search_locations:
        path = Path(spec.origin)
        return {path.name: path} if path.is_file() else {}
    files: dict[str, Path] = {}
    for folder in spec.submodule_search_locations:
        for parent, folders, names in os.walk(folder):
            # An editor's backup or lock (``.#loop.py``) cannot be imported.
            folders[:] = filter(str.isidentifier, folders)
            prefix = Path(parent).relative_to(folder)
            for name in names:
                path = Path(parent, name)
                if path.suffix == ".py" and path.stem.isidentifier() and path.is_file():
                    files[(prefix / name).as_posix()] = path
    return files


def _imports(path: Path) -> list[str]:
    """Returns the sorted absolute names of all imports in a file.

    Imports inside of functions are included, and modules that settings name as ``implementation``.
    """
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        # Templates and the like: Python could not import them either.
        return []
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= _named_modules(node)
    return sorted(names)


def _named_modules(assignment: ast.Assign | ast.AnnAssign) -> set[str]:
    """Returns the module of an assignment like ``implementation = "module:Class"``; a relative one
    is in the same package.
    """
    targets = (
        assignment.targets
        if isinstance(assignment, ast.Assign)
        else [assignment.target]
    )
    if "implementation" not in map(ast.unparse, targets) or not isinstance(
        assignment.value, ast.Constant
    ):
        return set()
    module_name, _ = split_name(str(assignment.value.value))
    return set() if module_name.startswith(".") else {module_name} - {""}


def _outside(name: str, importer: Path) -> ModuleSpec | None:
    """Returns the outermost package like ``_outermost``; None for modules of the runner, of Python,
    or of an installed distribution.
    """
    top = name.partition(".")[0]
    if top in (_PACKAGE, *sys.stdlib_module_names):
        return None
    folder = next(
        (path for path in FOLDERS.paths() if importer.is_relative_to(path)),
        importer.parent,
    )
    private = FOLDERS.private_name(top, folder)
    spec = _outermost(name) if private is None else find_spec(private)
    if spec is None:
        return None
    path = Path(spec.origin or "")
    is_installed = bool(_INSTALLED & set(path.parts))
    return spec if path.suffix == ".py" and not is_installed else None


def _outermost(name: str) -> ModuleSpec | None:
    """The outermost package or module around a name that is not a mere namespace; None if there is
    none.
    """
    for outer in accumulate(name.split("."), "{}.{}".format):
        try:
            # Finding it imports its parents, which are namespaces that run no code.
            spec = find_spec(outer)
        except (ImportError, ValueError):
            return None
        if spec is None or spec.origin is not None:
            return spec
    return None


def _digest(files: dict[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        header = f"{name}\0{len(content)}\0"
        digest.update(header.encode(errors="surrogatepass") + content)
    return digest.hexdigest()


@dataclass(frozen=True)
class Checkout:
    """A commit, and a patch for ``git apply`` with the later changes of tracked files."""

    commit: str
    patch: str

    @property
    def patch_sha256(self) -> str | None:
        """SHA-256 of the patch; None if there is none."""
        if not self.patch:
            return None
        return hashlib.sha256(self.patch.encode("utf-8", "surrogateescape")).hexdigest()


def source(recipe: Path, results: Path | None = None) -> Checkout | None:
    """The checkout that the runner itself runs from, or else the one that a recipe lies in; as
    ``checkout``.
    """
    package = Path(runner.__file__).parent
    # An installed package may be inside a checkout of another project without being part of it.
    runner_checkout = _checkout(package, results, tracked=package)
    if runner_checkout is not None:
        return runner_checkout
    return checkout(recipe.absolute().parent, results)


def checkout(folder: Path, results: Path | None = None) -> Checkout | None:
    """Returns the checkout that a folder lies in, except ``results`` in it; None if there is none,
    or git fails.
    """
    return _checkout(folder, results)


def _checkout(
    folder: Path, results: Path | None, tracked: Path | None = None
) -> Checkout | None:
    """Returns the checkout around a folder; None if ``tracked`` is given and not part of it."""
    excluded = [f":(exclude,glob,icase)**/{pattern}" for pattern in _SECRETS]
    try:
        with open_repository(folder) as repository:
            if tracked is not None and not repository.is_tracked(tracked):
                return None
            if results is not None and results.resolve().is_relative_to(repository.top):
                excluded.append(
                    f":(exclude,literal,top){results.resolve().relative_to(repository.top)}"
                )
            return Checkout(repository.commit, repository.patch(excluded))
    except (GitError, OSError):
        return None


def versions(providers: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns versions of installed distributions by normalised name: those that can change a
    result, then all others in use.

    The former are torch, numpy, environments, the distributions of the plugins in use (what is
    none, such as a file, is passed over) and all that they need; an extra is in use as far as its
    packages are installed.
    """
    # Something may have been installed since the last call.
    _installed.cache_clear()
    plugins = {_normalised(provider) for provider in providers} - {_DISTRIBUTION}
    computing = {*_COMPUTES, *plugins}
    for plugin in plugins:
        computing |= {name for name, extras in _needs(plugin) if extras - _DEVELOPMENT}

    tools = {_DISTRIBUTION}
    for name, extras in _needs(_DISTRIBUTION):
        if extras - _TOOL_EXTRAS - _DEVELOPMENT:
            computing.add(name)
        if extras & _TOOL_EXTRAS:
            tools.add(name)
    # A plugin needs the runner, but not the runner's tools: the closure ends there.
    packages = _closure(computing, {_DISTRIBUTION})
    return packages, _closure(tools, packages)


def _closure(roots: Iterable[str], without: Iterable[str]) -> dict[str, str]:
    """Versions of these distributions and of all that they need, as far as they are installed."""
    installed_versions: dict[str, str] = {}
    visited = set(without)
    queue = list(roots)
    # The queue grows by the requirements of the distributions.
    for name in queue:
        if name in visited:
            continue
        visited.add(name)
        queue += [need for need, extras in _needs(name) if not extras]
        installed = _installed(name)
        if installed is not None:
            installed_versions[name] = installed.version
    return dict(sorted(installed_versions.items()))


def _needs(name: str) -> list[tuple[str, set[str]]]:
    """The requirements of a distribution by normalised name, each with the extras that bring it."""
    installed = _installed(name)
    if installed is None:
        return []
    needs = []
    for requirement in installed.needs:
        required_name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        extras = set(re.findall(r"""extra\s*==\s*["']([^"']+)["']""", requirement))
        needs.append((_normalised(required_name), extras))
    return needs


class _Installed(NamedTuple):
    """Version and requirements of a distribution, according to its metadata."""

    version: str = "unknown"
    needs: tuple[str, ...] = ()


@cache
def _installed(name: str) -> _Installed | None:
    """Returns the metadata of a distribution; None if it is not installed, or if the name is that
    of a file.
    """
    try:
        metadata = distribution(name)
    except (PackageNotFoundError, ValueError):
        return None
    text = metadata.read_text("METADATA") or metadata.read_text("PKG-INFO") or ""
    # Without the description below the headers, which would take most of the time.
    headers = HeaderParser().parsestr(text.partition("\n\n")[0])
    needs = headers.get_all("Requires-Dist") or ()
    return _Installed(headers.get("Version", "unknown"), tuple(needs))


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
