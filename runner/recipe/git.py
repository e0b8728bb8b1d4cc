"""The state of the source that a run is made from."""

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import runner

_SECRETS = (".env*", "*.pem", "*.key", "id_*", ".netrc", ".pypirc", "*credential*", "*secret*")
"""Files that are kept out of a patch even if somebody tracks them."""
_DIFF = ("diff", "--binary", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty", "--no-color")


@dataclass(frozen=True)
class Checkout:
    """A commit and what has been changed since in tracked files."""

    commit: str
    patch: str
    """For ``git apply``; empty if nothing has changed."""

    @property
    def patch_sha256(self) -> str | None:
        """SHA-256 of the patch; None if there is none."""
        return hashlib.sha256(self.patch.encode("utf-8", "surrogateescape")).hexdigest() if self.patch else None


def source(recipe: Path, results: Path | None = None) -> Checkout | None:
    """The checkout that the runner itself runs from, or else the one that a recipe lies in; as ``checkout``."""
    package = Path(runner.__file__)
    # An installed package may lie in somebody's checkout without being part of it.
    is_tracked = _git(package.parent, "ls-files", "--error-unmatch", package.name) is not None
    return checkout(package.parent if is_tracked else recipe.absolute().parent, results)


def checkout(folder: Path, results: Path | None = None) -> Checkout | None:
    """The checkout that a folder lies in; None if there is none, or git cannot tell.

    Args:
        folder: anywhere in it.
        results: a folder in which a change is none of the source's.
    """
    top, commit = _git(folder, "rev-parse", "--show-toplevel"), _git(folder, "rev-parse", "HEAD")
    if not top or not commit:
        return None
    excluded = [f":(exclude,glob,icase)**/{pattern}" for pattern in _SECRETS]
    if results is not None and results.resolve().is_relative_to(top.strip()):
        excluded.append(f":(exclude,literal,top){results.resolve().relative_to(top.strip())}")
    patch = _git(Path(top.strip()), *_DIFF, "HEAD", "--", ".", *excluded)
    return None if patch is None else Checkout(commit.strip(), patch)


def _git(folder: Path, *arguments: str) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "--no-optional-locks", *_without_programs(git, folder), "-C", str(folder), *arguments]
    result = subprocess.run(command, capture_output=True, check=False)
    return result.stdout.decode("utf-8", "surrogateescape") if result.returncode == 0 else None


@cache
def _without_programs(git: str, folder: Path) -> tuple[str, ...]:
    """Options for a repository that somebody else has made, which may name programs for git to start."""
    filters = ("config", "--local", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process)$")
    found = subprocess.run([git, "-C", str(folder), *filters], capture_output=True, check=False, text=True)
    settings = ["core.fsmonitor=false", f"core.hooksPath={os.devnull}"]
    settings += [f"{name}=" for name in found.stdout.splitlines()]
    return tuple(part for setting in settings for part in ("-c", setting))
