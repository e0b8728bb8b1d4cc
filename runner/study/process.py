"""A training in its child process, as the worker sees it: ended for what it really was."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from runner.child.spawn import Cause, Child, ChildError, Limits
from runner.recipe.recipe import Recipe
from runner.study.config import StudyConfig
from runner.study.training import SPOOL
from runner.system.errors import ExitCode
from runner.system.hardware import available_memory
from runner.tracking.spool import place_of
from runner.train.checkpoint.reader import checkpoints
from runner.train.loop import CHECKPOINTS

PRUNED = "pruned"
"""The cause where a training was told not to go on, because it will not be among the best."""
_GRACE_SECONDS = 30.0
"""For a checkpoint, after SIGTERM."""


@dataclass(frozen=True)
class Ended:
    """How a training ended."""

    cause: str
    """A ``Cause``, or ``PRUNED``."""
    reason: str
    seconds: float = 0.0
    training_seconds: float | None = None
    """Without starting and ending the process; None if it did not come to its end."""
    cpu_seconds: float = 0.0
    """Of the process and its children, as far as seen."""
    anew: bool = False
    """Whether it has to begin anew, because its checkpoints cannot be gone on from."""


class Training:
    """One attempt at one training.

    Args:
        recipe: what to train.
        folder: exists; its checkpoints and metrics.
        metric: whose values decide whether to go on; empty if nothing does.
        prefix: stands before the names of metrics.
        plugin_files: local plugin files that the recipe needs.
        limits: what it may use.
        go_on: given a value and a step, whether the training is to go on.
        stop: becomes true when the worker has to end.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        metric: str,
        prefix: str,
        plugin_files: Sequence[Path],
        limits: Limits,
        go_on: Callable[[float, int], bool],
        stop: Callable[[], bool],
    ) -> None:
        self._recipe, self._files, self._limits, self._go_on, self._stop = recipe, plugin_files, limits, go_on, stop
        self._options = {"folder": str(folder), "metric": metric, "prefix": prefix}
        self.step = 0

    def run(self) -> Ended:
        """Trains to the end, whatever end that is; no process is left when this returns."""
        begun = time.monotonic()
        with Child(
            "runner.study.training", self._recipe, plugin_files=self._files, options=self._options,
            limits=self._limits, forked=True,
        ) as child:  # fmt: skip
            cause, reason, seconds, anew = self._watch(child)
        # Who stops the worker may signal the child, too.
        if self._stop() and cause not in (Cause.DONE, PRUNED):
            cause, reason = Cause.STOPPED, "the worker was told to end"
        return Ended(cause, reason, time.monotonic() - begun, seconds, child.cpu_seconds, anew)

    def _watch(self, child: Child) -> tuple[str, str, float | None, bool]:
        """Listens to the training until its end; cause, reason, seconds of training, and whether to begin anew."""
        seconds, pruned = None, False
        try:
            while (told := child.receive(self._stop, hung="no sign of progress")) is not None:
                self.step = told["step"]
                seconds, pruned = told.get("done"), told.get("pruned", False)
                if "value" in told:
                    child.send(self._go_on(told["value"], told["step"]))
        except ChildError as error:
            where = f", after step {self.step:,}" if error.cause == Cause.HUNG else ""
            return error.cause, f"{error}{where}", seconds, error.exit_code == ExitCode.NO_CHECKPOINT
        except OSError:  # it has ended instead of listening
            return Cause.CRASHED, "it ended in the middle of a question", None, False
        if seconds is None and not pruned:
            return Cause.CRASHED, "it ended with exit code 0 and without a word", None, False
        return PRUNED if pruned else Cause.DONE, "", seconds, False


def limits_of(config: StudyConfig) -> Limits:
    """The limits of one training; all that go on at a time may take half of the memory that was free at first."""
    limits = config.limits
    memory = _free_at_first() / 2 / config.budget.parallel if limits.memory_gib is None else limits.memory_gib * 2**30
    return Limits(limits.seconds or math.inf, limits.silence, memory, _GRACE_SECONDS)


@cache
def _free_at_first() -> int:
    return available_memory()


def begin(folder: Path) -> None:
    """Makes the folder of a training ready, which goes on if it has a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    if not checkpoints(folder / CHECKPOINTS):
        forget(folder)


def forget(folder: Path) -> None:
    """Clears the folder of a training that begins anew."""
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    for path in (folder / SPOOL, place_of(folder / SPOOL)):
        path.unlink(missing_ok=True)
