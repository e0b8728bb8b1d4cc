"""The available plugins, by section and kind; a plugin is imported when it is first used."""

import hashlib
import importlib
import importlib.util
import inspect
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from runner.plugin.check import Check
from runner.plugin.configs import LearnerConfig, SourceConfig, StageConfig
from runner.plugin.siblings import FOLDERS
from runner.system.errors import UsageError
from runner.system.files import sha256
from runner.system.suggestions import shown_path, suggestion

GROUP = "runner.plugins"
"""The entry-point group; its names are ``section.kind``, its objects are faces."""

Section = Literal["model", "data", "optimization", "inference"]
SECTIONS: tuple[Section, ...] = get_args(Section)
CHECKS = "check"
"""In names of entry points, the section of checks for ``runner verify``, which no recipe names."""
PROVIDER_DIGITS = 12
"""Number of digits of the SHA-256 of a plugin file that are its version."""
FILES: set[Path] = set()
"""Plugin files that this process has imported."""
MODULES: set[str] = set()
"""Modules of plugin classes that were passed as objects, such as those of a notebook."""
_FACES: dict[Section, type[Any]] = {
    "model": LearnerConfig, "data": SourceConfig, "optimization": StageConfig, "inference": StageConfig
}  # fmt: skip


@dataclass(frozen=True)
class Provider:
    """The origin of a plugin."""

    name: str
    """A distribution, or the path of a local file."""
    version: str
    """Of the distribution; of a file, the first digits of its SHA-256."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


class Registry:
    """The plugins of this environment, or of the given entry points, and of the files that the user names.

    Every class in such a Python file that is a face with a ``kind`` is registered; a program may pass such classes
    themselves. Two plugins of one kind, a file that cannot be imported, and an entry point whose name is no
    ``section.kind`` are a UsageError.
    """

    def __init__(
        self, plugins: Sequence[Path | str | type[Any]] = (), installed: Iterable[EntryPoint] | None = None
    ) -> None:
        _check_plugins(plugins)
        self.files = tuple(Path(plugin) for plugin in plugins if not isinstance(plugin, type))
        self.classes = tuple(plugin for plugin in plugins if isinstance(plugin, type))
        self._plugins: dict[tuple[Section, str], tuple[Provider, Callable[[], Any]]] = {}
        self._checks: dict[str, Callable[[], Any]] = {}
        for entry_point in _installed(tuple(sys.path)) if installed is None else installed:
            provider = _provider(entry_point.dist)
            section, _, kind = entry_point.name.partition(".")
            if section == CHECKS and kind:
                self._checks[str(provider) + kind] = entry_point.load
                continue
            if section not in SECTIONS or not kind:
                expected = ", ".join(f"{name}.KIND" for name in (*SECTIONS, CHECKS))
                raise UsageError(f"entry point '{entry_point.name}' of {provider} should be one of {expected}")
            self._add(section, kind, provider, entry_point.load)
        for path in self.files:
            self._add_file(path)
        for face in self.classes:
            self._add_class(face)

    def kinds(self, section: Section) -> list[str]:
        """The kinds of a section, sorted."""
        return sorted(kind for of, kind in self._plugins if of == section)

    def get(self, section: Section, kind: str) -> type[Any]:
        """Returns the configuration class of a kind; raises a UsageError if the import fails or its
        name does not match.
        """
        where = f"{section}.{kind} of {self.provider(section, kind)}"
        try:
            face = self._plugins[section, kind][1]()
        except (Exception, SystemExit) as error:
            raise UsageError(f"{where} cannot be imported: {_import_failure(error)}") from error
        base = _FACES[section]
        if not (isinstance(face, type) and issubclass(face, base)):
            raise UsageError(f"{where} is no {base.__name__}: {face!r}")
        if inspect.isabstract(face):
            raise UsageError(f"{where} is abstract: a method of {base.__name__} is missing")
        if not isinstance(getattr(face, "implementation", None), str | type):
            raise UsageError(
                f"{where}: {face.__name__}.implementation should be the name of a class, for instance "
                'implementation = "Net" or ".net:Net"'
            )
        if getattr(face, "kind", None) != kind:
            raise UsageError(f"{where} calls itself kind {getattr(face, 'kind', None)!r}")
        return face

    @property
    def checks(self) -> list[type[Check]]:
        """The checks that plugins add to ``runner verify``.

        Raises:
            UsageError: One cannot be imported, or is incomplete.
        """
        checks = []
        for load in self._checks.values():
            try:
                check = load()
            except (Exception, SystemExit) as error:
                raise UsageError(f"a check cannot be imported: {_import_failure(error)}") from error
            _require_complete(check)
            checks.append(check)
        return checks

    def provider(self, section: Section, kind: str) -> Provider:
        """Returns the origin of a kind; raises a UsageError for an unknown kind."""
        if (section, kind) not in self._plugins:
            raise UsageError(f"unknown kind '{kind}' in {section}{suggestion(kind, self.kinds(section))}")
        return self._plugins[section, kind][0]

    def command(self, text: str, more: Iterable[Path] = ()) -> str:
        """A command line with these plugin files, and more of them."""
        return " ".join([text, *(f"--plugin {shlex.quote(shown_path(path))}" for path in (*self.files, *more))])

    def _add(self, section: Section, kind: str, provider: Provider, load: Callable[[], Any]) -> None:
        if (section, kind) in self._plugins:
            both = f"{self._plugins[section, kind][0]} and {provider}"
            raise UsageError(f"{section}.{kind} is registered twice, by {both}: remove one of them")
        self._plugins[section, kind] = provider, load

    def _add_file(self, path: Path) -> None:
        module, provider = _import_file(path)
        own = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
        faces = [(section, face) for face in own for section, base in _FACES.items() if issubclass(face, base)]
        faces = [(section, face) for section, face in faces if "kind" in vars(face) and _stands_in(face, section)]
        checks = [value for value in own if issubclass(value, Check) and "name" in vars(value)]
        for check in checks:
            self._checks[f"{provider}{check.__name__}"] = partial(getattr, module, check.__name__)
        if not faces and not checks:
            raise UsageError(f"{shown_path(path)} has no LearnerConfig, SourceConfig or StageConfig with a kind")
        for section, face in faces:
            self._add(section, vars(face)["kind"], provider, partial(getattr, module, face.__name__))

    def _add_class(self, face: type[Any]) -> None:
        bases = [(section, base) for section, base in _FACES.items() if issubclass(face, base)]
        sections = [section for section, _ in bases if _stands_in(face, section)]
        if not sections or not isinstance(getattr(face, "kind", None), str):
            expected = "pass the LearnerConfig, SourceConfig or StageConfig with a kind whose implementation it is"
            raise UsageError(f"plugins: class {face.__name__} is not of settings: {expected}")
        MODULES.add(face.__module__)
        provider = Provider(f"{face.__module__}.{face.__qualname__}", _version_of(face))
        for section in sections:
            self._add(section, face.kind, provider, lambda: face)


def _require_complete(check: Any) -> None:
    """Raises a UsageError unless this is a class of a check with all of its texts and methods."""
    name = getattr(check, "__name__", repr(check))
    if not (isinstance(check, type) and issubclass(check, Check)):
        raise UsageError(f"{name} is not a Check")
    missing = [text for text in ("name", "question", "catches") if not isinstance(getattr(check, text, None), str)]
    missing += sorted(check.__abstractmethods__)
    if missing:
        raise UsageError(f"check {name}: {', '.join(missing)} missing")


def _check_plugins(plugins: Any) -> None:
    """Raises a UsageError unless these are files and classes in a list."""
    if isinstance(plugins, str | Path):
        raise UsageError(f"plugins should be a list of files: [{str(plugins)!r}]")
    if isinstance(plugins, type):
        raise UsageError(f"plugins should be a list of classes: [{plugins.__name__}]")
    if not isinstance(plugins, Iterable):
        raise UsageError(f"plugins should be a list of files and classes, got {plugins!r:.60}")
    for plugin in plugins:
        if isinstance(plugin, str | Path | type):
            continue
        expected = "a file, or a class of settings"
        if isinstance(plugin, LearnerConfig | SourceConfig | StageConfig):
            expected = f"the class itself: {type(plugin).__name__}"
        elif isinstance(plugin, ModuleType):
            expected = f"its file: {plugin.__name__}.__file__"
        raise UsageError(f"plugins: {plugin!r:.60} is of type {type(plugin).__name__}; should be {expected}")


def _version_of(face: type[Any]) -> str:
    """Returns the first digits of the SHA-256 of a class's module, or of the class if
    that is not a file.
    """
    file = getattr(sys.modules.get(face.__module__), "__file__", None)
    try:
        content = Path(file).read_bytes() if file else inspect.getsource(face).encode()
    except (OSError, TypeError):
        return "unknown"
    return hashlib.sha256(content).hexdigest()[:PROVIDER_DIGITS]


def packages() -> frozenset[str]:
    """Returns the packages of installed plugins; those that ship are in ``runner.plugins``."""
    first = {each.value.partition(".")[0] for each in _installed(tuple(sys.path))}
    return frozenset(first - {"runner"} | {GROUP})


def _stands_in(face: type[Any], section: Section) -> bool:
    """Returns whether a recipe can name a configuration from a file in a section."""
    return not issubclass(face, StageConfig) or section in face.sections


@cache  # reads the metadata of all distributions on the path
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:  # noqa: ARG001 - where entry_points() looks
    return tuple(entry_points(group=GROUP))


@cache  # reads all metadata of a distribution, which its entry points share
def _provider(found: Distribution | None) -> Provider:
    return Provider(found.name, found.version) if found else Provider("unknown", "")


def _import_failure(error: BaseException) -> str:
    """Why a module cannot be imported, with the line of a plugin file that raised the exception."""
    if isinstance(error, SystemExit):
        return f"it calls sys.exit({error.code!r})"
    steps = [step for step in traceback.extract_tb(error.__traceback__) if Path(step.filename).resolve() in FILES]
    place = f" ({shown_path(Path(steps[-1].filename))}:{steps[-1].lineno})" if steps else ""
    return f"{type(error).__name__}: {error}{place}"


def _import_file(path: Path) -> tuple[ModuleType, Provider]:
    try:
        digest = sha256(path)[:PROVIDER_DIGITS]
    except OSError as error:
        raise UsageError(f"plugin {shown_path(path)} cannot be read: {error.strerror}") from None
    provider = Provider(shown_path(path), digest)
    name = f"runner_plugin_{path.stem}_{digest}"
    if name in sys.modules and Path(str(sys.modules[name].__file__)).resolve() != path.resolve():
        # The same text in two folders may import different modules from its folder.
        name += f"_{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:PROVIDER_DIGITS]}"
    FILES.add(path.resolve())
    if name in sys.modules:
        return sys.modules[name], provider
    # Modules in the file's folder are importable, too: last in the order, so that a random.py there
    # shadows nothing, and permanently, because implementations are imported later.
    folder = path.resolve().parent
    FOLDERS.add(folder)
    importlib.invalidate_caches()  # a file may be newer than what was last seen of its folder
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"plugin {shown_path(path)} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # classes look their module up by name
    FOLDERS.prepare(module, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(f"plugin {shown_path(path)} cannot be imported: {_import_failure(error)}") from error
    return module, provider
