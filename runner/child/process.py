"""A child process as its parent sees it: one command, one answer."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from runner.recipe import Recipe
from runner.system.errors import RunnerError
from runner.system.secrets import redact
from runner.train.assemble import OUT_OF_MEMORY

START_SECONDS = 1800.0
"""Longer than any compilation takes; a child that hangs must not hang the ablation."""
ANSWER_SECONDS = 300.0
END_SECONDS = 10.0
_LAST_LINES = 6
_LOOK_SECONDS = 0.5


class ChildError(RunnerError):
    """A child process cannot be used; says why, in its own words."""


class Child:
    """A process of one of the modules here, in a folder of its own that ends with it.

    Args:
        module: what to run, for example ``runner.measure.measured``.
        recipe: given to it as a file, if there is one.
        stages: those of the recipe's stages that are on there.
        plugin_files: local plugin files that the recipe needs.
    """

    def __init__(
        self,
        module: str,
        recipe: Recipe | None = None,
        stages: Sequence[str] = (),
        plugin_files: Sequence[Path] = (),
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="runner-child-")
        folder = Path(self._folder.name)
        arguments = [str(_written(recipe, stages, folder)), *map(str, plugin_files)] if recipe is not None else []
        self._errors = (folder / "stderr").open("w+b")
        # Compiled code is made anew, or its compilation would be measured only once a machine.
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment, bufsize=0,
            start_new_session=True,  # Ctrl-C is for the parent, which closes stdin
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def ask(
        self, command: str, timeout: float = ANSWER_SECONDS, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Gives a command and waits for the answer.

        Args:
            command: the name of what the child can do.
            timeout: seconds after which it counts as hung, and is killed.
            stop: becomes true when nobody waits for the answer any more.

        Raises:
            ChildError: it has ended, hangs, or was stopped.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{command}\n".encode())
        except BrokenPipeError:
            raise self._failure() from None
        line, deadline = b"", time.monotonic() + timeout
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if not select.select([self._process.stdout], [], [], min(_LOOK_SECONDS, max(0.0, left)))[0]:
                if left > 0 and not stop():
                    continue
                self._process.kill()
                raise ChildError("it was stopped" if left > 0 else f"no answer to '{command}' for {timeout:.0f} s")
            part = os.read(self._process.stdout.fileno(), 65536)
            if not part:
                raise self._failure()
            line += part
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the process by closing its stdin, or kills it if it does not mind."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()
        self._folder.cleanup()

    def _failure(self) -> ChildError:
        code = self._process.wait(END_SECONDS)
        if code == OUT_OF_MEMORY:
            return ChildError("memory does not suffice")
        if code < 0:
            return ChildError(f"its process was killed by signal {-code}, perhaps for want of memory")
        self._errors.seek(0)
        said = redact(self._errors.read().decode(errors="replace").strip()).splitlines()
        return ChildError("\n".join(said[-_LAST_LINES:]) or f"its process ended with exit code {code}")


def _written(recipe: Recipe, stages: Sequence[str], folder: Path) -> Path:
    """The recipe as a file that only this user can read: the child needs the secrets too."""
    values = recipe.values(masked=False)
    values["optimization"] = {kind: values["optimization"][kind] for kind in stages}
    path = folder / "recipe.yaml"
    path.touch(mode=0o600)
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    return path
