"""An ablation from its folder to its report: new or continued, measured, written and published."""

from __future__ import annotations

import json
import shutil
import uuid
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner.measure.experiment import Experiment
from runner.measure.measurement_log import HEAD, RESULT, ROUNDS, MeasurementLog, identity_of, is_finished
from runner.measure.plots import HINT, draw
from runner.measure.publish import RUNS, publish
from runner.measure.recommend import Recommendation, recommend, write
from runner.measure.report import markdown
from runner.measure.result import Result
from runner.measure.rounds import Ablation, Gate, Say, identity
from runner.plugin.registry import Registry
from runner.recipe.lock import write_lock
from runner.system.errors import ExitCode, RunnerError, StorageError, UsageError
from runner.system.files import write_durably
from runner.system.secrets import redact_values
from runner.tracking import Workspace
from runner.tracking.store import Store
from runner.tracking.values import folder_name
from runner.train.signals import Stop, stop_on_signals

REPORT = "README.md"


@dataclass(frozen=True)
class Ablated:
    """An ablation with all that was written about it."""

    result: Result
    recommendations: tuple[Recommendation, ...]
    run_id: str
    """Of the parent run in MLflow."""
    tracking_problem: str
    """Why MLflow does not have it; empty if it has."""
    stop: Stop

    @property
    def exit_code(self) -> ExitCode:
        """A signal counts most, then the gate, then what could not be told."""
        return ExitCode(128 + int(self.stop.asked)) if self.stop.asked else self.result.exit_code

    def data(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            **self.result.data(),
            "recommendations": [asdict(each) for each in self.recommendations],
            "run_id": self.run_id,
            "tracking_problem": self.tracking_problem,
        }


def ablate(
    experiment: Experiment,
    registry: Registry,
    workspace: Workspace,
    out: Path | None,
    fresh: bool,
    command: str,
    gate: Gate | None,
    say: Say,
) -> Ablated:
    """Measures an experiment and leaves its report, its figures and the recipes to use in a folder, and in MLflow.

    Args:
        experiment: validated.
        registry: where its plugins came from.
        workspace: where the folder is, unless ``out`` says otherwise, and MLflow's database.
        out: the folder.
        fresh: begin anew, whatever could be continued.
        command: what was typed, for the report.
        gate: judges every variant; without it, the column of verdicts stays empty.
        say: shows progress.

    Raises:
        StorageError: MLflow's store cannot be reached at the start, or the folder not be written.
        UsageError: the folder belongs to something else.
        RunnerError: the recipe cannot run here.
    """
    store = Store.open(workspace)
    wanted = json.loads(json.dumps(identity(experiment)))
    with stop_on_signals() as stop:
        folder = _folder(experiment, workspace, wanted, out, fresh)
        if (folder / ROUNDS).exists():
            say(f"going on in {folder}")
        try:
            with closing(MeasurementLog(folder, wanted)) as log:
                _lock(experiment, registry, folder)
                result = Ablation(experiment, registry, log, gate, say, stop, command).run()
                if not result.cases:
                    raise _nothing_yet(stop)
                recommendations = _write(experiment, result, folder)
                run_id, problem = _publish(store, experiment, result, log, say)
                if not stop and not problem:
                    write_durably(folder / RESULT, _json(result, recommendations))
        except OSError as error:
            raise StorageError(f"{folder}: {error.strerror}; free some space, or name another --out") from error
    return Ablated(result, recommendations, run_id, problem, stop)


def _nothing_yet(stop: Stop) -> RunnerError:
    error = RunnerError("interrupted before a round was measured; the same command goes on")
    error.exit_code = ExitCode(128 + int(stop.asked or 0))
    return error


def _publish(store: Store, experiment: Experiment, result: Result, log: MeasurementLog, say: Say) -> tuple[str, str]:
    """The parent run's id, or why there is none: a store that has gone away costs no measurement."""
    try:
        return publish(store, experiment, result, log), ""
    except StorageError as error:
        say(str(error))
        return "", str(error)


def _folder(
    experiment: Experiment, workspace: Workspace, wanted: dict[str, Any], out: Path | None, fresh: bool
) -> Path:
    """The folder to measure in: one that holds an interrupted ablation of the same, or a new one."""
    if out is None:
        parent = workspace.root / "ablations"
        begun = [path.parent for path in parent.glob(f"*/{HEAD}") if identity_of(path.parent) == wanted]
        unfinished = [path for path in begun if not is_finished(path)]
        if unfinished and not fresh:
            return max(unfinished, key=lambda path: (path / HEAD).stat().st_mtime)
        return parent / f"{folder_name(experiment.config.name)}-{uuid.uuid4().hex[:8]}"
    found = identity_of(out)
    if found is None or found == wanted:
        if found is not None and (fresh or is_finished(out)):
            if not fresh:
                raise UsageError(f"{out} holds this ablation, finished; --fresh measures it again, in its place")
            _clear(out)
        return out
    if fresh:
        _clear(out)
        return out
    differing = ", ".join(sorted(name for name in wanted if found.get(name) != wanted[name]))
    raise UsageError(f"{out} holds another ablation ({differing} differ); name another folder, or replace it: --fresh")


def _clear(folder: Path) -> None:
    """Forgets what was measured; files of other names stay, and the report is written over."""
    for name in (ROUNDS, RESULT, RUNS, HEAD):
        (folder / name).unlink(missing_ok=True)


def _lock(experiment: Experiment, registry: Registry, folder: Path) -> None:
    """Before anything is measured: what is changed later was not there then."""
    for case in experiment.cases:
        below = folder / "locks" / (folder_name(case.name) if case.name else "recipe")
        below.mkdir(parents=True, exist_ok=True)
        write_lock(case.recipe, below, registry, results=folder)


def _write(experiment: Experiment, result: Result, folder: Path) -> tuple[Recommendation, ...]:
    """Leaves everything in the folder but ``result.json``, which says that the ablation is finished."""
    recommendations = []
    for case, measured in zip(experiment.cases, result.cases, strict=False):
        recommendation = recommend(case, measured)
        suffix = f"-{folder_name(case.name)}" if case.name else ""
        write(recommendation, case, measured, folder / f"recommended{suffix}.yaml")
        recommendations.append(recommendation)
    if experiment.path.suffix == ".yaml" and experiment.path.parent.resolve() != folder.resolve():
        shutil.copy(experiment.path, folder / "experiment.yaml")
    plots = draw(result, folder)
    write_durably(folder / REPORT, markdown(result, recommendations, plots, HINT))
    return tuple(recommendations)


def _json(result: Result, recommendations: tuple[Recommendation, ...]) -> str:
    whole = {**result.data(), "recommendations": [asdict(each) for each in recommendations]}
    return json.dumps(redact_values(whole), indent=1) + "\n"
