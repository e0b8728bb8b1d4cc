"""Starts Python processes, and determines whether a recorded process is still alive."""

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


JOB = "RUNNER_JOB"
"""Variable with the identifier of a scheduler's task, which is the same in all of its attempts."""
ATTEMPT = "RUNNER_ATTEMPT"
"""Variable that differs between the attempts of a task, of which one exists at a time."""
_MACHINE_DIGITS = 12


def safe_environment() -> dict[str, str]:
    """Returns this process's environment with a safe import path for the interpreters
    that a child starts.
    """
    return {**os.environ, "PYTHONSAFEPATH": "1"}


@cache
def boot_id() -> str:
    """Returns an identifier that differs between starts of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return str(int(psutil.boot_time()))


@cache
def machine_id() -> str:
    """Returns a digest that identifies this machine, also after a restart; empty if it
    has no identifier.
    """
    for path in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        # machine-id(5) requires that the identifier itself stays confidential.
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
    """When it started, which distinguishes it from a later one with the same number."""
    machine: str = ""
    """``machine_id`` of its machine; empty if unknown."""
    job: str = ""
    """The scheduler's task that started it; empty if unknown."""
    attempt: str = ""
    """The attempt of that task."""

    @classmethod
    def this_process(cls) -> Self:
        """Returns the calling process."""
        pid = os.getpid()
        return cls(
            pid=pid,
            host=platform.node(),
            boot_id=boot_id(),
            namespace=_namespace(),
            born=_born(pid),
            machine=machine_id(),
            job=os.environ.get(JOB, ""),
            attempt=os.environ.get(ATTEMPT, ""),
        )

    @property
    def here(self) -> bool:
        """Returns whether it is, or was, a process that is visible to this one."""
        return (self.boot_id, self.namespace) == (boot_id(), _namespace())

    @property
    def alive(self) -> bool | None:
        """Returns whether it is running; None if that cannot be decided from here. No
        clock is used.
        """
        if self.here:
            return _born(self.pid) == self.born
        # A scheduler starts a task again after the attempt before has ended, or its machine is lost.
        if self._is_earlier_attempt():
            return False
        is_this_machine = self.machine != "" and (self.machine, self.host) == (
            machine_id(),
            platform.node(),
        )
        return False if is_this_machine and self.boot_id != boot_id() else None

    def _is_earlier_attempt(self) -> bool:
        """Returns whether it belongs to another attempt of this process's task."""
        is_same_task = self.job != "" and self.job == os.environ.get(JOB)
        return is_same_task and self.attempt != os.environ.get(ATTEMPT, "")


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _born(pid: int) -> float:
    """Returns when a process started; 0 if there is none, or only a zombie.

    The time is in clock ticks since the start of the machine, which cannot be reset; on other
    systems than Linux, in seconds since 1970.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return 0.0
        stat = Path(f"/proc/{pid}/stat")
        return float(stat.read_text().rpartition(")")[2].split()[19]) if stat.exists() else process.create_time()
    except (psutil.Error, OSError):
        return 0.0
