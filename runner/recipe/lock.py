"""The lock of a run: what it was made from, and what has changed since."""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from runner import __version__
from runner.hardware import hardware
from runner.recipe.catalog import Catalog, Section
from runner.recipe.git import Checkout, source
from runner.recipe.recipe import Recipe, flatten
from runner.recipe.scalars import dump
from runner.recipe.source import read

VERSION = 1
LOCK_NAME = "recipe.lock.yaml"
PATCH_NAME = "source.patch"
_DISTRIBUTION = "proven-runner"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_OF_MACHINE = ("hardware", "threads")
"""Sections of which a run that has imported torch knows more than one that has not."""


def write_lock(recipe: Recipe, run_dir: Path, catalog: Catalog) -> Path:
    """Writes ``recipe.lock.yaml``, and ``source.patch`` beside it if the source differs from its commit.

    The lock is itself a recipe: running it runs the same values again. It holds the recipe's values, so a plugin must
    declare a secret as ``SecretStr``, which is masked; of the environment it holds versions and numbers of threads.

    Args:
        recipe: the recipe of the run.
        run_dir: the run's folder.
        catalog: who brought the plugins.

    Returns:
        The path of the lock.
    """
    checkout = source(recipe.path)
    if checkout is not None and checkout.patch:
        (run_dir / PATCH_NAME).write_text(checkout.patch, encoding="utf-8", errors="surrogateescape", newline="")
    facts = _environment(recipe, catalog, checkout)
    head = {"lock": VERSION, "digest": recipe.digest, "recipe": recipe.values()}
    origins = {"origins": {path: place.cited() for path, place in recipe.origins.items()}}
    lock = run_dir / LOCK_NAME
    lock.write_text(dump(head | facts | origins), encoding="utf-8")
    return lock


def drift(lock: Path, recipe: Recipe, catalog: Catalog) -> list[str]:
    """What has changed since a lock was written, one line each.

    Args:
        lock: the lock.
        recipe: the recipe that was loaded from it.
        catalog: who brings the plugins now.

    Raises:
        RecipeError: the lock cannot be read.
    """
    locked = read(lock, []).plain()
    now = {"recipe": recipe.values()} | _environment(recipe, catalog, source(recipe.path))
    lines = []
    for section, values in now.items():
        old, new = dict(flatten(locked.get(section) or {})), dict(flatten(values))
        names = old.keys() & new.keys() if section in _OF_MACHINE else old.keys() | new.keys()
        differing = sorted(name for name in names if old.get(name) != new.get(name))
        lines += [f"{section}.{name}: {_shown(old, name)} in the lock, {_shown(new, name)} now" for name in differing]
    return lines


def _shown(values: Mapping[str, Any], name: str) -> str:
    return str(values[name]) if name in values else "absent"


def _environment(recipe: Recipe, catalog: Catalog, checkout: Checkout | None) -> dict[str, dict[str, Any]]:
    """Everything beside the recipe that can change a result, as plain values."""
    used: list[tuple[Section, str]] = [("model", recipe.model.kind), ("data", recipe.data.kind)]
    used += [("optimization", kind) for kind in recipe.stages]
    providers = {f"{section}.{kind}": catalog.provider(section, kind) for section, kind in used}
    return {
        "source": {} if checkout is None else {"commit": checkout.commit, "patch_sha256": checkout.patch_sha256},
        "plugins": {name: str(provider) for name, provider in providers.items()},
        "packages": {"runner": __version__} | _versions({provider.name for provider in providers.values()}),
        "hardware": dict(hardware()),
        "threads": _threads(),
    }


def _threads() -> dict[str, Any]:
    threads: dict[str, Any] = {name: os.environ.get(name) for name in _THREADS}
    torch = sys.modules.get("torch")
    if torch is not None:
        threads |= {"torch": torch.get_num_threads(), "torch_interop": torch.get_num_interop_threads()}
    return threads


def _versions(providers: Iterable[str]) -> dict[str, str]:
    """Versions of the runner, of the plugins' distributions, and of everything that these need and find."""
    versions: dict[str, str] = {}
    asked_for = {_DISTRIBUTION, *providers}
    queue = sorted(asked_for)
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name in versions:
            continue
        try:
            found = distribution(name)
        except (PackageNotFoundError, ValueError):  # not needed here, or a local file
            continue
        versions[name] = found.version
        for requirement in found.requires or ():
            # An extra of the runner or of a plugin may be in use, unless it is for tests only.
            if "extra ==" not in requirement or (name in asked_for and '"test"' not in requirement):
                queue.append(_name(requirement))
    return dict(sorted(versions.items()))


def _name(requirement: str) -> str:
    """The distribution in ``rich[extra]>=14; python_version > "3"``."""
    return re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]
