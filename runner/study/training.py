"""Trainings of trials, and verdicts of the gate before them: for the worker, and in
child processes.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from runner.child.protocol import Parent
from runner.child.spawn import START_SECONDS, Cause, Child, ChildError, Limits, may_fork
from runner.recipe.lock import drift, locked_threads, write_lock
from runner.recipe.recipe import Recipe
from runner.study.config import StudyConfig
from runner.system import generators
from runner.system.errors import CheckpointError, ExitCode, RunnerError
from runner.system.hardware import available_memory
from runner.system.places import LOCK_NAME
from runner.system.processor import share_processor
from runner.tracking.tracker import Recorder
from runner.tracking.workspace import SPOOL
from runner.train.assemble import assemble
from runner.train.checkpoint import CHECKPOINTS
from runner.train.chosen import load_resumed
from runner.train.loop import Loop
from runner.train.signals import Stop, stop_on_signals

PRUNED = "pruned"  # the cause of a training that was stopped because it will not be among the best
_GRACE_SECONDS = 30.0  # for a checkpoint, after SIGTERM
_SIGN_SECONDS = 0.5
_free_at_first = cache(available_memory)


@dataclass(frozen=True)
class Ended:
    """The end of a training, or of a trial."""

    cause: str = Cause.DONE  # a ``Cause``, or ``PRUNED``
    reason: str = ""
    seconds: float = 0.0
    training_seconds: float | None = None  # without starting and ending the process; None if it was cut short
    cpu_seconds: float = 0.0  # of the process and its children, as far as seen
    anew: bool = False  # whether it must start again, because its checkpoints cannot be used
    values: Mapping[str, float] = field(default_factory=dict)  # of a trial's objectives
    excess: Mapping[str, float] = field(default_factory=dict)  # of a trial's metrics beyond their bounds


def train(
    recipe: Recipe, folder: Path, plugin_files: Sequence[Path], limits: Limits, stop: Callable[[int], bool],
    go_on: Callable[[float, int], bool] = lambda _value, _step: True, metric: str = "", prefix: str = "",
    advance: Callable[[int, Mapping[str, float]], None] = lambda _step, _metrics: None,
) -> Ended:  # fmt: skip
    """Attempts one training; returns when it has ended in any way and no process remains.

    ``stop`` is called with every step, and ``go_on`` with every value of the metric and its step;
    ``advance`` receives the step and the newest metrics. The folder exists, and receives
    checkpoints and metrics, whose names start with the prefix.
    """
    begun, step, metrics = time.monotonic(), 0, dict[str, float]()
    ended = Ended(Cause.CRASHED, "it ended with exit code 0 and without a word")

    def stopping() -> bool:
        return stop(step)

    options = {"folder": str(folder), "metric": metric, "prefix": prefix}
    forked = may_fork(recipe.device, torch.cuda.is_available())
    with Child(
        "runner.study.training", recipe, plugin_files=plugin_files, options=options, limits=limits, forked=forked
    ) as child:
        try:
            while (told := child.receive(stopping, hung="no sign of progress")) is not None:
                step, metrics = told["step"], told.get("metrics", metrics)
                advance(step, metrics)
                if "value" in told:
                    child.send(go_on(told["value"], step))
                if "cause" in told:
                    ended = Ended(told["cause"], training_seconds=told["seconds"])
        except ChildError as error:
            where = f", after step {step:,}" if error.cause == Cause.HUNG else ""
            ended = Ended(error.cause, f"{error}{where}", anew=error.exit_code == ExitCode.NO_CHECKPOINT)
        except OSError:  # it has ended instead of listening
            ended = Ended(Cause.CRASHED, "it ended in the middle of a question")
    # A signal to the worker may reach the child, too.
    if ended.cause not in (Cause.DONE, PRUNED) and stopping():
        ended = Ended(Cause.STOPPED, "the worker was stopped by a signal")
    return replace(ended, seconds=time.monotonic() - begun, cpu_seconds=child.cpu_seconds)


def judge(recipe: Recipe, plugin_files: Sequence[Path], limits: Limits, stop: Callable[[], bool]) -> dict[str, Any]:
    """The gate's verdict on all stages of a recipe together, without any training: its outcome and summary.

    What cannot be judged within the limits of a training is inconclusive.
    """
    if not recipe.stages:
        return {"outcome": "PASS", "summary": "no stage is on"}
    limits = replace(limits, seconds=min(limits.seconds, START_SECONDS), silence=START_SECONDS, grace=0.0)
    try:
        with Child("runner.study.training", recipe, plugin_files=plugin_files, limits=limits) as child:
            return child.answer(stop=stop)
    except RunnerError as error:
        return {"outcome": "INCONCLUSIVE", "summary": f"it could not be judged: {error}"}


def limits_of(config: StudyConfig) -> Limits:
    """Returns the limits of one training; simultaneous trainings together may use half of the
    memory that was free at first.
    """
    limits = config.limits
    memory = _free_at_first() / 2 / config.budget.parallel if limits.memory_gib is None else limits.memory_gib * 2**30
    return Limits(limits.seconds or math.inf, limits.silence, memory, _GRACE_SECONDS)


def main(parent: Parent) -> None:
    """Trains in the folder that the options name, from a checkpoint if there is one; or judges if they name none."""
    recipe, registry = parent.load()
    if not parent.options:
        from runner.verify.timed_gate import quick

        with share_processor(recipe.system.threads, recipe.system.wait):
            verdict = quick(recipe, registry, tuple(recipe.stages))
        parent.tell(outcome=str(verdict.outcome), summary=verdict.summary)
        return
    folder = Path(parent.options["folder"])
    state = load_resumed(folder / CHECKPOINTS)
    if state and any(change.matters for change in drift(folder / LOCK_NAME, recipe, registry)):
        raise CheckpointError("the code or settings of the training have changed since its checkpoint")
    threads = locked_threads(folder / LOCK_NAME) if state else None
    with share_processor(recipe.system.threads, recipe.system.wait, threads) as use, stop_on_signals() as stop:
        generators.seed(recipe.seed)
        pipeline = assemble(recipe, registry.files, resumed=state["pipeline"] if state else None)
        write_lock(recipe, folder, registry, processor=use.data())
        cursor, step = (state["cursor"], state["step"]) if state else (None, 0)
        log = _ReportingRecorder(folder / SPOOL, cursor, step, parent, stop)
        parent.tell(step=log.step)
        loop = Loop(pipeline, folder, log, log, stop)
        if state:
            loop.load_state_dict(state)
        begun = time.monotonic()
        loop.run()
        log.sync()
    if log.pruned:
        parent.tell(step=log.step, cause=PRUNED, seconds=None)
    elif loop.complete:
        parent.tell(step=loop.progress.done, cause=Cause.DONE, seconds=time.monotonic() - begun)
    else:
        sys.exit(128 + int(stop.asked or 0))


class _ReportingRecorder(Recorder):
    """Logs to a spool, which the parent sends to MLflow, and reports progress to the parent."""

    def __init__(self, spool: Path, cursor: int | None, step: int, parent: Parent, stop: Stop) -> None:
        super().__init__(spool, cursor, step, parent.options["prefix"])
        self._parent, self._stop = parent, stop
        self._told = 0.0
        self.pruned = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs metrics of one step; requests the decision of the parent if one of
        them is the pruned metric.
        """
        super().log(metrics, step)
        value = metrics.get(self._parent.options["metric"])
        if value is not None and not self._parent.ask(value=float(value), step=step):
            self.pruned = True
            self._stop.asked = signal.SIGTERM

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Gives a sign of life, twice a second at most."""
        if time.monotonic() - self._told > _SIGN_SECONDS:
            self._told = time.monotonic()
            self._parent.tell(step=step, metrics=metrics)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Does nothing."""
        return nullcontext()

    def improved(self, best: float) -> None:
        """Does nothing."""
