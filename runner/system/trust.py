"""Recognizes what this user's runner has written on this machine, by a key that no workspace contains.

The key is in the user's state folder. A signed text starts with a comment line that has its HMAC,
which also depends on the folder of the text: a moved or copied file may have other neighbours, and
is not recognized.
"""

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

import platformdirs

_KEY_BYTES = 32
_SIGNATURE = re.compile(r"# signed: ([0-9a-f]{64})\n")
_log = logging.getLogger(__name__)


def key_path() -> Path:
    """Returns where the key is: ``$XDG_STATE_HOME/runner/key``, by default in ``~/.local/state``."""
    return Path(platformdirs.user_state_dir("runner", appauthor=False), "key")


def signed(text: str, folder: Path) -> str:
    """Returns a text with its signature in a comment above it; without one if no key can be written or read.

    Args:
        text: What is signed.
        folder: Where it will be.
    """
    try:
        key = _read_key() or _create_key()
    except OSError as error:
        _log.warning("%s: %s; plugin files have to be named with --plugin again", key_path(), error.strerror)
        return text
    return f"# signed: {_digest(key, text, folder)}\n{text}"


def is_signed(text: str, folder: Path) -> bool:
    """Returns whether ``signed`` has returned this text to this user, on this machine and for this folder."""
    match = _SIGNATURE.match(text)
    key = None
    with suppress(OSError):
        key = _read_key()
    if match is None or key is None:
        return False
    return hmac.compare_digest(match[1], _digest(key, text[match.end() :], folder))


def is_own(path: Path) -> bool:
    """Returns whether a file or folder exists, is not a link and belongs to this user."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)


def _digest(key: bytes, text: str, folder: Path) -> str:
    message = os.fsencode(folder.resolve()) + b"\0" + text.encode("utf-8", "surrogateescape")
    return hmac.new(key, message, hashlib.sha256).hexdigest()


def _read_key() -> bytes | None:
    """Returns the key; None if there is none that this user alone can have written."""
    try:
        descriptor = os.open(key_path(), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        key = file.read(_KEY_BYTES + 1) if stat.S_ISREG(status.st_mode) and is_private else b""
    if len(key) != _KEY_BYTES:
        raise OSError(None, "not a key that this user alone can read; remove it")
    return key


def _create_key() -> bytes:
    """Writes a new key, unless another process does so at the same time, and returns the key that is there then."""
    path = key_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    key = _read_key()
    if key is None:
        raise OSError(None, "cannot be read")
    return key
