"""Reads git repositories of any origin, without starting a program that their configuration names.

Git never reads the configuration of the repository: it works on a view, a temporary git directory
with a separate configuration and links to the objects, references and index of the repository.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runner.system.files import make_folder, read_regular, sha256, write_text

_TIMEOUT_SECONDS = 60.0
_MAX_BYTES = 2**20
"""Largest file of a git directory that is copied into a view."""
_KEPT_SETTINGS = re.compile(
    r"core\.(autocrlf|eol|filemode|ignorecase|symlinks|checkstat|trustctime|precomposeunicode|bigfilethreshold)"
    r"|extensions\.(objectformat|refstorage)"
)
"""Settings that decide how files are compared. None of them names a program or a file."""
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9]+")
_LINKED = ("objects", "refs", "reftable", "packed-refs")
_LFS = "lfs"
_LFS_ID = re.compile(rb"^oid sha256:([0-9a-f]{64})$", re.MULTILINE)
_DIFF = (
    "diff",
    "--no-ext-diff",
    "--no-textconv",
    "--ignore-submodules=dirty",
    "--no-color",
)


class GitError(Exception):
    """Git is not installed, or cannot read a repository."""


@dataclass(frozen=True)
class Repository:
    """A view of a repository, valid inside the ``with`` statement of ``open_repository``.

    Attributes:
        top: Folder of the working tree, without links in its path.
        commit: Hexadecimal name of the commit that is checked out.
    """

    top: Path
    commit: str
    _environment: Mapping[str, str]

    def is_tracked(self, path: Path) -> bool:
        """Returns whether a path, or a file in it, is tracked."""
        try:
            self._git("ls-files", "--error-unmatch", "--", str(path.resolve()))
        except GitError:
            return False
        return True

    def patch(self, excluded: Sequence[str]) -> str:
        """Returns what has changed in tracked files since the commit, for ``git apply``.

        The content of a file that Git LFS manages is excluded from the patch. A line at the top has
        its SHA-256.

        Args:
            excluded: Pathspecs of the files to leave out.
        """
        paths = ["--", ".", *excluded]
        changed = self._git(*_DIFF, "--name-only", "--no-renames", "-z", "HEAD", *paths)
        names = self._names_in_lfs(changed)
        notes = "".join(map(self._describe_lfs_file, names))
        pathspecs = [f":(exclude,literal,top){os.fsdecode(name)}" for name in names]
        diff = self._git(*_DIFF, "--binary", "HEAD", *paths, *pathspecs)
        return notes + diff.decode("utf-8", "surrogateescape")

    def _names_in_lfs(self, changed: bytes) -> list[bytes]:
        """Returns those of the changed files, separated by NUL, that Git LFS manages."""
        if not changed:
            return []
        output = self._git("check-attr", "--stdin", "-z", "filter", input_=changed)
        # Git prints name, attribute and value of every file.
        fields = output.split(b"\0")
        values_by_name = zip(fields[::3], fields[2::3], strict=False)
        return [name for name, value in values_by_name if value == _LFS.encode()]

    def _describe_lfs_file(self, name: bytes) -> str:
        """Returns a comment about a file of Git LFS; empty if its content is the committed one."""
        text = os.fsdecode(name)
        pointer = self._git("cat-file", "blob", f"HEAD:{text}")
        match = _LFS_ID.search(pointer)
        committed = match[1].decode() if match else "none"
        try:
            current = sha256(self.top / text)
        except OSError:
            current = "deleted"
        if current == committed:
            return ""
        return f"# {text}: sha256 {current} in Git LFS, committed {committed}\n"

    def _git(self, *arguments: str, input_: bytes = b"") -> bytes:
        return _run(arguments, self._environment, self.top, input_)


@contextmanager
def open_repository(folder: Path) -> Iterator[Repository]:
    """Opens the repository whose working tree contains a folder.

    Raises:
        GitError: There is none, or git cannot read it.
    """
    with tempfile.TemporaryDirectory(prefix="runner-git-") as name:
        view = Path(name)
        try:
            top, git_dir = _find(folder.resolve())
            environment = _closed_environment()
            environment |= {
                "GIT_DIR": str(view),
                "GIT_WORK_TREE": str(top),
                "GIT_INDEX_FILE": str(git_dir / "index"),
            }
            _build_view(view, git_dir, environment)
        except OSError as error:
            raise GitError(str(error)) from error
        commit = _run(["rev-parse", "--verify", "HEAD"], environment, top)
        yield Repository(top, commit.decode().strip(), environment)


def _find(folder: Path) -> tuple[Path, Path]:
    """Returns the top of the working tree around a folder, and its git directory.

    Like git, it does not search in GIT_CEILING_DIRECTORIES and above them, unless the search starts
    there.
    """
    ceiling_paths = os.environ.get("GIT_CEILING_DIRECTORIES", "").split(os.pathsep)
    ceilings = {Path(path).resolve() for path in ceiling_paths if path}
    for top in (folder, *folder.parents):
        if top in ceilings and top != folder:
            break
        path = top / ".git"
        if path.is_file():
            target = read_regular(path, _MAX_BYTES, follow=True).decode(
                errors="surrogateescape"
            )
            return top, top / target.removeprefix("gitdir:").strip()
        if (path / "HEAD").is_file():
            return top, path
    raise GitError(f"no repository around {folder}")


def _build_view(view: Path, git_dir: Path, environment: Mapping[str, str]) -> None:
    """Fills a git directory with links to the data of another one and a separate configuration."""
    common = git_dir
    common_link = git_dir / "commondir"
    if common_link.is_file():
        # A worktree of ``git worktree`` shares objects and references with its repository.
        content = read_regular(common_link, _MAX_BYTES, follow=True)
        common = git_dir / os.fsdecode(content).strip()
    _copy(git_dir / "HEAD", view / "HEAD")
    make_folder(view / "info")
    attributes = common / "info" / "attributes"
    if attributes.is_file():
        _copy(attributes, view / "info" / "attributes")
    for name in _LINKED:
        path = common / name
        if path.is_dir() or path.is_file():
            (view / name).symlink_to(path.resolve())
    for path in git_dir.glob("sharedindex.*"):
        if path.is_file():
            (view / path.name).symlink_to(path.resolve())
    index = git_dir / "index"
    if index.exists() and not index.is_file():
        raise GitError(f"{index} is not a regular file")
    _write_settings(view, [common / "config", git_dir / "config.worktree"], environment)


def _copy(path: Path, target: Path) -> None:
    content = read_regular(path, _MAX_BYTES, follow=True)
    write_text(target, content.decode("utf-8", "surrogateescape"))


def _write_settings(
    view: Path, files: Sequence[Path], environment: Mapping[str, str]
) -> None:
    """Writes the configuration of a view: the user's and the repository's ways to compare files."""
    # The user's configuration is read outside of the repository, in a view without settings.
    write_text(view / "config", "[core]\n")
    user_environment = {
        name: value
        for name, value in environment.items()
        if not name.startswith("GIT_CONFIG_")
    }
    listings = [
        _run(["config", "--includes", "--list", "-z"], user_environment, Path("/"))
    ]
    for file in files:
        if file.is_file():
            content = read_regular(file, _MAX_BYTES, follow=True)
            # Git reads the text from a pipe, and follows no include in it.
            command = ["config", "--file", "-", "--no-includes", "--list", "-z"]
            listings.append(_run(command, environment, Path("/"), content))
    settings: dict[str, str] = {}
    for listing in listings:
        for entry in listing.decode(errors="replace").split("\0"):
            name, _, value = entry.partition("\n")
            if _KEPT_SETTINGS.fullmatch(name) and _PLAIN_VALUE.fullmatch(value):
                settings[name] = value
    # Git reads extensions only in a repository of version 1.
    is_version_1 = any(name.startswith("extensions.") for name in settings)
    lines = [
        f"[core]\n\trepositoryformatversion = {int(is_version_1)}\n\tbare = false\n"
    ]
    for name, value in settings.items():
        section, key = name.split(".")
        lines.append(f"[{section}]\n\t{key} = {value}\n")
    write_text(view / "config", "".join(lines))


def _closed_environment() -> dict[str, str]:
    """Returns this process's environment without what configures git."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("GIT_")
    }
    return environment | {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_COUNT": "0",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_PAGER": "cat",
        "LC_ALL": "C",
    }


def _run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    input_: bytes = b"",
) -> bytes:
    """Runs git and returns what it prints. This is the only place that starts git."""
    git = shutil.which("git")
    if git is None:
        raise GitError("git is not installed")
    try:
        result = subprocess.run(
            [git, *arguments],
            env=environment,
            cwd=folder,
            input=input_,
            capture_output=True,
            check=True,
            timeout=_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise GitError(f"git {arguments[0]}: {error}") from error
    return result.stdout
