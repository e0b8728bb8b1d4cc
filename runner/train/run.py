"""One training with one recipe, from assembly to the true final status."""

import dataclasses
import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from runner.plugin.registry import Registry
from runner.plugin.source import State
from runner.recipe.git import source
from runner.recipe.lock import LOCK_NAME, copy_recipe, write_lock
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.errors import ExitCode, RunnerError
from runner.system.faults import reach
from runner.system.hardware import hardware
from runner.system.secrets import redact
from runner.tracking import RunFolder, Status, Workspace
from runner.tracking.tracker import Tracker
from runner.train.assemble import Assembly, StageReport, assemble
from runner.train.checkpoint import reader as checkpoint
from runner.train.loop import Display, Loop
from runner.train.signals import Stop, stop_on_signals

PATIENCE_SECONDS = 30.0
STOPPED_PATIENCE_SECONDS = 5.0
"""A scheduler that has sent SIGTERM kills soon; what MLflow lacks then is in the spool."""
_ARTIFACTS = ("*.yaml", "*.patch", "diagnosis.json")
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})


@dataclass(frozen=True)
class RunResult:
    """What ``runner run --json`` prints, beside its schema version."""

    run_id: str
    run_name: str
    status: Status
    tracking_uri: str
    run_dir: str
    lock: str
    resumed_at: int | None
    """The step from which it was resumed; None if it was begun anew."""
    stages: list[StageReport]
    metrics: dict[str, float]
    """The last value of every metric."""
    seconds: float
    resume: str
    """The command that goes on with it, should it not be finished."""
    exit_code: ExitCode

    def data(self) -> dict[str, Any]:
        """As one JSON object."""
        data = dataclasses.asdict(self)
        data["stages"] = {report.pop("kind"): report for report in data["stages"]}
        del data["exit_code"]
        return data


def run(recipe: Recipe, registry: Registry, workspace: Workspace, display: Display) -> RunResult:
    """Trains a recipe.

    Args:
        recipe: validated.
        registry: where its plugins came from.
        workspace: where the run's folder and MLflow's database are.
        display: shows progress.

    Raises:
        RunnerError: the recipe cannot run here, the store cannot be reached, or the training failed; the MLflow run, if
            there is one by then, has its true status.
    """
    started = time.perf_counter()
    generators.seed(recipe.seed)
    pipeline = assemble(recipe, registry.files)
    unit, goal = recipe.length
    with stop_on_signals() as stop:
        tracker = Tracker.open(
            workspace, recipe.tracking.experiment, recipe.name, recipe.values(), tags(recipe, pipeline),
            recipe.tracking.system_metrics, digest=recipe.digest, goal=goal, unit=unit,
        )  # fmt: skip
        again = registry.command(f"runner resume {tracker.run_name}")
        with _concluded(tracker, stop, again) as progress:
            copy_recipe(recipe, tracker.run_dir / "recipe.yaml")
            write_lock(recipe, tracker.run_dir, registry)
            reach("start.locked")
            progress.loop = Loop(pipeline, tracker.run_dir, tracker, display, stop, again)
            progress.loop.run()
    return _result(tracker, progress, stop, started, None, again)


def resume(
    recipe: Recipe, registry: Registry, workspace: Workspace, folder: RunFolder, display: Display, drift: list[str]
) -> RunResult:
    """Goes on with a run from its newest checkpoint that is whole, or from the beginning if there is none yet.

    Args:
        recipe: that of the run's lock.
        registry: where its plugins come from.
        workspace: where the run is.
        folder: the run's folder.
        display: shows progress.
        drift: what has changed since and is to be kept on record.

    Raises:
        UsageError: the run's process is alive.
        CheckpointError: all checkpoints are damaged, or do not fit the recipe.
        RunnerError: as for ``run``.
    """
    started = time.perf_counter()
    folder.claim()
    try:
        found = checkpoint.load_newest(folder.checkpoints)
        state: State | None = found[1] if found else None
        step = state["step"] if state else 0
        generators.seed(recipe.seed)
        pipeline = assemble(recipe, registry.files, resumed=state["pipeline"] if state else None)
        with stop_on_signals() as stop:
            tracker = Tracker.reopen(
                workspace, folder, state["cursor"] if state else 0, step, recipe.values(),
                _resumption(step, drift) | ({} if state else tags(recipe, pipeline)), recipe.tracking.system_metrics,
            )  # fmt: skip
            again = registry.command(f"runner resume {tracker.run_name}")
            with _concluded(tracker, stop, again) as progress:
                progress.loop = Loop(pipeline, tracker.run_dir, tracker, display, stop, again)
                if state:
                    progress.loop.load_state_dict(state)
                reach("resume.loaded")
                progress.loop.run()
    finally:
        folder.release()
    return _result(tracker, progress, stop, started, step, again)


def tags(recipe: Recipe, pipeline: Assembly) -> dict[str, str]:
    """What describes a run beside its settings."""
    checkout = source(recipe.path)
    return {
        "mlflow.source.name": str(recipe.path),
        "mlflow.source.git.commit": checkout.commit if checkout else "unknown",
        "recipe.name": recipe.name,
        "recipe.digest": recipe.digest,
        **_stage_tags(pipeline),
        "device": str(pipeline.device),
        **{f"hardware.{name}": str(value) for name, value in hardware().items()},
    }


def _stage_tags(pipeline: Assembly) -> dict[str, str]:
    active = [report.kind for report in pipeline.reports.values() if report.active]
    inactive = {f"stages.inactive.{r.kind}": str(r.reason) for r in pipeline.reports.values() if not r.active}
    return {"stages": ",".join(active) or "none", **inactive}


@dataclass
class _Progress:
    loop: Loop | None = None
    status: Status = "FAILED"


@contextmanager
def _concluded(tracker: Tracker, stop: Stop, resume: str) -> Iterator[_Progress]:
    """Whatever happens inside, the run gets the status that is true."""
    progress, reason = _Progress(), ""
    try:
        yield progress
        assert progress.loop is not None
        progress.status = "FINISHED" if progress.loop.complete else "KILLED"
        for name, value in _stage_tags(progress.loop.pipeline).items():
            tracker.tag(name, value)  # the first updates may have shown a stage to be of no use
    except KeyboardInterrupt:
        progress.status = "KILLED"
        raise
    except SystemExit as error:
        reason = f"something in the training called sys.exit({error.code})"
        raise RunnerError(reason) from error
    except BaseException as error:
        reason = redact(str(error) if isinstance(error, RunnerError) else f"{type(error).__name__}: {error}")
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            again = resume if (tracker.run_dir / LOCK_NAME).exists() else "start it anew"
            raise RunnerError(f"{reason}; when the disk takes files again: {again}") from error
        raise
    finally:
        for pattern in _ARTIFACTS:
            for path in sorted(tracker.run_dir.glob(pattern)):
                tracker.artifact(path)
        tracker.close(progress.status, reason, STOPPED_PATIENCE_SECONDS if stop else PATIENCE_SECONDS)


def _resumption(step: int, drift: list[str]) -> dict[str, str]:
    at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {f"resumed.{at}": f"at step {step}" + "".join(f"; {line}" for line in drift)}


def _result(
    tracker: Tracker, progress: _Progress, stop: Stop, started: float, resumed_at: int | None, again: str
) -> RunResult:
    loop = progress.loop
    assert loop is not None
    for kind, stage in loop.pipeline.stages.items():
        loop.pipeline.reports[kind].notes += stage.closing_notes()
    return RunResult(
        tracker.run_id, tracker.run_name, progress.status, tracker.tracking_uri, str(tracker.run_dir),
        str(tracker.run_dir / LOCK_NAME), resumed_at, list(loop.pipeline.reports.values()), loop.metrics,
        time.perf_counter() - started, again, _exit_code(loop, stop),
    )  # fmt: skip


def _exit_code(loop: Loop, stop: Stop) -> ExitCode:
    if loop.complete or not stop:
        return ExitCode.DONE
    if loop.pipeline.recipe.train.preemptible:
        return ExitCode.PREEMPTED
    return ExitCode(128 + int(stop.asked or 0))
