"""The available plugins, by section and kind; a plugin is imported when it is first used."""

import hashlib
import importlib
import importlib.util
import inspect
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from runner import __version__
from runner.plugin.check import Check
from runner.plugin.class_digest import digest_classes
from runner.plugin.configs import (
    CallbackConfig,
    LearnerConfig,
    SourceConfig,
    StageConfig,
)
from runner.plugin.lr_scheduler import SCHEDULES, ScheduleConfig
from runner.plugin.siblings import FOLDERS
from runner.plugin.sink import Sink
from runner.system.errors import UsageError
from runner.system.files import sha256
from runner.system.suggestions import shown_path, suggestion

GROUP = "runner.plugins"
"""The entry-point group; its names are ``section.kind``, its objects are configs."""

Section = Literal[
    "model", "data", "lr_scheduler", "optimization", "inference", "callbacks"
]
SECTIONS: tuple[Section, ...] = get_args(Section)
CHECKS = "check"
"""In names of entry points, the section of checks for ``runner verify``, which no recipe names."""
SINKS = "sink"
"""In names of entry points, the section of sinks, which ``tracking.sinks`` names."""
PROVIDER_DIGITS = 12
"""Number of digits of the SHA-256 of a plugin file that are its version."""
FILES: set[Path] = set()
"""Plugin files that this process has imported."""
MODULES: set[str] = set()
"""Modules of plugin classes that were passed as objects, such as those of a notebook."""
_FILE_MODULE = "runner_plugin_"
"""First letters of the name of a plugin file's module."""
_BASES: list[tuple[Section, type[Any]]] = [
    ("model", LearnerConfig),
    ("data", SourceConfig),
    ("lr_scheduler", ScheduleConfig),
    ("optimization", StageConfig),
    ("inference", StageConfig),
    ("callbacks", CallbackConfig),
]
_CLASSES = "LearnerConfig, SourceConfig, ScheduleConfig, StageConfig or CallbackConfig with a kind"


@dataclass(frozen=True)
class Provider:
    """The origin of a plugin."""

    name: str
    """A distribution, or the path of a local file."""
    version: str
    """Version of the distribution; for a file, the first digits of its SHA-256."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


RUNNER = Provider("proven-runner", __version__)
"""Origin of the schedules that need no plugin."""


class Registry:
    """The plugins of this environment, or of the given entry points, and of the files that the user
    names.

    Every class in such a Python file that is a config with a ``kind`` is registered; a program may
    pass such classes themselves.

    Raises:
        UsageError: Two plugins have the same kind, a file cannot be imported, or the name of an
            entry point is not ``section.kind``.
    """

    def __init__(
        self,
        plugins: Sequence[Path | str | type[Any]] = (),
        installed: Iterable[EntryPoint] | None = None,
    ) -> None:
        _check_plugins(plugins)
        self.files = tuple(
            Path(plugin) for plugin in plugins if not isinstance(plugin, type)
        )
        self.classes = tuple(plugin for plugin in plugins if isinstance(plugin, type))
        self._plugins: dict[
            tuple[Section, str], tuple[Provider, Callable[[], Any]]
        ] = {}
        # Settings that a plugin file imports: the file that defines them, and the importing file.
        self._imported: dict[tuple[Section, str], tuple[Path, Path]] = {}
        self._checks: dict[str, Callable[[], Any]] = {}
        self._sinks: dict[str, Callable[[], Any]] = {}
        for kind, schedule in SCHEDULES.items():
            self._add("lr_scheduler", kind, RUNNER, partial(_itself, schedule))
        if installed is None:
            installed = _installed(tuple(sys.path))
        for entry_point in installed:
            provider = _provider(entry_point.dist)
            section, _, kind = entry_point.name.partition(".")
            if section == CHECKS and kind:
                self._checks[str(provider) + kind] = entry_point.load
                continue
            if section == SINKS and kind:
                self._sinks[kind] = entry_point.load
                continue
            if section not in SECTIONS or not kind:
                problem = f"entry point '{entry_point.name}' of {provider}"
                sections = (*SECTIONS, CHECKS, SINKS)
                expected = ", ".join(f"{name}.KIND" for name in sections)
                raise UsageError(f"{problem} should be one of {expected}")
            self._add(section, kind, provider, entry_point.load)
        for path in self.files:
            self._add_file(path)
        for config in self.classes:
            self._add_class(config)

    def kinds(self, section: Section) -> list[str]:
        """Returns the kinds of a section, sorted."""
        return sorted(kind for name, kind in self._plugins if name == section)

    def get(self, section: Section, kind: str) -> type[Any]:
        """Returns the configuration class of a kind; raises a UsageError if the import fails or its
        name does not match.
        """
        plugin = f"{section}.{kind} of {self.provider(section, kind)}"
        _, load = self._plugins[section, kind]
        try:
            config = load()
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"{plugin} cannot be imported: {_import_failure(error)}"
            ) from error
        base = dict(_BASES)[section]
        if not (isinstance(config, type) and issubclass(config, base)):
            raise UsageError(f"{plugin} is no {base.__name__}: {config!r}")
        if inspect.isabstract(config):
            problem = f"a method of {base.__name__} is missing"
            raise UsageError(f"{plugin} is abstract: {problem}")
        if not isinstance(getattr(config, "implementation", None), str | type):
            expected = (
                'the name of a class, for instance implementation = "Net" or ".net:Net"'
            )
            raise UsageError(
                f"{plugin}: {config.__name__}.implementation should be {expected}"
            )
        declared_kind = getattr(config, "kind", None)
        if declared_kind != kind:
            raise UsageError(f"{plugin} calls itself kind {declared_kind!r}")
        return config

    @property
    def checks(self) -> list[type[Check]]:
        """The checks that plugins add to ``runner verify``.

        Raises:
            UsageError: A check cannot be imported, or is incomplete.
        """
        checks = []
        for load in self._checks.values():
            try:
                check = load()
            except (Exception, SystemExit) as error:
                failure = _import_failure(error)
                raise UsageError(f"a check cannot be imported: {failure}") from error
            _require_complete(check)
            checks.append(check)
        return checks

    @property
    def sinks(self) -> list[str]:
        """The kinds of sinks, sorted."""
        return sorted(self._sinks)

    def sink(self, kind: str) -> type[Sink]:
        """Returns a sink.

        Raises:
            UsageError: Nothing has this kind, or it cannot be imported, or is no sink.
        """
        if kind not in self._sinks:
            hint = suggestion(kind, self._sinks)
            raise UsageError(f"tracking.sinks: unknown sink '{kind}'{hint}")
        try:
            sink = self._sinks[kind]()
        except (Exception, SystemExit) as error:
            failure = _import_failure(error)
            raise UsageError(f"sink '{kind}' cannot be imported: {failure}") from error
        if not (isinstance(sink, type) and issubclass(sink, Sink)):
            raise UsageError(f"sink '{kind}' is not a Sink: {sink!r}")
        if missing := ", ".join(sorted(sink.__abstractmethods__)):
            raise UsageError(f"sink '{kind}': {missing} missing")
        return sink

    def import_hint(self, section: Section, kind: str) -> str:
        """Returns the end of a message about an unknown kind whose settings a plugin file imports;
        empty for other kinds.
        """
        if (section, kind) not in self._imported:
            return ""
        paths = self._imported[section, kind]
        file_name, importing_name = map(shown_path, paths)
        return (
            f"; it is defined in {file_name}, which {importing_name} imports: "
            f"add --plugin {shlex.quote(file_name)}"
        )

    def provider(self, section: Section, kind: str) -> Provider:
        """Returns the origin of a kind; raises a UsageError for an unknown kind."""
        if (section, kind) not in self._plugins:
            hint = self.import_hint(section, kind)
            hint = hint or suggestion(kind, self.kinds(section))
            raise UsageError(f"unknown kind '{kind}' in {section}{hint}")
        return self._plugins[section, kind][0]

    def command(self, text: str, more: Iterable[Path] = ()) -> str:
        """Returns a command line with these plugin files, and more of them."""
        words = [text]
        for path in (*self.files, *more):
            words += ["--plugin", shlex.quote(shown_path(path))]
        return " ".join(words)

    def _add(
        self, section: Section, kind: str, provider: Provider, load: Callable[[], Any]
    ) -> None:
        if (section, kind) in self._plugins:
            providers = f"{self.provider(section, kind)} and {provider}"
            problem = f"is registered twice, by {providers}: remove one of them"
            raise UsageError(f"{section}.{kind} {problem}")
        self._plugins[section, kind] = provider, load

    def _add_file(self, path: Path) -> None:
        module, provider = _import_file(path)
        checks = []
        sinks = []
        configs = []
        for value in list(vars(module).values()):
            if not isinstance(value, type) or value.__module__ != module.__name__:
                continue
            # A base class in the file has no name or kind, and is not registered.
            if issubclass(value, Check) and "name" in vars(value):
                checks.append(value.__name__)
            if issubclass(value, Sink) and "kind" in vars(value):
                sinks.append(value)
            elif "kind" in vars(value):
                configs += [(section, value) for section in _sections(value)]
        imported_files = []
        for config, file in _imported_configs(module):
            imported_files.append(shown_path(file))
            for section in _sections(config):
                self._imported[section, vars(config)["kind"]] = file, path
        if not (configs or checks or sinks):
            problem = f"{shown_path(path)} has no {_CLASSES}"
            if imported_files:
                name = min(imported_files)
                problem += (
                    f"; it imports those of {name}: add --plugin {shlex.quote(name)}"
                )
            raise UsageError(problem)
        for name in checks:
            self._checks[f"{provider}{name}"] = partial(getattr, module, name)
        for sink in sinks:
            self._sinks[sink.kind] = partial(getattr, module, sink.__name__)
        for section, config in configs:
            load = partial(getattr, module, config.__name__)
            self._add(section, vars(config)["kind"], provider, load)

    def _add_class(self, config: type[Any]) -> None:
        if issubclass(config, Sink):
            self._sinks[config.kind] = lambda: config
            MODULES.add(config.__module__)
            return
        sections = _sections(config)
        if not sections or not isinstance(getattr(config, "kind", None), str):
            raise UsageError(
                f"plugins: class {config.__name__} is not of settings: "
                f"pass the {_CLASSES} whose implementation it is"
            )
        MODULES.add(config.__module__)
        name = f"{config.__module__}.{config.__qualname__}"
        provider = Provider(name, _version_of(config))
        for section in sections:
            self._add(section, config.kind, provider, partial(_itself, config))


def _imported_configs(module: ModuleType) -> Iterator[tuple[type[Any], Path]]:
    """Yields the settings that a plugin file imports from its folder, with their files.

    They are not registered, because the other file may be a plugin file, too.
    """
    values = list(vars(module).values())
    for value in list(values):
        if isinstance(value, ModuleType) and _sibling_file(value):
            values += vars(value).values()
    for value in values:
        if not isinstance(value, type) or not isinstance(vars(value).get("kind"), str):
            continue
        file = _sibling_file(sys.modules.get(value.__module__))
        if file is not None and value.__module__ != module.__name__:
            yield value, file


def _sibling_file(module: ModuleType | None) -> Path | None:
    """Returns the file of a module in the folder of a plugin file; None for other modules."""
    file = getattr(module, "__file__", None)
    if file is None or Path(file).resolve().parent not in FOLDERS.paths():
        return None
    return Path(file)


def _itself(config: type[Any]) -> type[Any]:
    """Returns a class that is imported already."""
    return config


def _require_complete(check: Any) -> None:
    """Raises a UsageError unless this is a class of a check with all of its texts and methods."""
    name = getattr(check, "__name__", repr(check))
    if not (isinstance(check, type) and issubclass(check, Check)):
        raise UsageError(f"{name} is not a Check")
    missing = [
        text
        for text in ("name", "question", "catches")
        if not isinstance(getattr(check, text, None), str)
    ]
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
        expected = "a list of files and classes"
        raise UsageError(f"plugins should be {expected}, got {plugins!r:.60}")
    for plugin in plugins:
        if isinstance(plugin, str | Path | type):
            continue
        expected = "a file, or a class of settings"
        if isinstance(
            plugin,
            LearnerConfig
            | SourceConfig
            | ScheduleConfig
            | StageConfig
            | CallbackConfig,
        ):
            expected = f"the class itself: {type(plugin).__name__}"
        elif isinstance(plugin, ModuleType):
            expected = f"its file: {plugin.__name__}.__file__"
        actual = f"{plugin!r:.60} is of type {type(plugin).__name__}"
        raise UsageError(f"plugins: {actual}; should be {expected}")


def _version_of(config: type[Any]) -> str:
    """Returns the first digits of the SHA-256 of a class's module, or of the class with
    its implementation if that is not a file.
    """
    module = sys.modules.get(config.__module__)
    file = getattr(module, "__file__", None)
    if not file:
        implementation = getattr(config, "implementation", None)
        if isinstance(implementation, str):
            implementation = getattr(module, implementation, None)
        classes = [config]
        # What is wrong with an implementation is reported where it is imported.
        if isinstance(implementation, type):
            classes.append(implementation)
        return digest_classes(*classes)[:PROVIDER_DIGITS]
    try:
        return _digits(Path(file).read_bytes())
    except OSError:
        return "unknown"


def _digits(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:PROVIDER_DIGITS]


def packages() -> frozenset[str]:
    """Returns the packages of installed plugins; those that ship are in ``runner.plugins``."""
    names = {GROUP}
    for entry_point in _installed(tuple(sys.path)):
        top = entry_point.value.partition(".")[0]
        # The runner itself is not a plugin, only what is below the group's name.
        if top != "runner":
            names.add(top)
    return frozenset(names)


def file_modules(files: Iterable[Path | str]) -> list[ModuleType]:
    """Returns the modules of plugin files that this process has imported."""
    paths = {Path(file).resolve() for file in files}
    return [
        module
        for name, module in [*sys.modules.items()]
        if name.startswith(_FILE_MODULE)
        and Path(str(module.__file__)).resolve() in paths
    ]


def _sections(config: type[Any]) -> list[Section]:
    """Returns the sections of a recipe that can name a class that is not installed."""
    sections = [section for section, base in _BASES if issubclass(config, base)]
    if issubclass(config, StageConfig):
        return [section for section in sections if section in config.sections]
    return sections


# The path is the key of the cache, because entry_points() reads the metadata of all distributions
# on it.
@cache
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:  # noqa: ARG001
    return tuple(entry_points(group=GROUP))


# Name and version are read from a file, which all entry points of a distribution share.
@cache
def _provider(distribution: Distribution | None) -> Provider:
    if distribution is None:
        return Provider("unknown", "")
    return Provider(distribution.name, distribution.version)


def _import_failure(error: BaseException) -> str:
    """Returns why a module cannot be imported, with the line of a plugin file that raised."""
    if isinstance(error, SystemExit):
        return f"it calls sys.exit({error.code!r})"
    steps = [
        step
        for step in traceback.extract_tb(error.__traceback__)
        if Path(step.filename).resolve() in FILES
    ]
    message = f"{type(error).__name__}: {error}"
    if not steps:
        return message
    return f"{message} ({shown_path(Path(steps[-1].filename))}:{steps[-1].lineno})"


def _import_file(path: Path) -> tuple[ModuleType, Provider]:
    try:
        digest = sha256(path)[:PROVIDER_DIGITS]
    except OSError as error:
        raise UsageError(
            f"plugin {shown_path(path)} cannot be read: {error.strerror}"
        ) from None
    provider = Provider(shown_path(path), digest)
    resolved = path.resolve()
    name = f"{_FILE_MODULE}{path.stem}_{digest}"
    if name in sys.modules:
        file = Path(str(sys.modules[name].__file__))
        # The same text in two folders may import different modules from its folder.
        if file.resolve() != resolved:
            name += f"_{_digits(os.fsencode(resolved))}"
    FILES.add(resolved)
    if name in sys.modules:
        return sys.modules[name], provider
    # Modules in the file's folder are importable, too: last in the order, so that a random.py there
    # shadows nothing, and permanently, because implementations are imported later.
    folder = resolved.parent
    FOLDERS.add(folder)
    # A file may be newer than the listing of its folder that the import system has cached.
    importlib.invalidate_caches()
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"plugin {shown_path(path)} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Classes look their module up by name while it is executed.
    sys.modules[name] = module
    FOLDERS.prepare(module, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        failure = _import_failure(error)
        # Worker processes import the files that this process has imported.
        FILES.discard(resolved)
        raise UsageError(
            f"plugin {shown_path(path)} cannot be imported: {failure}"
        ) from error
    return module, provider
