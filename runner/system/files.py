"""File operations that survive a crash, in folders whose links are not followed.

All writes, renames and deletions in a workspace go through this module. Inside a guarded folder (``guard``), no
component of a path may be a symbolic link: each is opened relative to the one before. Only regular files are opened.
"""

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_TEXT_BYTES = 16 * 2**20
"""Largest file that is read in one piece, unless a caller has another limit."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_guarded: set[Path] = set()


def guard(folder: Path) -> None:
    """Declares a folder in which no link is followed from now on; its path must be free of
    links.
    """
    _guarded.add(folder)


def write_durably(path: Path, text: str) -> None:
    """Writes a text to a temporary file, makes it durable and renames it; after an ``OSError`` the
    file is unchanged.

    The text is UTF-8 and its line ends are unchanged; lone surrogates become the bytes
    that they represent.
    """
    with replacing(path) as partial:
        descriptor = open_file(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)


def write_text(path: Path, text: str) -> None:
    """Writes a text file, or replaces its content; a crash may leave a part of it."""
    with open(
        open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        "w",
        encoding="utf-8",
        errors="surrogateescape",
        newline="",
    ) as file:
        file.write(text)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary file that durably replaces another one at the end of a
    ``with`` without error.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    remove(partial)  # of a killed process
    try:
        yield partial
        sync(partial)
        rename(partial, path)
    finally:
        remove(partial)
    sync(path.parent)


def open_file(path: Path, flags: int, mode: int = 0o666) -> int:
    """Opens a regular file and returns its descriptor.

    Args:
        path: The file. If it is a link, it is not followed.
        flags: As for ``os.open``.
        mode: Permissions of a new file.

    Raises:
        OSError: It cannot be opened, is not a regular file, or is behind a link in a guarded folder.
    """
    with _parent(path) as folder, _naming_links(path):
        descriptor = os.open(path.name, flags & ~os.O_TRUNC | _FILE, mode, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"{path} is not a regular file", str(path))
        # The content would be in the other place, too.
        if status.st_nlink > 1 and flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EMLINK, f"{path} has a second name elsewhere (a hard link)", str(path))
        # Only now, because a file that is refused stays as it is.
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path, limit: int = MAX_TEXT_BYTES, follow: bool = False) -> bytes:
    """Reads a regular file.

    Args:
        path: The file.
        limit: Number of bytes above which nothing is read.
        follow: Whether links are followed, for files that are not in a workspace.

    Raises:
        OSError: It cannot be read, is larger, is not a regular file, or is a link.
    """
    if follow:
        path = path.resolve()
    with open(open_file(path, os.O_RDONLY), "rb") as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"{path} is larger than {limit:,} bytes", str(path))
        return file.read(limit)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Makes a folder, and those above it, unless it exists.

    Raises:
        OSError: It cannot be made, or is behind a link in a guarded folder.
    """
    path = Path(os.path.abspath(path))
    root = _root_of(path)
    if root is None or path == root:
        path.mkdir(mode, parents=True, exist_ok=True)
        return
    make_folder(path.parent)
    with _parent(path) as folder:
        try:
            os.mkdir(path.name, mode, dir_fd=folder)
        except FileExistsError:
            os.close(_open_below(folder, path))


def remove(path: Path) -> None:
    """Deletes a file, a link (not its target) or a folder with its contents; does nothing if it does not exist.

    Raises:
        OSError: It cannot be deleted, or is behind a link in a guarded folder.
    """
    with suppress(FileNotFoundError), _parent(path) as folder:
        status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            # Safe against links that are put in its way.
            shutil.rmtree(path.name, dir_fd=folder)
        else:
            os.unlink(path.name, dir_fd=folder)


def remove_quietly(path: Path) -> None:
    """Deletes as ``remove`` as far as possible, and reports no error."""
    with suppress(OSError):
        remove(path)


def rename(path: Path, target: Path) -> None:
    """Renames a file or folder; a file replaces another one.

    Raises:
        OSError: It cannot be renamed, or one of the two is behind a link in a guarded folder.
    """
    with _parent(path) as source_folder, _parent(target) as target_folder:
        os.replace(path.name, target.name, src_dir_fd=source_folder, dst_dir_fd=target_folder)


def link(path: Path, target: Path) -> None:
    """Gives a regular file a second name, in the same file system.

    Raises:
        OSError: The file system has no hard links, or the file is a link or behind one in a guarded folder.
    """
    with _parent(path) as source_folder, _parent(target) as target_folder:
        if not stat.S_ISREG(os.stat(path.name, dir_fd=source_folder, follow_symlinks=False).st_mode):
            raise OSError(errno.EINVAL, f"{path} is not a regular file", str(path))
        folders = {"src_dir_fd": source_folder, "dst_dir_fd": target_folder}
        os.link(path.name, target.name, **folders, follow_symlinks=False)


def sync(path: Path) -> None:
    """Makes a file, or the names in a folder, durable; ``OSError`` if it does not exist, or the disk fails."""
    with _parent(path) as folder:
        descriptor = os.open(path.name, os.O_RDONLY | _FILE, dir_fd=folder)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Returns the digest of a regular file, in hexadecimal digits; links are followed."""
    with open(open_file(path.resolve(), os.O_RDONLY), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy(path: Path, target: Path) -> None:
    """Copies a regular file, which is not followed if it is a link."""
    with open(open_file(path, os.O_RDONLY), "rb") as source:
        descriptor = open_file(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(descriptor, "wb") as copied:
            shutil.copyfileobj(source, copied)


def is_writable(path: Path) -> bool:
    """Returns whether this user can write a file or folder, or make it if it does not exist."""
    nearest = next(ancestor for ancestor in (path, *path.parents) if os.path.lexists(ancestor))
    return os.access(nearest, os.W_OK)


def is_link(path: Path) -> bool:
    """Returns whether a path, or a folder above it in a guarded folder, is a symbolic link."""
    root = _root_of(path)
    components = [path]
    if root is not None:
        components += [folder for folder in path.parents if folder.is_relative_to(root)]
    # The guarded folder itself may be a link of the user's.
    return any(component.is_symlink() for component in components if component != root)


def _root_of(path: Path) -> Path | None:
    """Returns the outermost guarded folder that a path is in; None if there is none."""
    # A process may guard hundreds of folders, and this is called for every file.
    return next((folder for folder in (*reversed(path.parents), path) if folder in _guarded), None)


@contextmanager
def _parent(path: Path) -> Iterator[int]:
    """Opens the folder of a path, without following links below a guarded folder."""
    path = Path(os.path.abspath(path))
    root = _root_of(path.parent)
    anchor = path.parent if root is None else root
    descriptor = os.open(anchor, _FOLDER)
    try:
        for name in path.parent.relative_to(anchor).parts:
            inner = _open_below(descriptor, anchor := anchor / name)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _open_below(folder: int, path: Path) -> int:
    """Opens a folder by its name in an open one."""
    with _naming_links(path):
        return os.open(path.name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


@contextmanager
def _naming_links(path: Path) -> Iterator[None]:
    """Raises the errors of opening a link with a clearer message."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP) or not path.is_symlink():
            raise
        raise OSError(errno.ELOOP, f"{path} is a symbolic link, which is not followed", str(path)) from None
