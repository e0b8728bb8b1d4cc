"""Files of data that others publish: where they are looked for, and how they are fetched and checked."""

from __future__ import annotations

import hashlib
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Annotated

import platformdirs

from runner.system.errors import RunnerError, UsageError
from runner.system.files import sync

_PATIENCE_SECONDS = 60.0
"""How long a server may be silent."""


@dataclass(frozen=True)
class DataFile:
    """A published file, known by its digest."""

    name: str
    """Under which it is kept and a recipe names it."""
    url: str
    """Where it is, for good: with a commit in it."""
    sha256: str
    size: int
    """Bytes."""
    about: str
    """What it is, by whom, and under which licence."""


@dataclass(frozen=True)
class Anchor:
    """Marks a setting that is a path: a relative one starts at the file that it is written in.

    On the command line (``--set``) that is the working directory.
    """

    named: bool = False
    """Whether a bare name with no such file beside the recipe is that of a file in the folders of data."""


RecipePath = Annotated[str, Anchor()]
DataName = Annotated[str, Anchor(named=True)]


def anchored(text: str, source: Path | str, anchor: Anchor) -> str:
    """A path as a recipe says it, made absolute; or a bare name, as it is.

    Args:
        text: the path.
        source: the file in which it is written; or what is no file.
        anchor: what the setting says of itself.
    """
    folder = source.parent if isinstance(source, Path) else Path()
    path = Path(os.path.abspath(folder / Path(text).expanduser()))
    is_name = anchor.named and Path(text).name == text
    return text if is_name and not path.exists() else str(path)


def folders(root: str | None = None) -> list[Path]:
    """Where data files are looked for, in order: the recipe's ``data.root``, ``RUNNER_DATA``, the user's cache."""
    named = [Path(text).absolute() for text in (root, os.environ.get("RUNNER_DATA")) if text]
    return [*named, Path(platformdirs.user_cache_dir("runner", appauthor=False), "data")]


def find(name: str, root: str | None = None, known: Iterable[DataFile] = ()) -> Path | None:
    """The first file of that name in ``folders``; an absolute path is itself.

    Raises:
        UsageError: it is none of those bytes that a known file of that name should have.
    """
    path = next((path for folder in folders(root) if (path := folder / name).is_file()), None)
    file = next((file for file in known if file.name == name), None)
    if path is not None and file is not None and (found := _sha256(path)) != file.sha256:
        raise UsageError(
            f"{path} is not what it is called: its SHA-256 is {found}, and should be {file.sha256}; remove it and "
            f"get it again with: runner data get {name}"
        )
    return path


def fetch(file: DataFile) -> tuple[Path, bool]:
    """Downloads a file into ``RUNNER_DATA`` or the user's cache, unless it is there.

    Returns:
        Where it is, and whether it had to be downloaded.

    Raises:
        UsageError: another file of that name is there.
        RunnerError: it cannot be had, or its digest is wrong; nothing is kept then.
    """
    target = folders()[0] / file.name
    if find(file.name, None, [file]) == target:
        return target, False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _download(file, target)
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise RunnerError(
            f"{file.name} could not be fetched from {file.url}: {reason}; if you have it from elsewhere (SHA-256 "
            f"{file.sha256}), put it into {target.parent}"
        ) from error
    return target, True


def _download(file: DataFile, target: Path) -> None:
    if not file.url.startswith(("https://", "http://")):
        raise ValueError("no address of the web")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # of a killed process; opening with "x" never follows a link
    try:
        with partial.open("xb") as kept, urllib.request.urlopen(file.url, timeout=_PATIENCE_SECONDS) as answer:  # noqa: S310 (http and https alone)
            shutil.copyfileobj(answer, kept)
            kept.flush()
            os.fsync(kept.fileno())
        if (found := _sha256(partial)) != file.sha256:
            raise RunnerError(
                f"{file.name} from {file.url} is not what it should be: its SHA-256 is {found}, and should be "
                f"{file.sha256}; nothing was kept"
            )
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    sync(target.parent)


def _sha256(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
