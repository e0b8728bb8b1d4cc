"""The lock of a run: what it was made from, and what has changed since."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import create_model

from runner import __version__
from runner.plugin.config import Config
from runner.plugin.fingerprint import is_same_data
from runner.plugin.lr_scheduler import SCHEDULES
from runner.plugin.plugin_config import PluginConfig
from runner.plugin.registry import Provider, Registry, Section
from runner.recipe.dumping import dump, is_same
from runner.recipe.environment import escape_references
from runner.recipe.provenance import (
    Checkout,
    code_digests,
    plugin_sources,
    source,
    versions,
)
from runner.recipe.recipe import Recipe, flatten
from runner.recipe.tuning import TUNING, settings_of_data
from runner.recipe.validation import fill, secrets_of
from runner.recipe.yaml_nodes import (
    MAPPING,
    LockError,
    Place,
    Problem,
    RecipeError,
    parse,
    read,
)
from runner.system.escapes import restore_undecodable
from runner.system.faults import reach
from runner.system.files import read_regular, remove, sha256, write_durably
from runner.system.hardware import hardware
from runner.system.manifest import FileDigest, Manifest
from runner.system.secrets import MASK, redact, redact_values
from runner.system.stored_json import is_digest
from runner.system.trust import is_signed, signed
from runner.system.workspace_paths import LOCK_NAME

VERSION = 1
PATCH_NAME = "source.patch"
ABSENT = "absent"
"""What a ``Drift`` has for a value that does not exist."""
# Only a source that was built can report the fingerprint of its data.
DATA = "data"
# The paths are a hint for a repetition. They are not compared, because files may be moved.
PLUGIN_FILES = "plugin_files"
PLUGIN_SOURCES = "plugin_sources"
"""SHA-256 of the plugin files and of the files that they import, by path."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_MATTERS = (
    "recipe",
    "code",
    "plugins",
    "packages",
)
"""Sections on which results depend."""
COMPUTATION = ("code", "plugins", "packages")
"""Sections on which results depend apart from settings."""
# These change results at most in their digits: resuming on another machine, or at a commit with
# another text, is legitimate.
_SHOWN = ("source", "tools", "hardware", "threads")
# A run that has imported torch has more entries than one that has not.
_OF_MACHINE = ("hardware", "threads")
_FREE = {"recipe.system.wait"}
"""Settings that change no digit."""
_HINT = (
    "the lock cannot be used: restore it from the run's artifacts in MLflow, "
    "or start a new run from the recipe"
)
PROCESSOR = "system"
"""Section with the use of the processor at the start of the run; it is not compared."""
PROCESSES = "processes"
"""Number of processes of the run in that section; without it, there is one."""
_SECTIONS: Any = dict.fromkeys(
    (*_MATTERS, *_SHOWN, PROCESSOR), (dict[str, Any], {})
) | {"recipe": (dict[str, Any], ...)}
_LockForm = create_model("_LockForm", __base__=Config, lock=(int, ...), **_SECTIONS)


@dataclass(frozen=True)
class Drift:
    """A difference between a lock and the present state.

    Attributes:
        name: Dotted path in the lock: ``packages.torch``.
        locked: The value in the lock, ``absent`` if it has none.
        now: The present value, ``absent`` if there is none.
        matters: Whether results may change because of it.
    """

    name: str
    locked: str
    now: str
    matters: bool

    @property
    def is_setting(self) -> bool:
        """Returns whether it is a value of the recipe."""
        return self.name.startswith("recipe.")

    def __str__(self) -> str:
        # The first digits of a SHA-256 identify it in a message.
        locked, now = (
            value[:12] if is_digest(value) else value
            for value in (self.locked, self.now)
        )
        return f"{self.name}: {locked} in the lock, {now} now"


def write_lock(
    recipe: Recipe,
    run_dir: Path,
    catalog: Registry,
    results: Path | None = None,
    init_from: Mapping[str, Any] | None = None,
    processor: Mapping[str, Any] | None = None,
    fingerprint: str | None = None,
    checkout: Checkout | None = None,
    tuning: Mapping[str, Any] | None = None,
) -> Path:
    """Writes ``recipe.lock.yaml``, and ``source.patch`` if the source differs from its commit.

    The lock is itself a recipe, in which values of type ``SecretStr`` are masked: running it runs
    the same values again. Known secrets are redacted in the patch too, and the patch excludes
    changes in the folder ``results``.

    ``init_from`` are the initial weights of the model, ``processor`` is the use of the processor,
    and ``fingerprint`` identifies the data. ``checkout`` is the result of ``source``, if the caller
    has it already. ``tuning`` are the tuning choices so far, as returned by ``Tuning.data``.
    """
    if checkout is None:
        checkout = source(recipe.path, results)
    if checkout is not None and checkout.patch:
        write_durably(run_dir / PATCH_NAME, redact(checkout.patch))
    else:
        # An earlier lock may have left a patch.
        remove(run_dir / PATCH_NAME)

    facts: dict[str, Any] = {"lock": VERSION, "digest": recipe.digest}
    if init_from is not None:
        facts["init_from"] = dict(init_from)
    if processor is not None:
        facts[PROCESSOR] = dict(processor)
    if fingerprint is not None:
        facts[DATA] = {"fingerprint": fingerprint}
    if tuning:
        facts |= redact_values({TUNING: dict(tuning)})
    facts |= _facts(recipe, catalog, checkout)
    origins = {path: origin.cited() for path, origin in recipe.origins.items()}
    facts |= redact_values({"origins": origins})
    facts |= _plugin_facts(recipe, run_dir, catalog)
    # The code comes last, so that a truncated lock never has a complete code.
    facts["code"] = code_of(recipe)
    lock = run_dir / LOCK_NAME
    Manifest(run_dir).store_text(lock, signed(dump(facts), run_dir))
    return lock


def _plugin_facts(recipe: Recipe, run_dir: Path, catalog: Registry) -> dict[str, Any]:
    """Returns where the plugin files in use are, and the digests of all sources that run because of
    them.
    """
    names = {provider.name for provider in _providers(recipe, catalog).values()}
    files = [Path(name) for name in names if name.endswith(".py")]
    sources = plugin_sources(_faces(recipe), files) if files else []
    digests = {_recorded_path(path, run_dir): sha256(path) for path in sources}
    facts = {
        PLUGIN_FILES: sorted(_recorded_path(path, run_dir) for path in files),
        PLUGIN_SOURCES: digests,
    }
    return dict(redact_values(facts))


def _recorded_path(path: Path, run_dir: Path) -> str:
    """Returns the path of a plugin file relative to a run's folder, so that a project can be moved
    with its workspace.

    A file outside of the project, the folder that contains the workspace, has its absolute path.
    """
    absolute = path.absolute()
    folder = run_dir.absolute()
    # A run is in PROJECT/WORKSPACE/runs/NAME.
    project = folder.parents[2] if len(folder.parents) > 3 else folder
    if absolute.is_relative_to(project):
        return os.path.relpath(absolute, folder)
    return str(absolute)


def data_drift(
    locked: Mapping[str, Any], recipe: Recipe, fingerprint: str | None
) -> Drift | None:
    """Returns the difference between the data of a lock and those that are there now; None if there
    is none.

    If the settings of the data differ, that is reported as a drift of the settings, and the result
    is None.
    """
    locked_fingerprint = (locked.get(DATA) or {}).get("fingerprint")
    if locked_fingerprint is None or is_same_data(locked_fingerprint, fingerprint):
        return None
    locked_settings = settings_of_data(locked["recipe"]["data"])
    if locked_settings != settings_of_data(recipe.values()["data"]):
        return None
    return Drift(
        name="data.fingerprint",
        locked=str(locked_fingerprint)[:12],
        now=str(fingerprint or ABSENT)[:12],
        matters=True,
    )


def update_lock(
    recipe: Recipe,
    run_dir: Path,
    catalog: Registry,
    step: int,
    fingerprint: str | None = None,
    is_changed: bool = True,
    processes: int = 1,
) -> None:
    """Replaces the lock of a run that is resumed if settings, code, packages or the number of
    processes have changed, or if it is not signed.

    If something has changed, the previous lock is saved next to it, with the last step for which it
    was valid in its name.
    """
    path = run_dir / LOCK_NAME
    if not is_changed and is_trusted(path):
        return
    locked = read_lock(path)
    manifest = Manifest(run_dir)
    if not manifest.exists():
        # The run was started with an earlier version.
        manifest.add({path: FileDigest.of(path)})
    previous = run_dir / f"until-{step}.lock.yaml"
    if is_changed and not previous.exists():
        manifest.store_text(previous, path.read_text())

    facts = _facts(recipe, catalog, source(recipe.path))
    facts["code"] = code_of(recipe)
    locked_values = dict(flatten(locked["recipe"]))
    origins = dict(locked.get("origins") or {})
    for name, value in flatten(facts["recipe"]):
        if name not in locked_values or not is_same(locked_values[name], value):
            origins[name] = (
                recipe.origins[name].cited() if name in recipe.origins else "resume"
            )

    # The code comes last, so that a truncated lock never has a complete code.
    locked.pop("code", None)
    if fingerprint is not None:
        locked[DATA] = {"fingerprint": fingerprint}
    locked[PROCESSOR] = {**(locked.get(PROCESSOR) or {}), PROCESSES: processes}
    locked["digest"] = recipe.digest
    locked["origins"] = redact_values(origins)
    locked |= _plugin_facts(recipe, run_dir, catalog)
    manifest.store_text(path, signed(dump(locked | facts), run_dir))


def write_tuning(run_dir: Path, data: Mapping[str, Any]) -> None:
    """Replaces the tuning choices in the lock of a run; does nothing if they are there already."""
    path = run_dir / LOCK_NAME
    locked: dict[str, Any] = read(path, []).plain()
    if (locked.get(TUNING) or {}) == data:
        return
    # The code comes last, so that a truncated lock never has a complete code.
    code = locked.pop("code", None)
    locked.pop(TUNING, None)
    if data:
        locked |= redact_values({TUNING: dict(data)})
    if code is not None:
        locked["code"] = code
    Manifest(run_dir).store_text(path, signed(dump(locked), run_dir))
    reach("tuning.stored")


def copy_recipe(recipe: Recipe, target: Path) -> None:
    """Copies the file that a recipe was loaded from, with every secret in it masked, also what was
    replaced since.

    A recipe that was passed as a mapping is written with all of its values.
    """
    if recipe.path == Path(MAPPING):
        write_durably(target, redact(dump(escape_references(recipe.values()))))
        return
    text = recipe.path.read_bytes().decode("utf-8-sig", errors="replace")
    # The file may have been changed, and be damaged, since it was loaded.
    with suppress(RecipeError):
        document = parse(text, recipe.path, [])
        secrets = [
            leaf for leaf in secrets_of(recipe, document) if leaf.value is not None
        ]
        # A value that an alias repeats occurs once.
        spans = {(leaf.start, leaf.start + len(leaf.spelled)) for leaf in secrets}
        for start, end in sorted(spans, reverse=True):
            text = f"{text[:start]}'{MASK}'{text[end:]}"
    write_durably(target, redact(text))


def read_lock(lock: Path) -> dict[str, Any]:
    """Returns a lock as plain values; that it is missing, damaged, or of a newer runner is a
    ``LockError``.
    """
    problems: list[Problem] = []
    try:
        root = read(lock, problems)
        sections = {
            key: node
            for key, node in root.children.items()
            if key in _LockForm.model_fields
        }
        fill(_LockForm, replace(root, value=sections), "", problems)
    except RecipeError as error:
        problems += error.problems
    if problems:
        raise LockError([*problems, Problem(Place(lock), "", _HINT)])
    values: dict[str, Any] = root.plain()
    recorded_files = values.get(PLUGIN_FILES) or ()
    values[PLUGIN_FILES] = [_plugin_file(lock, str(path)) for path in recorded_files]
    recorded_digests = values.get(PLUGIN_SOURCES) or {}
    values[PLUGIN_SOURCES] = {
        _plugin_file(lock, str(path)): str(digest)
        for path, digest in recorded_digests.items()
    }
    if values["lock"] > VERSION:
        message = f"format {values['lock']} is newer than this runner reads ({VERSION}): update it"
        raise LockError([Problem(root.asked("lock"), "lock", message)])
    return values


def _plugin_file(lock: Path, recorded: str) -> str:
    """Returns the path of a plugin file; of a lock that was copied elsewhere, that of the same name
    here.
    """
    path = Path(
        os.path.normpath(lock.absolute().parent / restore_undecodable(recorded))
    )
    same_name = Path(path.name).absolute()
    return str(same_name if same_name.is_file() and not path.exists() else path)


def plugins_again(locked: Mapping[str, Any], given: Iterable[Path]) -> list[Path]:
    """Returns the plugin files that a lock, as ``read_lock`` returns it, was written with and whose
    names none has.
    """
    names = {path.name for path in given}
    return [
        path
        for path in map(Path, locked.get(PLUGIN_FILES) or ())
        if path.name not in names
    ]


def is_trusted(lock: Path) -> bool:
    """Returns whether the runner of this user wrote a lock here, on this machine, and it is
    unchanged since then.
    """
    try:
        return is_signed(
            read_regular(lock).decode("utf-8", "surrogateescape"), lock.parent
        )
    except OSError:
        return False


def changed_sources(
    locked: Mapping[str, Any], files: Iterable[Path]
) -> dict[Path, str]:
    """Returns the sources of plugins that are not as a lock records them, each with what is wrong
    with it.

    Args:
        locked: The lock, as ``read_lock`` returns it.
        files: Plugin files, whose digests the lock must have.
    """
    digests = locked[PLUGIN_SOURCES]
    changes = {}
    for path in dict.fromkeys([*files, *map(Path, digests)]):
        try:
            if sha256(path) != digests.get(str(path)):
                changes[path] = "has changed since"
        except OSError as error:
            changes[path] = f"cannot be read at {path}: {error.strerror}"
    return changes


def drift(lock: Path, recipe: Recipe, catalog: Registry) -> list[Drift]:
    """Returns the changes since the recipe's lock was written, those that matter first."""
    locked = read_lock(lock)
    facts = _facts(recipe, catalog, source(recipe.path)) | {"code": code_of(recipe)}
    drifts: list[Drift] = []
    for section in (*_MATTERS, *_SHOWN):
        locked_values = dict(flatten(locked.get(section) or {}))
        present_values = dict(flatten(facts[section]))
        if section in _OF_MACHINE:
            names = locked_values.keys() & present_values.keys()
        else:
            names = locked_values.keys() | present_values.keys()
        drifts += _drifts_of(section, sorted(names), locked_values, present_values)
    return drifts


def _drifts_of(
    section: str,
    names: Iterable[str],
    locked: Mapping[str, Any],
    present: Mapping[str, Any],
) -> Iterator[Drift]:
    """Yields the differences between these values of a section."""
    for name in names:
        # As text, because a lock has no other form of some values.
        if str(locked.get(name)) == str(present.get(name)):
            continue
        path = f"{section}.{name}"
        yield Drift(
            name=path,
            locked=str(locked.get(name, ABSENT)),
            now=str(present.get(name, ABSENT)),
            matters=section in _MATTERS and path not in _FREE,
        )


def computation_of(
    recipes: Iterable[Recipe], catalog: Registry
) -> dict[str, dict[str, str]]:
    """Returns what the results of recipes depend on apart from their settings, as in their locks:
    digests of code, plugins, and versions of packages.
    """
    classes: dict[type, None] = {}
    providers: dict[str, Provider] = {}
    for recipe in recipes:
        classes |= dict.fromkeys(_faces(recipe))
        providers |= _providers(recipe, catalog)
    packages, _ = versions({provider.name for provider in providers.values()})
    facts = {
        "code": code_digests(classes),
        "plugins": _plugin_versions(providers),
        "packages": packages,
    }
    return dict(redact_values(facts))


def changed_computation(
    stored: Mapping[str, Mapping[str, str]], present: Mapping[str, Mapping[str, str]]
) -> list[Drift]:
    """Returns the differences between two results of ``computation_of``."""
    drifts: list[Drift] = []
    for section in COMPUTATION:
        before = stored.get(section, {})
        now = present[section]
        drifts += _drifts_of(section, sorted(before.keys() | now.keys()), before, now)
    return drifts


def locked_threads(lock: Path) -> int | None:
    """Returns the number of threads at the start of a run; None if its lock does not contain it."""
    values = read_lock(lock)
    threads = values.get(PROCESSOR) or values.get("threads") or {}
    count = threads.get("threads", threads.get("torch"))
    return count if isinstance(count, int) else None


def locked_processes(lock: Path) -> int:
    """Returns the number of processes that have trained a run."""
    processor = read_lock(lock).get(PROCESSOR) or {}
    count = processor.get(PROCESSES, 1)
    return count if isinstance(count, int) else 1


def code_of(recipe: Recipe) -> dict[str, str]:
    """Digests of the code that a recipe runs, by package."""
    return dict(redact_values(code_digests(_faces(recipe))))


def _faces(recipe: Recipe) -> list[type]:
    """Returns the classes of the settings of everything that a recipe uses."""
    switched_on = (recipe.stages, recipe.inference, recipe.callbacks)
    configs: list[PluginConfig] = [
        config for section in switched_on for config in section.values()
    ]
    # The runner's schedules are part of the runner, which is recorded in any case.
    if recipe.lr_scheduler.kind not in SCHEDULES:
        configs.append(recipe.lr_scheduler)
    return [type(recipe.model), type(recipe.data), *map(type, configs)]


def _facts(
    recipe: Recipe, catalog: Registry, checkout: Checkout | None
) -> dict[str, Any]:
    """Returns what can change a result except code, redacted for locks and comparisons."""
    threads: dict[str, Any] = {name: os.environ.get(name) for name in _THREADS}
    # Importing torch for its number of threads would take seconds.
    torch = sys.modules.get("torch")
    if torch is not None:
        threads["torch"] = torch.get_num_threads()
        threads["torch_interop"] = torch.get_num_interop_threads()
    commit: dict[str, Any] = {}
    if checkout is not None:
        commit = {"commit": checkout.commit, "patch_sha256": checkout.patch_sha256}
    providers = _providers(recipe, catalog)
    packages, tools = versions({provider.name for provider in providers.values()})
    facts = {
        "recipe": recipe.values(),
        "source": commit,
        "plugins": _plugin_versions(providers),
        "packages": packages,
        "tools": {"runner": __version__} | tools,
        "hardware": dict(hardware()),
        "threads": threads,
    }
    return dict(redact_values(facts))


def _plugin_versions(providers: Mapping[str, Provider]) -> dict[str, str]:
    """Returns name and version of the provider of each plugin."""
    # A local file is identified by its name and content: its folder has no influence.
    return {
        name: f"{Path(provider.name).name} {provider.version}"
        for name, provider in providers.items()
    }


def _providers(recipe: Recipe, catalog: Registry) -> dict[str, Provider]:
    """Returns the providers of the plugins in use."""
    used: dict[Section, Iterable[str]] = {
        "model": [recipe.model.kind],
        "data": [recipe.data.kind],
    }
    if recipe.lr_scheduler.kind not in SCHEDULES:
        used["lr_scheduler"] = [recipe.lr_scheduler.kind]
    used |= {
        "optimization": recipe.stages,
        "inference": recipe.inference,
        "callbacks": recipe.callbacks,
    }
    return {
        f"{section}.{kind}": catalog.provider(section, kind)
        for section, kinds in used.items()
        for kind in kinds
    }
