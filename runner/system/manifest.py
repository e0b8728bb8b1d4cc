"""The manifest of a run or of a registered model: SHA-256 and size of the files that are read from its folder.

A checkpoint has a separate manifest, because it gets its name, with all of its files, in one step.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.system.errors import DamagedError
from runner.system.faults import reach
from runner.system.files import open_file, read_regular, rename, sync, write_durably
from runner.system.stored_json import is_count, is_digest, sealed, split_sealed

NAME = "runner-manifest.json"
FORMAT = 1
_MOST_FILES = 10_000
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"
_PATH = re.compile(rf"{_PART}(?:/{_PART}){{0,4}}")
"""Names of files in a manifest: relative, without hidden parts."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileDigest:
    """SHA-256 of a file in hexadecimal digits, and its size in bytes."""

    sha256: str
    size: int

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """Returns that of a regular file; an ``OSError`` if it is none."""
        with open(open_file(path, os.O_RDONLY), "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(digest, os.fstat(file.fileno()).st_size)

    @classmethod
    def of_content(cls, content: bytes) -> FileDigest:
        """Returns that of a file with this content."""
        return cls(hashlib.sha256(content).hexdigest(), len(content))


class Manifest:
    """The manifest of a folder.

    A file has one entry, or two while it is replaced: after a kill, it has the old or the new
    content, and both are complete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / NAME

    @classmethod
    def of(cls, folder: Path) -> Manifest:
        """Returns the manifest that covers a folder: the folder's, or else that of the
        parent folder.
        """
        around = cls(folder.parent)
        return around if around.exists() and not cls(folder).exists() else cls(folder)

    def exists(self) -> bool:
        """Returns whether the manifest exists; folders of earlier versions have none."""
        return os.path.lexists(self.path)

    def entries(self) -> dict[str, list[FileDigest]]:
        """Returns the digests of all files by name; nothing without a manifest.

        Raises:
            DamagedError: the manifest is not what was written.
        """
        if not self.exists():
            return {}
        try:
            values, is_whole = split_sealed(self.path)
            if not is_whole:
                raise ValueError("damaged (its checksum differs); remove it to read this folder without a comparison")
            return _entries(values)
        except (OSError, ValueError) as error:
            raise DamagedError(f"{self.path}: {getattr(error, 'strerror', None) or error}") from None

    def names(self, path: Path) -> bool:
        """Returns whether it has an entry for a file."""
        return self._name(path) in self.entries()

    def check(self, path: Path) -> None:
        """Compares a file with its entry.

        Raises:
            DamagedError: the file is not what was written, missing, no regular file, or has no entry.
        """
        try:
            self.check_digest(path, FileDigest.of(path))
        except OSError as error:
            raise DamagedError(f"{path}: {error.strerror or error}") from None

    def check_digest(self, path: Path, digest: FileDigest) -> None:
        """Compares the digest of a file's content with its entry; raises as ``check``."""
        digests = self.entries().get(self._name(path))
        if digests is None:
            raise DamagedError(f"{path}: is not in {NAME}, which names the files of this folder that are read")
        if digest not in digests:
            raise DamagedError(f"{path}: damaged (its checksum differs from that in {NAME})")

    def is_whole(self, path: Path) -> bool:
        """Returns whether a file that can be created again exists and is unchanged;
        warns if it is damaged.
        """
        try:
            if not self.names(path) or not os.path.lexists(path):
                return False
            self.check(path)
        except DamagedError as error:
            _log.warning("%s; it is made again", error)
            return False
        return True

    def store_text(self, path: Path, text: str) -> None:
        """Writes a text file durably, together with its entry; an ``OSError`` leaves the file as it was."""
        name = self._name(path)
        digest = FileDigest.of_content(text.encode(errors="surrogateescape"))
        with self._locked():
            entries = self._entries_or_none()
            self._write({**entries, name: [digest, *_current(path, entries.get(name, []))]})
            write_durably(path, text)
            reach("manifest.replaced")
            self._write({**entries, name: [digest]})

    def adopt(self, files: Mapping[Path, Path]) -> None:
        """Moves files to their places, each durably, and gives them entries.

        Args:
            files: The places where files are now, by those where they belong.

        Raises:
            OSError: the disk refuses it.
        """
        with self._locked():
            digests = {path: FileDigest.of(source) for path, source in files.items()}
            for path, source in files.items():
                sync(source)
                rename(source, path)
                sync(path.parent)
            added = {self._name(path): [digest] for path, digest in digests.items()}
            self._write({**self._entries_or_none(), **added})

    def add(self, files: Mapping[Path, FileDigest]) -> None:
        """Gives files that are in their places entries with these digests."""
        with self._locked():
            added = {self._name(path): [digest] for path, digest in files.items()}
            self._write({**self._entries_or_none(), **added})

    def _entries_or_none(self) -> dict[str, list[FileDigest]]:
        """Returns the entries to which others are added; of a damaged manifest none is believed."""
        try:
            return self.entries()
        except DamagedError as error:
            _log.warning("%s; it is written again", error)
            return {}

    def _write(self, entries: Mapping[str, list[FileDigest]]) -> None:
        for name in entries:
            if _PATH.fullmatch(name) is None:
                raise OSError(errno.EINVAL, "cannot be named in a manifest", name)
        files = {
            name: [{"sha256": digest.sha256, "size": digest.size} for digest in digests]
            for name, digests in sorted(entries.items())
        }
        write_durably(self.path, sealed({"format": FORMAT, "files": files}))

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Entered around a change, because a server and a training may change it at the same time."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # A network disk may refuse to lock a folder. A lost entry then costs making a file again.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _current(path: Path, digests: list[FileDigest]) -> list[FileDigest]:
    """Returns that of the digests which the file has now; none of a file that is missing or damaged."""
    if not digests:
        return []
    with suppress(OSError):
        current = FileDigest.of(path)
        return [current] if current in digests else []
    return []


def read_checked(path: Path, most_bytes: int) -> bytes:
    """Reads a regular file of limited size, and compares it with the manifest of its folder if
    there is one.

    Raises:
        OSError: It cannot be read, is larger, or is not a regular file.
        DamagedError: It is not the content that was written, or the manifest has no entry for it.
    """
    content = read_regular(path, most_bytes)
    manifest = Manifest(path.parent)
    if manifest.exists():
        manifest.check_digest(path, FileDigest.of_content(content))
    return content


def _entries(values: Mapping[str, Any]) -> dict[str, list[FileDigest]]:
    if values.get("format") != FORMAT:
        raise ValueError(f"its format is {values.get('format')!r:.20}, and this version of the runner reads {FORMAT}")
    files = values.get("files")
    if not isinstance(files, dict) or len(files) > _MOST_FILES:
        raise ValueError(f"files should be a mapping with at most {_MOST_FILES:,} entries")
    return {name: _digests(name, digests) for name, digests in files.items()}


def _digests(name: str, digests: Any) -> list[FileDigest]:
    if _PATH.fullmatch(name) is None:
        raise ValueError(f"names a file that no run has: {name!r:.80}")
    if not isinstance(digests, list) or not 1 <= len(digests) <= 2:
        raise ValueError(f"files: {name}: should be a list of one or two digests")
    for digest in digests:
        is_valid = isinstance(digest, dict) and digest.keys() == {"sha256", "size"}
        if not is_valid or not is_digest(digest["sha256"]) or not is_count(digest["size"]):
            raise ValueError(f"files: {name}: should have the keys sha256 and size")
    return [FileDigest(digest["sha256"], digest["size"]) for digest in digests]
