"""Files of data that others publish: where they are looked for, and how they are fetched and checked."""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Annotated
from urllib.error import HTTPError
from urllib.request import urlopen

import platformdirs

from runner.system.errors import RunnerError, UsageError
from runner.system.files import replacing, sha256

_PATIENCE_SECONDS = 60.0
"""How long a server may be silent."""


@dataclass(frozen=True)
class DataFile:
    """A published file, known by its digest."""

    name: str
    """Under which it is kept and a recipe names it."""
    url: str
    """The permanent address, with a commit in it; empty if the file was made from others, as
    described in ``about``.
    """
    sha256: str
    size: int
    """Bytes."""
    about: str
    """Content, author and licence."""


@dataclass(frozen=True)
class Anchor:
    """Marks a setting that is a path: a relative one starts at the file that it is written in."""

    named: bool = False
    """Whether a bare name that is not next to the recipe may be a file in the folders of data."""

    def absolute(self, text: str, source: Path | str) -> str:
        """A path made absolute, or a bare name as it is; what is written in no file starts at the working directory."""
        folder = source.parent if isinstance(source, Path) else Path()
        path = Path(os.path.abspath(folder / Path(text).expanduser()))
        is_name = self.named and Path(text).name == text
        return text if is_name and not path.exists() else str(path)


RecipePath = Annotated[Path, Anchor()]
"""A path that starts at the recipe."""
DataName = Annotated[str, Anchor(named=True)]
"""A path that starts at the recipe, or the name of a file in the folders of data."""


def folders(root: str | None = None) -> list[Path]:
    """Returns the folders of data files in the order of the search: the recipe's ``data.root``,
    ``RUNNER_DATA``, the user's cache.
    """
    named = [Path(text).absolute() for text in (root, os.environ.get("RUNNER_DATA")) if text]
    return [*named, Path(platformdirs.user_cache_dir("runner", appauthor=False), "data")]


def find(name: str, root: str | None = None, known: Iterable[DataFile] = ()) -> Path | None:
    """The first file of that name in ``folders``; an absolute path is itself.

    A known file of that name that holds something else is a UsageError.
    """
    path = next((path for folder in folders(root) if (path := folder / name).is_file()), None)
    for file in known:
        if path is not None and file.name == name and (wrong := _difference(path, file)):
            again = f"remove it and get it again with: runner data get {name}"
            raise UsageError(f"{path} is not what it is called: {wrong}; {again}")
    return path


def fetch(file: DataFile) -> tuple[Path, bool]:
    """Downloads a missing file into ``RUNNER_DATA`` or the user's cache; returns
    whether that was necessary.

    What cannot be had, or has another digest, is a RunnerError, and nothing is kept.
    """
    target = folders()[0] / file.name
    if find(file.name, None, [file]) == target:
        return target, False
    by_hand = f"if you have it from elsewhere (SHA-256 {file.sha256}), put it into {target.parent}"
    if not file.url:
        raise RunnerError(f"{file.name} has no address: {file.about}; {by_hand}")
    try:
        if not file.url.startswith(("https://", "http://")):
            raise ValueError("no address of the web")
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as partial:
            with partial.open("xb") as kept, urlopen(file.url, timeout=_PATIENCE_SECONDS) as answer:  # noqa: S310 (http and https alone)
                shutil.copyfileobj(answer, kept)
            if wrong := _difference(partial, file):
                raise RunnerError(f"{file.name} from {file.url} is not what it should be: {wrong}; nothing was kept")
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(error, HTTPError):
            error.close()
        raise RunnerError(f"{file.name} could not be fetched from {file.url}: {reason}; {by_hand}") from error
    return target, True


def _difference(path: Path, file: DataFile) -> str:
    """Returns the difference between a file on disk and the published one; empty if
    they are the same.
    """
    found = sha256(path)
    return "" if found == file.sha256 else f"its SHA-256 is {found}, and should be {file.sha256}"
