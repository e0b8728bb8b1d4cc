"""The lock of a run: what it was made from, and what has changed since."""

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import create_model

from runner import __version__
from runner.plugin.config import Config
from runner.plugin.registry import PROVIDER_DIGITS, Provider, Registry, Section
from runner.recipe.document import MAPPING, Place, Problem, RecipeError, dump, parse, read
from runner.recipe.fill import fill, secrets_of
from runner.recipe.provenance import Checkout, code_digests, source, versions
from runner.recipe.recipe import Recipe, flatten
from runner.system.files import sha256, write_durably
from runner.system.hardware import hardware
from runner.system.places import LOCK_NAME
from runner.system.secrets import MASK, redact, redact_values

VERSION = 1
PATCH_NAME = "source.patch"
DATA = "data"  # what the training has read, which only a source that is built can tell
PLUGIN_FILES = "plugin_files"  # where they were: a hint for who runs it again, and no part of what is compared
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_MATTERS = ("recipe", "code", "plugins", "packages")  # sections that decide about results
# Sections that do not, or in digits at most: resuming elsewhere, or at a commit with another text, is legitimate.
_SHOWN = ("source", "tools", "hardware", "threads")
_OF_MACHINE = ("hardware", "threads")  # of which a run that has imported torch knows more than one that has not
_FREE = {"recipe.system.wait"}  # settings that change no digit
_REMEDY = "the lock cannot be used: restore it from the run's artifacts in MLflow, or start a new run from the recipe"
PROCESSOR = "system"  # how the run began to use the processor; no part of what is compared
_SECTIONS: Any = dict.fromkeys((*_MATTERS, *_SHOWN, PROCESSOR), (dict[str, Any], {})) | {
    "recipe": (dict[str, Any], ...)
}
_Whole = create_model("_Whole", __base__=Config, lock=(int, ...), **_SECTIONS)


@dataclass(frozen=True)
class Drift:
    """One thing that is not as it was when a lock was written."""

    name: str  # dotted path in the lock: "packages.torch"
    locked: str  # what it was; "absent" if the lock does not have it
    now: str  # what it is; "absent" if it is gone
    matters: bool  # whether results may change because of it

    def __str__(self) -> str:
        return f"{self.name}: {self.locked} in the lock, {self.now} now"


def write_lock(
    recipe: Recipe, run_dir: Path, catalog: Registry, results: Path | None = None,
    init_from: Mapping[str, Any] | None = None, processor: Mapping[str, Any] | None = None,
    fingerprint: str | None = None,
) -> Path:  # fmt: skip
    """Writes ``recipe.lock.yaml``, and ``source.patch`` beside it if the source differs from its commit.

    The lock is itself a recipe, with values of type ``SecretStr`` masked: running it runs the same values again. Known
    secrets are redacted in the patch too; a change in the folder ``results`` is none of the source's.
    ``init_from`` says which weights the model began with, ``processor`` how the training uses the processor, and
    ``fingerprint`` tells its data from others.
    """
    checkout = source(recipe.path, results)
    if checkout is not None and checkout.patch:
        write_durably(run_dir / PATCH_NAME, redact(checkout.patch))
    else:  # an earlier lock may have been here
        (run_dir / PATCH_NAME).unlink(missing_ok=True)
    names = {provider.name for provider in _providers(recipe, catalog).values()}
    files = sorted(_recorded_path(Path(name), run_dir) for name in names if name.endswith(".py"))
    origins = {path: place.cited() for path, place in recipe.origins.items()}
    head = {"lock": VERSION, "digest": recipe.digest} | ({} if init_from is None else {"init_from": dict(init_from)})
    head |= {} if processor is None else {PROCESSOR: dict(processor)}
    head |= {} if fingerprint is None else {DATA: {"fingerprint": fingerprint}}
    facts = head | _facts(recipe, catalog, checkout) | redact_values({"origins": origins, PLUGIN_FILES: files})
    # The code comes last: a lock that is cut anywhere lacks of it.
    write_durably(run_dir / LOCK_NAME, dump(facts | {"code": code_of(recipe)}))
    return run_dir / LOCK_NAME


def _recorded_path(path: Path, run_dir: Path) -> str:
    """Returns the path of a plugin file from a run's folder, so that a project can be moved as a whole.

    A file outside of the project, the folder that contains the workspace, has its absolute path.
    """
    absolute, folder = path.absolute(), run_dir.absolute()
    project = folder.parents[2] if len(folder.parents) > 3 else folder
    return os.path.relpath(absolute, folder) if absolute.is_relative_to(project) else str(absolute)


def _settings_of_data(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns what decides which data are read, not from where or by how many processes."""
    return {name: str(value) for name, value in flatten(values) if name not in ("workers", "root", "file", "folder")}


def data_drift(locked: Mapping[str, Any], recipe: Recipe, fingerprint: str | None) -> Drift | None:
    """Returns the difference between the data of a lock and those that are there now; None if there is none.

    Of other settings for the data, which are a drift of their own, other data are expected.
    """
    before = (locked.get(DATA) or {}).get("fingerprint")
    is_same_source = _settings_of_data(locked["recipe"]["data"]) == _settings_of_data(recipe.values()["data"])
    if before is None or before == fingerprint or not is_same_source:
        return None
    return Drift("data.fingerprint", str(before)[:12], str(fingerprint or "absent")[:12], matters=True)


def update_lock(recipe: Recipe, run_dir: Path, catalog: Registry, step: int, fingerprint: str | None = None) -> None:
    """Replaces the lock of a run that is resumed with other settings, code or packages.

    The lock until then stays beside it, with the step up to which it was true.
    """
    path = run_dir / LOCK_NAME
    locked = read_lock(path)
    previous = run_dir / f"until-{step}.lock.yaml"
    if not previous.exists():
        write_durably(previous, path.read_text())
    facts = _facts(recipe, catalog, source(recipe.path)) | {"code": code_of(recipe)}
    before = dict(flatten(locked["recipe"]))
    origins = dict(locked.get("origins") or {})
    for name, value in flatten(facts["recipe"]):
        if name not in before or before[name] != value:
            origins[name] = recipe.origins[name].cited() if name in recipe.origins else "resume"
    # The code comes last: a lock that is cut anywhere lacks of it.
    locked.pop("code", None)
    locked |= {} if fingerprint is None else {DATA: {"fingerprint": fingerprint}}
    write_durably(path, dump(locked | {"digest": recipe.digest, "origins": redact_values(origins)} | facts))


def copy_recipe(recipe: Recipe, target: Path) -> None:
    """Copies the file that a recipe was loaded from, with every secret in it masked, also what was replaced since.

    A recipe that was passed as a mapping is written with all of its values.
    """
    if recipe.path == Path(MAPPING):
        write_durably(target, redact(dump(recipe.values())))
        return
    text = recipe.path.read_bytes().decode("utf-8-sig", errors="replace")
    with suppress(RecipeError):  # it was changed after it was loaded
        leaves = (leaf for leaf in secrets_of(recipe, parse(text, recipe.path, [])) if leaf.value is not None)
        spans = {(leaf.start, leaf.start + len(leaf.spelled)) for leaf in leaves}  # what an alias repeats is there once
        for start, end in sorted(spans, reverse=True):
            text = f"{text[:start]}'{MASK}'{text[end:]}"
    write_durably(target, redact(text))


def read_lock(lock: Path) -> dict[str, Any]:
    """A lock as plain values; that it is missing, damaged, or of a newer runner is a ``RecipeError`` with a remedy."""
    problems: list[Problem] = []
    try:
        root = read(lock, problems)
        known = {key: node for key, node in root.children.items() if key in _Whole.model_fields}
        fill(_Whole, replace(root, value=known), "", problems)
    except RecipeError as error:
        problems += error.problems
    if problems:
        raise RecipeError([*problems, Problem(Place(lock), "", _REMEDY)])
    values: dict[str, Any] = root.plain()
    recorded = map(str, values.get(PLUGIN_FILES) or ())
    values[PLUGIN_FILES] = [_plugin_file(lock, path) for path in recorded]
    if values["lock"] > VERSION:
        message = f"format {values['lock']} is newer than this runner reads ({VERSION}): update it"
        raise RecipeError([Problem(root.asked("lock"), "lock", message)])
    return values


def _plugin_file(lock: Path, recorded: str) -> str:
    """Returns the path of a plugin file; of a lock that was copied elsewhere, that of the same name here."""
    path = Path(os.path.normpath(lock.absolute().parent / recorded))
    here = Path(path.name).absolute()
    return str(here if here.is_file() and not path.exists() else path)


def plugins_again(locked: Mapping[str, Any], given: Iterable[Path]) -> dict[Path, str]:
    """Plugin files that a lock, as ``read_lock`` returns it, was written with and of whose names none is given.

    Each with why it cannot be used again; empty if it is where it was, and as it was.
    """
    names, found = {path.name for path in given}, {}
    for path in map(Path, locked.get(PLUGIN_FILES) or ()):
        if path.name not in names:
            try:
                provider = Provider(path.name, sha256(path)[:PROVIDER_DIGITS])
                found[path] = "" if str(provider) in (locked.get("plugins") or {}).values() else "has changed since"
            except OSError as error:
                found[path] = f"cannot be read at {path}: {error.strerror}"
    return found


def drift(lock: Path, recipe: Recipe, catalog: Registry) -> list[Drift]:
    """What has changed since a lock was written, from which the recipe was loaded: first what matters."""
    locked = read_lock(lock)
    facts = _facts(recipe, catalog, source(recipe.path)) | {"code": code_of(recipe)}
    found = []
    for section in (*_MATTERS, *_SHOWN):
        old, new = dict(flatten(locked.get(section) or {})), dict(flatten(facts[section]))
        names = old.keys() & new.keys() if section in _OF_MACHINE else old.keys() | new.keys()
        for name in sorted(name for name in names if str(old.get(name)) != str(new.get(name))):
            was, now = str(old.get(name, "absent")), str(new.get(name, "absent"))
            path = f"{section}.{name}"
            found.append(Drift(path, was, now, section in _MATTERS and path not in _FREE))
    return found


def locked_threads(lock: Path) -> int | None:
    """Threads with which a run began; None if its lock does not have them."""
    values = read_lock(lock)
    threads = values.get(PROCESSOR) or values.get("threads") or {}
    count = threads.get("threads", threads.get("torch"))
    return count if isinstance(count, int) else None


def code_of(recipe: Recipe) -> dict[str, str]:
    """Digests of the code that a recipe runs, by package."""
    stages = (*recipe.stages.values(), *recipe.inference.values())
    return code_digests([type(recipe.model), type(recipe.data), *map(type, stages)])


def _facts(recipe: Recipe, catalog: Registry, checkout: Checkout | None) -> dict[str, Any]:
    """What can change a result beside the code, redacted alike for a lock and for what it is compared with."""
    threads: dict[str, Any] = {name: os.environ.get(name) for name in _THREADS}
    if torch := sys.modules.get("torch"):
        threads |= {"torch": torch.get_num_threads(), "torch_interop": torch.get_num_interop_threads()}
    providers = _providers(recipe, catalog)
    packages, tools = versions({provider.name for provider in providers.values()})
    facts = {
        "recipe": recipe.values(),
        "source": {} if checkout is None else {"commit": checkout.commit, "patch_sha256": checkout.patch_sha256},
        # A local file is known by its name and content: where it lies, seen from where, is no matter.
        "plugins": {name: f"{Path(each.name).name} {each.version}" for name, each in providers.items()},
        "packages": packages,
        "tools": {"runner": __version__} | tools,
        "hardware": dict(hardware()),
        "threads": threads,
    }
    return dict(redact_values(facts))


def _providers(recipe: Recipe, catalog: Registry) -> dict[str, Provider]:
    """Who brought the plugins in use."""
    used: dict[Section, Iterable[str]] = {"model": [recipe.model.kind], "data": [recipe.data.kind]}
    used |= {"optimization": recipe.stages, "inference": recipe.inference}
    return {f"{section}.{kind}": catalog.provider(section, kind) for section in used for kind in used[section]}
