"""How this project starts Python, and whether a process that has left its name somewhere still lives."""

import os
import platform
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Self

import psutil
from pydantic import BaseModel

PYTHON = (sys.executable, "-P")
"""An interpreter that imports nothing from the directory it is started in, where other people's files may lie."""


_MACHINE_DIGITS = 12


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


@cache
def machine_id() -> str:
    """Returns a digest of what tells this machine from others, also after a restart; empty if nothing does."""
    for path in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        # machine-id(5) asks that the identifier itself stays confidential.
        return sha256(f"runner {text}".encode()).hexdigest()[:_MACHINE_DIGITS] if text else ""
    return ""


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
    machine: str = ""
    """``machine_id`` of its machine; empty if unknown."""

    @classmethod
    def this_process(cls) -> Self:
        """The process that asks."""
        pid = os.getpid()
        return cls(
            pid=pid,
            host=platform.node(),
            boot_id=boot_id(),
            namespace=_namespace(),
            born=_born(pid),
            machine=machine_id(),
        )

    @property
    def here(self) -> bool:
        """Whether it is, or was, a process among those that this one sees."""
        return (self.boot_id, self.namespace) == (boot_id(), _namespace())

    @property
    def alive(self) -> bool | None:
        """Whether it is running; None if that cannot be decided from here. No clock is consulted."""
        if self.here:
            return _born(self.pid) == self.born
        is_this_machine = self.machine != "" and (self.machine, self.host) == (machine_id(), platform.node())
        return False if is_this_machine and self.boot_id != boot_id() else None


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
