"""Files of data that others publish: where they are looked for, and how they are fetched and
checked.
"""

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

_TIMEOUT_SECONDS = 60.0
"""Longest silence of a server."""


@dataclass(frozen=True)
class DataFile:
    """A published file, known by its digest."""

    name: str
    """Name of the file on disk and in recipes."""
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
        """Returns an absolute path, or a bare name unchanged.

        Args:
            text: The value of the setting.
            source: The file in which it is written; any string for a value of the command line,
                which starts at the working directory.
        """
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
    configured = (root, os.environ.get("RUNNER_DATA"))
    paths = [Path(text).absolute() for text in configured if text]
    cache = platformdirs.user_cache_dir("runner", appauthor=False)
    return [*paths, Path(cache, "data")]


def find(
    name: str, root: str | None = None, published: Iterable[DataFile] = ()
) -> Path | None:
    """Returns the first file of that name in ``folders``; an absolute path is returned unchanged.

    Args:
        name: Name of the file, or its path.
        root: The recipe's ``data.root``.
        published: Files whose content is checked.

    Raises:
        UsageError: A published file of that name has other content.
    """
    paths = [folder / name for folder in folders(root)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None
    for file in published:
        difference = _difference(path, file) if file.name == name else ""
        if difference:
            hint = f"remove it and get it again with: runner data get {name}"
            raise UsageError(f"{path} is not what it is called: {difference}; {hint}")
    return path


def fetch(file: DataFile) -> tuple[Path, bool]:
    """Downloads a missing file into ``RUNNER_DATA`` or the user's cache; returns
    whether that was necessary.

    Raises:
        RunnerError: The file cannot be downloaded, or has another digest. Nothing is left on disk.
    """
    target = folders()[0] / file.name
    if find(file.name, None, [file]) == target:
        return target, False
    digest = f"SHA-256 {file.sha256}"
    hint = f"if you have it from elsewhere ({digest}), put it into {target.parent}"
    if not file.url:
        raise RunnerError(f"{file.name} has no address: {file.about}; {hint}")
    try:
        # urlopen would read local files, too.
        if not file.url.startswith(("https://", "http://")):
            raise ValueError("no address of the web")
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as partial:
            _download(file.url, partial)
            difference = _difference(partial, file)
            if difference:
                problem = f"is not what it should be: {difference}; nothing was kept"
                raise RunnerError(f"{file.name} from {file.url} {problem}")
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(error, HTTPError):
            error.close()
        problem = f"could not be fetched from {file.url}: {reason}"
        raise RunnerError(f"{file.name} {problem}; {hint}") from error
    return target, True


def _download(url: str, path: Path) -> None:
    response = urlopen(url, timeout=_TIMEOUT_SECONDS)  # noqa: S310 (http and https alone)
    with response, path.open("xb") as file:
        shutil.copyfileobj(response, file)


def _difference(path: Path, file: DataFile) -> str:
    """Returns the difference between a file on disk and the published one; empty if
    they are the same.
    """
    digest = sha256(path)
    if digest == file.sha256:
        return ""
    return f"its SHA-256 is {digest}, and should be {file.sha256}"
