"""One training of a trial in its child process; it goes on from a checkpoint in its folder, if there is one."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.child.protocol import Parent
from runner.plugin.registry import Registry
from runner.recipe.lock import LOCK_NAME, drift, write_lock
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.errors import CheckpointError
from runner.tracking.tracker import Recorder
from runner.train.assemble import assemble
from runner.train.checkpoint import reader as checkpoint
from runner.train.loop import CHECKPOINTS, Loop
from runner.train.signals import Stop, stop_on_signals

SPOOL = "spool.jsonl"
SIGN_SECONDS = 0.5


class ReportingRecorder(Recorder):
    """Logs to a spool, which the parent carries to MLflow, and tells the parent how far the training is."""

    def __init__(self, spool: Path, cursor: int | None, step: int, parent: Parent, stop: Stop) -> None:
        super().__init__(spool, cursor, step, parent.options["prefix"])
        self._metric, self._parent, self._stop = parent.options["metric"], parent, stop
        self._told = 0.0
        self.pruned = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs metrics of one step; asks whether to go on if one of them decides that."""
        super().log(metrics, step)
        if self._metric in metrics:
            self._ask(float(metrics[self._metric]), step)

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Gives a sign of life, twice a second at most."""
        if time.monotonic() - self._told > SIGN_SECONDS:
            self._told = time.monotonic()
            self._parent.tell(step=step)

    def _ask(self, value: float, step: int) -> None:
        if not self._parent.ask(value=value, step=step):
            self.pruned = True
            self._stop.asked = signal.SIGTERM


def main(parent: Parent) -> None:
    """Trains, and tells how far it is; at last that it is done, or was told not to go on."""
    folder = Path(parent.options["folder"])
    recipe, registry = parent.load()
    state = _state(folder, recipe, registry)
    generators.seed(recipe.seed)
    pipeline = assemble(recipe, registry.files, resumed=state["pipeline"] if state else None)
    write_lock(recipe, folder, registry)
    with stop_on_signals() as stop:
        cursor, step = (state["cursor"], state["step"]) if state else (None, 0)
        log = ReportingRecorder(folder / SPOOL, cursor, step, parent, stop)
        parent.tell(step=log.step)
        loop = Loop(pipeline, folder, log, log, stop)
        if state:
            loop.load_state_dict(state)
        loop.run()
        log.sync()
    if log.pruned:
        parent.tell(step=log.step, pruned=True)
    elif loop.complete:
        parent.tell(step=loop.progress.done, done=loop.activities.total())
    else:
        sys.exit(128 + int(stop.asked or 0))


def _state(folder: Path, recipe: Recipe, registry: Registry) -> dict[str, Any] | None:
    """What an earlier attempt at the same training has left; None if there is nothing.

    Raises:
        CheckpointError: it cannot be gone on from.
    """
    found = checkpoint.load_newest(folder / CHECKPOINTS)
    if found and any(change.matters for change in drift(folder / LOCK_NAME, recipe, registry)):
        raise CheckpointError("what the training runs has changed since its checkpoint")
    return found[1] if found else None
