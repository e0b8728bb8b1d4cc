"""A job of a cluster: tasks that run one command of the runner, apart from the seed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from runner.system.errors import UsageError
from runner.system.escapes import is_printable
from runner.system.secrets import has_secret
from runner.system.shared_storage import VARIABLES

GRACE_SECONDS = 120
"""Time from the signal to the end of a task; an update and a checkpoint have to fit into it."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class BatchJob:
    """The tasks of a job and what each of them needs.

    Attributes:
        name: Name of the job.
        words: Command line of a task, without the program.
        retry_code: Exit code of a task that a signal has stopped, and that is to be run again.
        folder: Working directory.
        workspace: Folder of the runs.
        tasks: Number of tasks.
        is_array: Whether the tasks are numbered, also a single one.
        first_seed: Seed of the first task, to which its number is added; None if tasks are alike.
        nodes: Number of machines of a task.
        gpus: Number of GPUs of each machine; 0 for none.
        cpus: Number of cores of each machine; None for the cluster's default.
        memory: Memory of each machine in bytes; None for the cluster's default.
        time: Time limit as Slurm writes it; empty for the cluster's default.
        variables: Environment variables without secrets.
        secrets: Names of environment variables with secrets, which are not written.
    """

    name: str
    words: tuple[str, ...]
    retry_code: int
    folder: str
    workspace: str
    tasks: int = 1
    is_array: bool = False
    first_seed: int | None = None
    nodes: int = 1
    gpus: int = 0
    cpus: int | None = None
    memory: int | None = None
    time: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()

    @property
    def safe_name(self) -> str:
        """Returns the name in letters, digits, dots, dashes and underscores."""
        return _UNSAFE.sub("_", self.name)[:100]

    @property
    def digest(self) -> str:
        """Returns eight digits that differ between commands."""
        text = json.dumps([self.words, self.tasks, self.first_seed, self.folder])
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def job_variables(environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns the variables that tasks need, and the names of those that contain a secret."""
    values = {name: environment[name] for name in VARIABLES if environment.get(name)}
    secrets = tuple(name for name, value in values.items() if has_secret(value))
    return {name: value for name, value in values.items() if name not in secrets}, secrets


def quote_for_bash(word: str) -> str:
    """Returns a word as bash reads it, without characters that a terminal obeys."""
    if is_printable(word):
        return shlex.quote(word)
    characters = []
    for byte in os.fsencode(word):
        is_plain = 32 <= byte < 127 and byte not in b"\\'"
        characters.append(chr(byte) if is_plain else f"\\x{byte:02x}")
    return f"$'{''.join(characters)}'"


def refuse_secrets(text: str) -> None:
    """Raises a UsageError if a script contains a secret, for example in a setting."""
    if has_secret(text):
        raise UsageError(
            "the command contains a secret, which a script would store; write ${env:NAME} in its place, "
            "and set the variable in the environment of the job"
        )
