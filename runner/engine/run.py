"""One training with one recipe, from assembly to the true final status."""

import dataclasses
import shutil
import time
from dataclasses import dataclass
from typing import Any

from runner.engine.loop import Display, Loop
from runner.engine.signals import Stop, stop_on_signals
from runner.errors import ExitCode
from runner.hardware import hardware
from runner.pipeline import Pipeline, StageReport, assemble
from runner.recipe import Recipe, write_lock
from runner.recipe.git import source
from runner.registry import Registry
from runner.tracking import Status, Tracker, Workspace


@dataclass(frozen=True)
class RunResult:
    """What ``runner run --json`` prints, beside its schema version."""

    run_id: str
    run_name: str
    status: Status
    tracking_uri: str
    run_dir: str
    lock: str
    stages: list[StageReport]
    metrics: dict[str, float]
    """The last value of every metric."""
    seconds: float
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
    pipeline = assemble(recipe, registry.files)
    with stop_on_signals() as stop:
        tracker = Tracker.open(
            workspace, recipe.tracking.experiment, recipe.name, recipe.values(), tags(recipe, pipeline),
            recipe.tracking.system_metrics,
        )  # fmt: skip
        status: Status = "FAILED"
        try:
            shutil.copyfile(recipe.path, tracker.run_dir / "recipe.yaml")
            lock = write_lock(recipe, tracker.run_dir, registry)
            loop = Loop(pipeline, tracker.run_dir / "checkpoints", tracker.log, display, stop)
            loop.run()
            status = "KILLED" if stop else "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            for path in sorted(tracker.run_dir.glob("*.yaml")) + sorted(tracker.run_dir.glob("*.patch")):
                tracker.artifact(path)
            tracker.close(status)
    seconds = time.perf_counter() - started
    return RunResult(
        tracker.run_id, tracker.run_name, status, tracker.tracking_uri, str(tracker.run_dir), str(lock),
        list(pipeline.reports.values()), loop.metrics, seconds, _exit_code(stop),
    )  # fmt: skip


def tags(recipe: Recipe, pipeline: Pipeline) -> dict[str, str]:
    """What describes a run beside its settings."""
    active = [report.kind for report in pipeline.reports.values() if report.active]
    checkout = source(recipe.path)
    return {
        "mlflow.source.name": str(recipe.path),
        "mlflow.source.git.commit": checkout.commit if checkout else "unknown",
        "recipe.name": recipe.name,
        "recipe.digest": recipe.digest,
        "stages": ",".join(active) or "none",
        **{f"stages.inactive.{r.kind}": str(r.reason) for r in pipeline.reports.values() if not r.active},
        "device": str(pipeline.device),
        **{f"hardware.{name}": str(value) for name, value in hardware().items()},
    }


def _exit_code(stop: Stop) -> ExitCode:
    if not stop:
        return ExitCode.DONE
    return ExitCode(128 + int(stop.asked or 0))
