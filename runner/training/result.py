"""Result of a training."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from signal import Signals
from typing import Any

from runner.recipe.limited_data import describe_limits
from runner.recipe.recipe import Recipe
from runner.system.errors import ExitCode
from runner.system.workspace_paths import LOCK_NAME
from runner.tracking import Status
from runner.tracking.tracker import Tracker
from runner.training.checkpoint_selection import Best, best_of
from runner.training.final_test import untested
from runner.training.loop import Loop
from runner.training.stage_watch import StageReport


@dataclass(frozen=True)
class RunResult:
    """Result of a training, as ``runner run --json`` prints it."""

    run_id: str
    run_name: str
    status: Status
    tracking_uri: str
    run_dir: str
    lock: str
    resumed_at: int | None
    """The step from which it was resumed; None if it started from the beginning."""
    stages: list[StageReport]
    metrics: dict[str, float]
    """The most recent value of every metric; ``test/...`` are those of the best checkpoint."""
    newest_checkpoint: str | None
    """The checkpoint from which the run can be resumed or evaluated; None without one."""
    best: Best | None
    """The best checkpoint; None without an objective, or before the first evaluation."""
    seconds: float
    """Wall-clock time of the command, as in ``runner ls`` and in MLflow."""
    startup_seconds: float
    """Of these, until the first update was over."""
    update_seconds: float | None
    """Mean time of an update, without the first; None if there was no other."""
    shares: dict[str, float]
    """Shares of ``seconds`` by activity; ``startup`` and ``other`` included."""
    resume: str
    """The command that resumes an unfinished run."""
    exit_code: ExitCode
    synthetic: bool = False
    """Whether the data are synthetic."""
    smoke: bool = False
    """Whether it is a smoke test."""
    limited: str | None = None
    """The part of the data that was used; None if all of them were."""
    ended_early: str | None = None
    """Why the training ended before its length; None if it did not."""
    sentinel: str | None = None
    """Comparisons that ``train.sentinel`` made; None without one."""
    changed_by: str | None = None
    """What callbacks have changed in the learner; None if nothing."""
    skipped_updates: str | None = None
    """Updates that were skipped; None where ``train.on_nonfinite`` is ``stop``."""
    processes: int = 1
    """Processes that trained it together."""
    untested: str | None = None
    """Why there are no ``test/...`` metrics; None if there are."""

    def data(self) -> dict[str, Any]:
        """Returns the result as one JSON object."""
        data = dataclasses.asdict(self)
        data["stages"] = {report.pop("kind"): report for report in data["stages"]}
        del data["exit_code"]
        return data


def result_of(loop: Loop, tracker: Tracker, resumed_at: int | None) -> RunResult:
    """Returns the result of a run whose final status is set.

    Args:
        loop: The training.
        tracker: The run that logged it.
        resumed_at: The step from which it was resumed, if it was.
    """
    pipeline = loop.pipeline
    signal = loop.stop.received
    for kind, stage in pipeline.stages.items():
        pipeline.reports[kind].notes += stage.closing_notes()
    exit_code = ExitCode.DONE
    # A signal after the last update changes nothing.
    if signal is not None and not loop.complete:
        exit_code = stopped_by(signal, pipeline.recipe)
    newest = loop.writer.newest()
    seconds = tracker.closed - tracker.began
    # A run without an update consists of start-up only.
    startup = (loop.steady_since or tracker.closed) - tracker.began
    group = pipeline.context.processes
    return RunResult(
        run_id=tracker.run_id,
        run_name=tracker.run_name,
        status="FINISHED" if loop.complete else stopped_status(pipeline.recipe),
        tracking_uri=tracker.tracking_uri,
        run_dir=str(tracker.run_dir),
        lock=str(tracker.run_dir / LOCK_NAME),
        resumed_at=resumed_at,
        stages=list(pipeline.reports.values()),
        metrics=loop.metrics,
        newest_checkpoint=None if newest is None else str(newest),
        best=best_of(loop.writer.folder, pipeline.recipe),
        seconds=seconds,
        startup_seconds=startup,
        update_seconds=loop.mean_update_s(),
        processes=1 if group is None else group.count,
        shares=_shares(loop, startup, seconds),
        resume=loop.resume_command,
        exit_code=exit_code,
        synthetic=pipeline.recipe.data.is_synthetic(),
        smoke=pipeline.recipe.train.smoke,
        limited=describe_limits(pipeline.recipe),
        ended_early=loop.ended_early or None,
        sentinel=None if loop.sentinel is None else loop.sentinel.summary(),
        skipped_updates=None if loop.skipped is None else loop.skipped.summary(),
        changed_by=loop.callbacks.summary() or None if loop.callbacks else None,
        untested=untested(pipeline.recipe, pipeline.source, is_complete=loop.complete),
    )


def _shares(loop: Loop, startup: float, seconds: float) -> dict[str, float]:
    """Returns the shares of the command's time by activity, which add up to 1."""
    shares = {"startup": startup / seconds}
    for activity, duration in loop.spent.items():
        if activity != "startup" and duration > 0:
            shares[activity] = duration / seconds
    shares["other"] = max(0.0, 1 - sum(shares.values()))
    return shares


def stopped_by(signal: Signals, recipe: Recipe) -> ExitCode:
    """Returns the exit code of a training that a signal has stopped."""
    # A preempted training is resumed by its scheduler.
    if recipe.train.preemptible:
        return ExitCode.PREEMPTED
    return ExitCode(128 + int(signal))


def stopped_status(recipe: Recipe) -> Status:
    """Returns the status of a training that a signal has stopped."""
    return "PREEMPTED" if recipe.train.preemptible else "STOPPED"
