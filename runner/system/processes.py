"""How this project starts Python, and whether a process that has left its name somewhere still lives."""

import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Self

import psutil
from pydantic import BaseModel

PYTHON = (sys.executable, "-P")
"""An interpreter that imports nothing from the directory it is started in, where other people's files may lie."""


def safe_environment() -> dict[str, str]:
    """This process's environment, in which the interpreters that a child starts are as careful."""
    return {**os.environ, "PYTHONSAFEPATH": "1"}


@cache
def boot_id() -> str:
    """What differs from one start of this machine to the next."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return str(int(psutil.boot_time()))


class Owner(BaseModel, frozen=True):
    """A process to which something belongs."""

    pid: int
    host: str
    boot_id: str
    """Differs from one start of a machine to the next."""
    namespace: str = ""
    """Of processes, in which ``pid`` means this one."""
    born: float = 0.0
    """When it began, which tells it from a later one with the same number."""

    @classmethod
    def this_process(cls) -> Self:
        """The process that asks."""
        pid = os.getpid()
        return cls(pid=pid, host=platform.node(), boot_id=boot_id(), namespace=_namespace(), born=_born(pid))

    @property
    def here(self) -> bool:
        """Whether it is, or was, a process among those that this one sees."""
        return (self.boot_id, self.namespace) == (boot_id(), _namespace())

    def alive(self, seen: float) -> bool | None:
        """Whether it lives, ``seen`` last at a time in seconds since 1970; None if that cannot be told from here."""
        if self.here:
            return _born(self.pid) == self.born
        # A container that shares the name of its machine has lived since that was started.
        is_before_boot = self.host == platform.node() and self.boot_id != boot_id() and seen < psutil.boot_time()
        return False if is_before_boot else None


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _born(pid: int) -> float:
    """When a process began; 0 if there is none, or only a dead one that its parent has not asked after.

    In clock ticks since the machine began, which nobody sets anew; elsewhere than on Linux, seconds since 1970.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return 0.0
        stat = Path(f"/proc/{pid}/stat")
        return float(stat.read_text().rpartition(")")[2].split()[19]) if stat.exists() else process.create_time()
    except (psutil.Error, OSError):
        return 0.0
