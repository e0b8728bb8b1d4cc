"""Files that a crash or a power cut leaves whole: the old content or the new, never a part."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Writes a text file beside its place, makes it durable and renames it; an ``OSError`` leaves it as it was.

    The text is UTF-8 and its line ends stay as they are; lone surrogates become the bytes that they stand for.
    """
    with replacing(path) as partial, partial.open("x", encoding="utf-8", errors="surrogateescape", newline="") as file:
        file.write(text)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside another one, whose place it takes, durably, at the end of a ``with`` that does not fail."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # of a killed process; opening with "x" never follows a link
    try:
        yield partial
        sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Makes a file, or the names in a folder, durable; ``OSError`` if it does not exist, or the disk fails."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The digest of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
