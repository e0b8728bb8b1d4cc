"""Trains one recipe with several seeds, or on the folds of a cross-validation.

Each training is a child process and a separate run, below one run of the group in MLflow.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from runner.plugin.registry import Registry
from runner.recipe.joined_results import Computation, accepted_drift, record_computation
from runner.recipe.lock import computation_of
from runner.recipe.recipe import Recipe
from runner.system.errors import ExitCode, RunnerError
from runner.system.files import make_folder
from runner.system.hardware import usable_cores
from runner.system.interval import Interval
from runner.system.processes import Owner
from runner.system.secrets import redact
from runner.tracking import RunFolder, Status, Workspace
from runner.tracking import seeds as seed_groups
from runner.tracking.heartbeat import heartbeat
from runner.tracking.keys import mlflow_key
from runner.tracking.mlflow_view import headline_of, view_of
from runner.tracking.record import REPEATED, Record
from runner.tracking.store import Store, params_of, shown, text, user_tags
from runner.tracking.workspace import DIGITS, folder_name
from runner.training.group_publication import GroupPublication, keyed_interval
from runner.training.outputs import Display
from runner.training.result import stopped_by
from runner.training.seed_process import locked_data, train_seed
from runner.training.signals import Stop, stop_on_signals

FOLD = "data.folds.index"
"""Dotted path of the setting in which the runs of a cross-validation differ."""
GroupKind = Literal["seeds", "folds", "grid"]
_log = logging.getLogger(__name__)


class SeedsDisplay(Display, Protocol):
    """Display of the progress of several trainings."""

    def show_seeds(self, steps: Mapping[int, int | None]) -> None:
        """Shows the seeds that are training with their steps; None while a process starts."""


@dataclass(frozen=True)
class SeedsResult:
    """The output of ``runner run --seeds --json``, without its schema version.

    Attributes:
        name: Name of the group.
        status: How the group ended.
        run_id: The run of the group in MLflow.
        folder: The folder of the group.
        runs: Names by seed, of the runs that have started.
        values: The last evaluation, by metric and seed; that at ``steps`` in a group of repetitions
            that has not finished.
        means: Means of metrics that all seeds have, at the last step that they have in common.
        failures: Error messages by seed.
        seconds: Wall-clock time.
        exit_code: The exit code of the command.
        synthetic: Whether the data are synthetic.
        predictions: The file with the predictions of a finished cross-validation.
        steps: Steps of the means by metric, if the group has not finished.
        unfinished: Seeds of the runs that have started and not finished.
    """

    name: str
    status: Status
    run_id: str
    folder: str
    runs: dict[int, str]
    values: dict[str, dict[int, float]]
    means: dict[str, Interval]
    failures: dict[int, str]
    seconds: float
    exit_code: ExitCode
    synthetic: bool = False
    predictions: str | None = None
    steps: dict[str, int] = field(default_factory=dict)
    unfinished: tuple[int, ...] = ()

    def data(self) -> dict[str, Any]:
        """Returns the fields as a JSON object."""
        data = asdict(self)
        # Only a cross-validation has them.
        if self.predictions is None:
            del data["predictions"]
        data["means"] = {name: mean._asdict() for name, mean in self.means.items()}
        del data["exit_code"]
        return data


class GroupOutcome(NamedTuple):
    """The result of a group, with the curves and means that it is made from."""

    result: SeedsResult
    curves: seed_groups.Curves
    means: list[tuple[str, int, Interval]]


def train_seeds(
    recipes: Mapping[int, Recipe],
    registry: Registry,
    workspace: Workspace,
    display: SeedsDisplay,
    parallel: int,
    go_on: bool,
    tags: Mapping[str, str],
    note: str,
    resume_command: str,
    takeover: bool = False,
    kind: GroupKind = "seeds",
    varied: Sequence[str] = ("seed",),
    allow_drift: bool = False,
) -> SeedsResult:
    """Trains the same recipe with each of these seeds, on each fold, or with other values of other
    settings.

    Seeds that fail do not stop the others. SIGTERM and Ctrl-C let every training write a
    checkpoint.

    Args:
        recipes: The recipes by seed.
        registry: Contains their plugins.
        workspace: Contains groups and runs.
        display: Displays the progress of all runs.
        parallel: Number of simultaneous trainings, which share the processor's cores.
        go_on: Whether to continue the newest unfinished group of the same recipes, if there is one.
        tags: The user's tags of every run.
        note: The user's description of every run.
        resume_command: The command that continues the group.
        takeover: Whether a process on another machine that may own the group counts as dead.
        kind: What the runs are. Those of a grid are no repetitions, have no mean, and are numbered
            in ``recipes``.
        varied: Dotted paths of the settings in which the recipes differ; those of a grid may be
            the seed, too.
        allow_drift: Whether a group is continued although code, packages or data have changed.

    Raises:
        StorageError: MLflow's store or the workspace is not available at the start.
        UsageError: Another process is working on the group to continue, or code or packages have
            changed since it started.
    """
    started = time.perf_counter()
    group_tags = user_tags(tags)
    store = Store(workspace)
    recipe = next(iter(recipes.values()))
    group = None
    if go_on:
        group = _unfinished_group(recipes, kind, workspace, takeover)
    if group is None:
        group = _new_group(recipes, workspace, store, group_tags, note, kind, varied)
    folder = RunFolder(workspace.seeds / group.name)
    make_folder(folder.path)
    computation = _recorded_computation(folder, recipes, registry, allow_drift)
    publication = GroupPublication(
        store, folder, group, recipes, resume_command, varied
    )
    runs = seed_groups.runs_of(workspace, group)
    finished = {seed for seed, run in runs.items() if seed_groups.is_finished(run)}

    def progress() -> dict[str, Any]:
        seconds = group.seconds + time.perf_counter() - started
        return {"step": len(finished), "seconds": seconds}

    with (
        heartbeat(folder, group, progress) as final_values,
        stop_on_signals() as stop,
    ):
        # From here on, ``runner sync`` leaves the group to this process.
        publication.publish()
        options = {
            "workspace": str(workspace.root),
            "group": [group.name, group.run_id],
            "tags": dict(tags),
            "note": note,
            "allow_drift": allow_drift,
        }
        # Simultaneous trainings share the cores.
        threads = max(1, usable_cores() // parallel) if parallel > 1 else None
        steps = {seed: _step(run) for seed, run in runs.items()}
        joint_display = _JointDisplay(display, steps)

        def train(seed: int) -> None:
            run = runs.get(seed)
            _refuse_edits(folder, recipes, registry, computation)
            members = seed_groups.runs_of(workspace, group)
            seed_options = {**options, "data": locked_data(members, recipes, seed)}
            advance = partial(joint_display.advance, seed)
            with joint_display.training(seed):
                train_seed(
                    recipes[seed], registry, run, threads, seed_options, stop, advance
                )
            finished.add(seed)

        unfinished = [seed for seed in recipes if seed not in finished]
        failures = _failures(train, unfinished, parallel, stop)
        # The first failure determines the exit code of the command.
        exit_code = next(
            (error.exit_code for error in failures.values()), ExitCode.DONE
        )
        if stop.received is not None:
            exit_code = stopped_by(stop.received, recipe)
        seconds = time.perf_counter() - started
        outcome = _outcome(
            workspace, group, folder.path, len(recipes), failures, seconds, exit_code
        )
        if group.kind == "folds" and outcome.result.status == "FINISHED":
            # Few groups need the module.
            from runner.training.fold_predictions import predict_folds

            runs = seed_groups.runs_of(workspace, group)
            predictions = predict_folds(folder.path, recipes, registry, runs)
            result = replace(outcome.result, predictions=predictions)
            outcome = outcome._replace(result=result)
        # The record of the group, which ``runner ls`` reads, has the result.
        final_values.update(
            status=outcome.result.status,
            metrics=_metrics(outcome.means) | _best(outcome.result, group, recipe),
            reason=redact("; ".join(outcome.result.failures.values())),
        )
        publication.publish(outcome)
    return outcome.result


def _recorded_computation(
    folder: RunFolder,
    recipes: Mapping[int, Recipe],
    registry: Registry,
    allow_drift: bool,
) -> Computation:
    """Stores what the runs of a group compute with, and returns it.

    Raises:
        UsageError: It has changed since the group started, and that is not allowed.
    """
    computation = computation_of(recipes.values(), registry)
    name = f"group {folder.name}"
    for change in record_computation(folder.path, name, computation, allow_drift):
        _log.warning("drift: %s", change)
    return computation


def _refuse_edits(
    folder: RunFolder,
    recipes: Mapping[int, Recipe],
    registry: Registry,
    computation: Computation,
) -> None:
    """Raises a UsageError if a file was edited since this command started.

    The runs before and after that would be different experiments.
    """
    present = computation_of(recipes.values(), registry)
    accepted_drift(f"group {folder.name}", computation, present, is_allowed=False)


def _failures(
    train: Callable[[int], None], seeds: Sequence[int], parallel: int, stop: Stop
) -> dict[int, RunnerError]:
    """Trains ``parallel`` seeds at a time; returns the errors that no signal has caused."""
    failures: dict[int, RunnerError] = {}

    def train_unless_stopped(seed: int) -> None:
        try:
            if not stop:
                train(seed)
        except RunnerError as error:
            # An error after a signal is a consequence of it.
            if not stop:
                failures[seed] = error

    # The threads only wait for child processes.
    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(train_unless_stopped, seeds))
    return failures


def _outcome(
    workspace: Workspace,
    group: Record,
    folder: Path,
    count: int,
    failures: Mapping[int, RunnerError],
    seconds: float,
    exit_code: ExitCode,
) -> GroupOutcome:
    """Returns the result of a group of ``count`` seeds."""
    runs = seed_groups.runs_of(workspace, group)
    if exit_code == ExitCode.DONE:
        failures = _missing_members(group, runs)
        exit_code = ExitCode.FAILED if failures else ExitCode.DONE
    status: Status = "FINISHED"
    if exit_code != ExitCode.DONE:
        stopped: Status = "PREEMPTED" if exit_code == ExitCode.PREEMPTED else "STOPPED"
        status = "FAILED" if failures else stopped
    curves = seed_groups.evaluations(runs)
    means = []
    if group.kind in REPEATED:
        widening = seed_groups.widening(group)
        means = list(seed_groups.means(curves, count, group.bounds, widening))
        # Trainings that ended early are compared by their last evaluations.
        if status == "FINISHED":
            means += seed_groups.final_means(curves, count, group.bounds, widening)
    values = seed_groups.last(curves)
    steps: dict[str, int] = {}
    if status != "FINISHED":
        # The last mean of a metric remains. Values at other steps would not be those of the mean.
        steps = {name: step for name, step, _ in means}
        for name, step in steps.items():
            values[name] = {seed: curve[step] for seed, curve in curves[name].items()}
    result = SeedsResult(
        name=group.name,
        status=status,
        run_id=str(group.run_id),
        folder=str(folder),
        runs={seed: run.name for seed, run in runs.items()},
        values=values,
        means={name: mean for name, _, mean in means},
        failures={seed: str(error) for seed, error in failures.items()},
        seconds=seconds,
        synthetic=group.synthetic,
        exit_code=exit_code,
        steps=steps,
        unfinished=tuple(
            seed for seed, run in runs.items() if not seed_groups.is_finished(run)
        ),
    )
    return GroupOutcome(result, curves, means)


def _missing_members(
    group: Record, runs: Mapping[int, RunFolder]
) -> dict[int, RunnerError]:
    """Returns an error for each member of a group that has no finished run.

    A run belongs to its group by the digest of its recipe.
    """
    return {
        number: RunnerError(
            "its training ended, and the group has no finished run of it"
        )
        for number in group.digests
        if number not in runs or not seed_groups.is_finished(runs[number])
    }


def _unfinished_group(
    recipes: Mapping[int, Recipe],
    kind: GroupKind,
    workspace: Workspace,
    takeover: bool,
) -> Record | None:
    """Returns the newest unfinished group of these recipes, which is then this process's."""
    digests = {seed: recipe.digest for seed, recipe in recipes.items()}
    for group in seed_groups.groups(workspace):
        is_same = group.kind == kind and group.digests == digests
        if is_same and group.status != "FINISHED":
            RunFolder(workspace.seeds / group.name).confirm_abandoned(takeover)
            changes = {
                "status": "RUNNING",
                "reason": "",
                "owner": Owner.this_process(),
            }
            return group.model_copy(update=changes)
    return None


def _new_group(
    recipes: Mapping[int, Recipe],
    workspace: Workspace,
    store: Store,
    tags: Mapping[str, str],
    note: str,
    kind: GroupKind,
    varied: Sequence[str],
) -> Record:
    """Creates a group in MLflow."""
    recipe = next(iter(recipes.values()))
    started = time.time()
    name = f"{folder_name(recipe.name)}-{kind}"
    experiment = store.experiment(recipe.tracking.experiment, view_of(recipe))
    run_id = store.create_run(experiment, name)
    # The digits of MLflow's id make the name unique.
    name = f"{name}-{run_id[:DIGITS]}"
    store.rename_run(run_id, name)
    # Every run of the group has another value of these.
    overrides = {
        path: value for path, value in recipe.overrides.items() if path not in varied
    }
    return Record(
        kind=kind,
        name=name,
        recipe=recipe.name,
        digest=recipe.digest,
        digests={seed: recipe.digest for seed, recipe in recipes.items()},
        goal=len(recipes),
        unit="runs" if kind == "grid" else kind,
        experiment=recipe.tracking.experiment,
        tracking_uri=workspace.recorded_uri(shown(store.uri)),
        run_id=run_id,
        owner=Owner.this_process(),
        started=started,
        heartbeat=started,
        overrides=params_of(overrides),
        headline=headline_of(recipe),
        synthetic=recipe.data.is_synthetic(),
        smoke=recipe.train.smoke,
        tags=dict(tags),
        note=text(note),
        bounds=dict(seed_groups.bounds_of(recipe)),
    )


def _metrics(means: Sequence[tuple[str, int, Interval]]) -> dict[str, float]:
    """Returns the last mean of each evaluation metric and the bounds of its interval, by key."""
    metrics: dict[str, float] = {}
    # The means are in the order of steps, so the last ones remain.
    for name, _, mean in means:
        metrics.update(keyed_interval(name, mean))
    # MLflow stores no infinite bounds, which the interval of a single seed has.
    return {key: value for key, value in metrics.items() if not math.isinf(value)}


def _best(result: SeedsResult, group: Record, recipe: Recipe) -> dict[str, float]:
    """Returns the best value of the objective among the runs of a grid."""
    objective = recipe.objective
    if group.kind in REPEATED or objective is None:
        return {}
    values = [
        value
        for seed, value in result.values.get(objective.name, {}).items()
        if math.isfinite(value) and seed not in result.unfinished
    ]
    if not values:
        return {}
    select = max if objective.direction == "maximize" else min
    return {mlflow_key(f"eval/{objective.name}"): select(values)}


def _step(folder: RunFolder) -> int:
    """Returns the step at which the run continues or ended."""
    record = folder.record()
    if record is None:
        return 0
    if record.status == "FINISHED":
        return record.step
    return folder.last_checkpoint or 0


class _JointDisplay:
    """Shows the progress of several trainings as that of one."""

    def __init__(self, display: SeedsDisplay, steps: dict[int, int]) -> None:
        self._display = display
        self._steps = steps
        self._training: dict[int, int | None] = {}
        # Trainings report from several threads.
        self._lock = threading.Lock()
        display.advance(sum(steps.values()), {})

    @contextmanager
    def training(self, seed: int) -> Iterator[None]:
        """Shows inside the ``with`` that a seed is training."""
        with self._lock:
            self._training[seed] = None
            self._show_seeds()
        try:
            yield
        finally:
            with self._lock:
                del self._training[seed]
                self._show_seeds()

    def advance(self, seed: int, step: int, metrics: dict[str, float]) -> None:
        """Updates the progress of one of the seeds."""
        with self._lock:
            self._steps[seed] = step
            self._training[seed] = step
            self._show_seeds()
            self._display.advance(sum(self._steps.values()), metrics)

    def _show_seeds(self) -> None:
        self._display.show_seeds(dict(self._training))
