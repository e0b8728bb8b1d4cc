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
from runner.plugin.registry import Registry
from runner.recipe.lock import drift, locked_threads, write_lock
from runner.recipe.recipe import Recipe
from runner.study.config import StudyConfig
from runner.system import generators
from runner.system.errors import CheckpointError, ExitCode, RunnerError
from runner.system.hardware import available_memory
from runner.system.processor import share_processor
from runner.system.workspace_paths import LOCK_NAME
from runner.tracking.recorder import Recorder
from runner.tracking.workspace import SPOOL
from runner.training.checkpoint import CHECKPOINTS
from runner.training.checkpoint_selection import load_resumed
from runner.training.loop import Loop
from runner.training.pipeline import assemble
from runner.training.signals import Stop, stop_on_signals

# The cause of a training that was stopped because it will not be among the best.
PRUNED = "pruned"
# Time for a checkpoint after SIGTERM.
_GRACE_SECONDS = 30.0
_SIGN_SECONDS = 0.5
_initially_free_memory = cache(available_memory)


@dataclass(frozen=True)
class TrainingOutcome:
    """Outcome of one training attempt, or of a complete trial.

    Attributes:
        cause: A ``Cause``, or ``PRUNED``.
        reason: Message for the user; empty on success.
        seconds: Wall-clock time including start and exit of the process.
        training_seconds: Time spent training; None if the process was cut short.
        cpu_seconds: CPU time of the process and its children, as far as observed.
        must_restart: Whether the checkpoints cannot be used, so that a retry starts from scratch.
        objectives: Objective values of the trial, by metric.
        violations: By how much each constrained metric of the trial exceeds its bound.
    """

    cause: str = Cause.DONE
    reason: str = ""
    seconds: float = 0.0
    training_seconds: float | None = None
    cpu_seconds: float = 0.0
    must_restart: bool = False
    objectives: Mapping[str, float] = field(default_factory=dict)
    violations: Mapping[str, float] = field(default_factory=dict)


def _always_continue(_value: float, _step: int) -> bool:
    return True


def _ignore_progress(_step: int, _metrics: Mapping[str, float]) -> None:
    pass


def _ignore_data(_fingerprint: str | None) -> None:
    pass


def train(
    recipe: Recipe,
    folder: Path,
    plugin_files: Sequence[Path],
    limits: Limits,
    should_stop: Callable[[int], bool],
    should_continue: Callable[[float, int], bool] = _always_continue,
    metric: str = "",
    metric_prefix: str = "",
    on_progress: Callable[[int, Mapping[str, float]], None] = _ignore_progress,
    on_data: Callable[[str | None], None] = _ignore_data,
) -> TrainingOutcome:
    """Attempts one training; returns when it has ended in any way and no process remains.

    Args:
        recipe: The resolved recipe.
        folder: Existing folder for checkpoints and metrics.
        plugin_files: Plugin files to load in the child.
        limits: Time and memory limits of the child.
        should_stop: Called with every reported step; True ends the training.
        should_continue: Called with each value of ``metric`` and its step; False prunes the trial.
        metric: Name of the objective metric that drives pruning.
        metric_prefix: Prefix for the names of all logged metrics.
        on_progress: Called with the step and the most recent metrics.
        on_data: Called with the fingerprint of the data before the first update; what it raises
            ends the training.

    Returns:
        The outcome. Failures of the child are reported in ``cause`` and never raised.
    """
    start = time.monotonic()
    monitor = _TrainingMonitor(should_stop, should_continue, on_progress, on_data)
    child = Child(
        "runner.study.training",
        recipe,
        plugin_files=plugin_files,
        options={"folder": str(folder), "metric": metric, "prefix": metric_prefix},
        limits=limits,
        forked=may_fork(recipe.device, torch.cuda.is_available()),
    )
    with child:
        outcome = monitor.follow(child)
    # A signal to the worker may reach the child, too.
    if outcome.cause not in (Cause.DONE, PRUNED) and monitor.should_stop():
        outcome = TrainingOutcome(Cause.STOPPED, "the worker was stopped by a signal")
    return replace(outcome, seconds=time.monotonic() - start, cpu_seconds=child.cpu_seconds)


class _TrainingMonitor:
    """Receives the messages of a training, and answers its questions, until it ends."""

    def __init__(
        self,
        should_stop: Callable[[int], bool],
        should_continue: Callable[[float, int], bool],
        on_progress: Callable[[int, Mapping[str, float]], None],
        on_data: Callable[[str | None], None],
    ) -> None:
        self._should_stop = should_stop
        self._should_continue = should_continue
        self._on_progress = on_progress
        self._on_data = on_data
        self._step = 0
        self._metrics: dict[str, float] = {}

    def should_stop(self) -> bool:
        """Returns whether the training should stop at the last reported step."""
        return self._should_stop(self._step)

    def follow(self, child: Child) -> TrainingOutcome:
        """Returns the outcome when the child has ended in any way."""
        outcome = TrainingOutcome(Cause.CRASHED, "it ended with exit code 0 and without a word")
        try:
            while (message := child.receive(self.should_stop, hung="no sign of progress")) is not None:
                self._process(message, child)
                if "cause" in message:
                    outcome = TrainingOutcome(message["cause"], training_seconds=message["seconds"])
        except ChildError as error:
            progress = f", after step {self._step:,}" if error.cause == Cause.HUNG else ""
            must_restart = error.exit_code == ExitCode.NO_CHECKPOINT
            return TrainingOutcome(error.cause, f"{error}{progress}", must_restart=must_restart)
        except OSError:
            # The child has exited, so that the answer cannot be written to it.
            return TrainingOutcome(Cause.CRASHED, "it ended in the middle of a question")
        return outcome

    def _process(self, message: Mapping[str, Any], child: Child) -> None:
        self._step = message["step"]
        self._metrics = message.get("metrics", self._metrics)
        self._on_progress(self._step, self._metrics)
        if "data" in message:
            self._on_data(message["data"])
        if "value" in message:
            child.send(self._should_continue(message["value"], self._step))


def judge(recipe: Recipe, plugin_files: Sequence[Path], limits: Limits, stop: Callable[[], bool]) -> dict[str, Any]:
    """The gate's verdict on all stages of a recipe together, without any training: its outcome and summary.

    What cannot be judged within the limits of a training is inconclusive.
    """
    if not recipe.stages:
        return {"outcome": "PASS", "summary": "no stage is on"}
    limits = replace(
        limits,
        seconds=min(limits.seconds, START_SECONDS),
        silence=START_SECONDS,
        grace=0.0,
    )
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
    if limits.memory_gib is None:
        memory = _initially_free_memory() / 2 / config.budget.parallel
    else:
        memory = limits.memory_gib * 2**30
    return Limits(limits.seconds or math.inf, limits.silence, memory, _GRACE_SECONDS)


def main(parent: Parent) -> None:
    """Trains in the folder that the options name, from a checkpoint if there is one; or judges if they name none."""
    recipe, registry = parent.load()
    if parent.options:
        _train_in_child(parent, recipe, registry)
    else:
        _judge_in_child(parent, recipe, registry)


def _judge_in_child(parent: Parent, recipe: Recipe, registry: Registry) -> None:
    from runner.verify.timed_gate import quick

    with share_processor(recipe.system.threads, recipe.system.wait):
        verdict = quick(recipe, registry, tuple(recipe.stages))
    parent.tell(outcome=str(verdict.outcome), summary=verdict.summary)


def _train_in_child(parent: Parent, recipe: Recipe, registry: Registry) -> None:
    folder = Path(parent.options["folder"])
    lock = folder / LOCK_NAME
    state = load_resumed(folder / CHECKPOINTS)
    if state and any(change.matters for change in drift(lock, recipe, registry)):
        raise CheckpointError("the code or settings of the training have changed since its checkpoint")

    # A resumed training keeps its number of threads, on which the order of sums depends.
    threads = locked_threads(lock) if state else None
    with (
        share_processor(recipe.system.threads, recipe.system.wait, threads) as use,
        stop_on_signals() as stop,
    ):
        generators.seed(recipe.seed)
        pipeline = assemble(recipe, registry.files, resumed=state["pipeline"] if state else None)
        write_lock(recipe, folder, registry, processor=use.data())

        cursor = state["cursor"] if state else None
        step = state["step"] if state else 0
        recorder = _ReportingRecorder(
            folder / SPOOL,
            cursor,
            step,
            parent,
            stop,
        )
        parent.tell(step=recorder.step, data=pipeline.source.fingerprint())

        loop = Loop(
            pipeline,
            folder,
            recorder,
            recorder,
            stop,
        )
        if state:
            loop.load_state_dict(state)
        start = time.monotonic()
        loop.run()
        recorder.sync()

    if recorder.pruned:
        parent.tell(
            step=recorder.step,
            cause=PRUNED,
            seconds=None,
        )
    elif loop.complete:
        parent.tell(
            step=loop.progress.done,
            cause=Cause.DONE,
            seconds=time.monotonic() - start,
        )
    else:
        sys.exit(128 + int(stop.received or 0))


class _ReportingRecorder(Recorder):
    """Logs to a spool, which the parent sends to MLflow, and reports progress to the parent."""

    def __init__(
        self,
        spool: Path,
        cursor: int | None,
        step: int,
        parent: Parent,
        stop: Stop,
    ) -> None:
        super().__init__(spool, cursor, step, parent.options["prefix"])
        self._parent = parent
        self._stop = stop
        self._last_report = 0.0
        self.pruned = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs metrics of one step; requests the decision of the parent if one of
        them is the pruned metric.
        """
        super().log(metrics, step)
        value = metrics.get(self._parent.options["metric"])
        if value is not None and not self._parent.ask(value=float(value), step=step):
            self.pruned = True
            self._stop.received = signal.SIGTERM

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Gives a sign of life, twice a second at most."""
        if time.monotonic() - self._last_report > _SIGN_SECONDS:
            self._last_report = time.monotonic()
            self._parent.tell(step=step, metrics=metrics)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Does nothing."""
        return nullcontext()

    def improved(self, best: float) -> None:
        """Does nothing."""
