"""One training of a trial, as it goes on in its child process.

It continues from a checkpoint in its folder, if there is one, and tells its parent how far it is, in JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from runner.plugin.registry import Registry
from runner.recipe import Recipe, drift, load, write_lock
from runner.recipe.lock import LOCK_NAME
from runner.system import generators
from runner.system.errors import CheckpointError, RunnerError
from runner.tracking.history import History
from runner.tracking.recorder import Recorder
from runner.train.assemble import OUT_OF_MEMORY, assemble
from runner.train.checkpoint import reader as checkpoint
from runner.train.loop import CHECKPOINTS, Loop
from runner.train.signals import Stop, stop_on_signals

PRUNED = 78
"""Exit code of a training that was told not to go on."""
ANEW = 79
"""Exit code of one whose checkpoints cannot be gone on from."""
SPOOL = "spool.jsonl"
GO_ON, STOP = b"on", b"stop"
SIGN_SECONDS = 0.5


@dataclass(frozen=True)
class Order:
    """What to train."""

    recipe: Path
    """A file that is deleted when it is read, because it may hold secrets."""
    folder: Path
    """Its checkpoints and metrics."""
    errors: Path
    """Takes what it prints."""
    metric: str
    """The metric whose values decide whether it goes on; empty if nothing does."""
    prefix: str
    """Stands before the names of the metrics that it logs."""
    plugin_files: tuple[Path, ...]


class Journal(Recorder):
    """Logs to a spool, which the parent carries to MLflow, and tells the parent how far the training is."""

    def __init__(self, order: Order, history: History, step: int, parent: Connection, stop: Stop) -> None:
        super().__init__(order.folder / SPOOL, history, step, order.prefix)
        self._metric, self._parent, self._stop = order.metric, parent, stop
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
            self.tell(step=step)

    def tell(self, **what: Any) -> None:
        """Says something to the parent."""
        self._parent.send_bytes(json.dumps(what).encode())

    def _ask(self, value: float, step: int) -> None:
        self.tell(value=value, step=step)
        if self._parent.recv_bytes() != GO_ON:
            self.pruned = True
            self._stop.asked = signal.SIGTERM


def main(order: Order, parent: Connection) -> None:
    """Trains, and leaves with an exit code; what it prints goes to a file, and so do errors."""
    os.setsid()  # with all processes that it starts, it can be killed as one
    above = parent_process()
    assert above is not None
    end_with(above.sentinel, os.getpid(), signal.SIGKILL)
    errors = os.open(order.errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    try:
        code = _train(order, parent)
    except (torch.OutOfMemoryError, MemoryError) as error:
        code = _failed(error, OUT_OF_MEMORY)
    except CheckpointError as error:
        code = _failed(error, ANEW)
    except RunnerError as error:
        code = _failed(error, error.exit_code)
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):  # torch has no class for it
            raise
        code = _failed(error, OUT_OF_MEMORY)
    sys.exit(code)


def _failed(error: BaseException, code: int) -> int:
    sys.stderr.write(f"{error}\n")
    return code


def _train(order: Order, parent: Connection) -> int:
    registry = Registry(order.plugin_files)
    recipe = load(order.recipe, (), registry)
    order.recipe.unlink()  # it may hold secrets, and nobody tidies up after a kill
    state = _state(order.folder, recipe, registry)
    generators.seed(recipe.seed)
    pipeline = assemble(recipe, order.plugin_files, resumed=state["pipeline"] if state else None)
    write_lock(recipe, order.folder, registry)
    with stop_on_signals() as stop:
        spool = order.folder / SPOOL
        history = History.read(spool, state["cursor"], state["step"]) if state else History()
        journal = Journal(order, history, state["step"] if state else 0, parent, stop)
        journal.tell(step=journal.step)
        loop = Loop(pipeline, order.folder, journal, journal, stop)
        if state:
            loop.load_state_dict(state)
        loop.run()
        journal.sync()
        if loop.complete:
            journal.tell(step=loop.progress.done, done=loop.activities.total())
    return PRUNED if journal.pruned else 0 if loop.complete else 128 + int(stop.asked or 0)


def end_with(sentinel: int, group: int, how: signal.Signals) -> None:
    """Sends a group of processes, or this process alone, a signal when its parent has ended, however that ended.

    Args:
        sentinel: a file descriptor that can be read when the parent is gone.
        group: a process group; 0 is this process.
        how: the signal.
    """

    def watch() -> None:
        wait([sentinel])
        (os.killpg if group else os.kill)(group or os.getpid(), how)

    threading.Thread(target=watch, name="runner-parent", daemon=True).start()


def _state(folder: Path, recipe: Recipe, registry: Registry) -> dict[str, Any] | None:
    """What an earlier attempt at the same training has left; None if there is nothing.

    Raises:
        CheckpointError: it cannot be gone on from.
    """
    found = checkpoint.load_newest(folder / CHECKPOINTS)
    if found and any(change.matters for change in drift(folder / LOCK_NAME, recipe, registry)):
        raise CheckpointError("what the training runs has changed since its checkpoint")
    return found[1] if found else None
