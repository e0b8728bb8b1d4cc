"""Disks of a few MB, which tests can fill."""

import os
import subprocess
from contextlib import contextmanager, suppress

import pytest

BALLAST = "ballast"


@contextmanager
def small_disk(folder, mib):
    """A disk of its own in a folder, which is made; skips the test where this user may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("this system has no mount")
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk, leave=0):
    """Writes a file that leaves only so many bytes."""
    with (disk / BALLAST).open("ab", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(4096))
        os.ftruncate(file.fileno(), max(0, file.tell() - leave))


def free(disk):
    """Gives the space back."""
    (disk / BALLAST).unlink()


@contextmanager
def read_only(folder):
    """Makes a folder one that nobody can write in; skips the test where this user may not mount."""
    for options in (["--bind", str(folder), str(folder)], ["-o", "remount,ro,bind", str(folder)]):
        mounted = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
        if mounted.returncode:
            pytest.skip(f"a folder cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
