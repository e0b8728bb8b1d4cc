"""Trains one recipe with several seeds, each in a child process and as a separate
run below one run in MLflow.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from runner.child.protocol import Parent
from runner.child.spawn import Child, Limits
from runner.plugin.registry import Registry
from runner.recipe.loader import assignments
from runner.recipe.lock import drift
from runner.recipe.recipe import Recipe
from runner.system.errors import ExitCode, RunnerError, UsageError
from runner.system.files import make_folder
from runner.system.hardware import usable_cores
from runner.system.interval import Interval
from runner.system.processes import Owner
from runner.system.secrets import redact
from runner.system.suggestions import shown_path
from runner.system.text_lines import figure
from runner.system.workspace_paths import LOCK_NAME
from runner.tracking import RunFolder, Status, Workspace
from runner.tracking import seeds as kept
from runner.tracking.description import DESCRIPTION, code, describe
from runner.tracking.heartbeat import heartbeat
from runner.tracking.keys import interval_keys, mlflow_key
from runner.tracking.mlflow_view import headline_of, view_of
from runner.tracking.record import Record
from runner.tracking.store import Store, params_of, shown, text, user_tags
from runner.tracking.workspace import DIGITS, folder_name
from runner.training.outputs import Display, NoOutput
from runner.training.result import stopped_by
from runner.training.run import run
from runner.training.signals import Stop, stop_on_signals

_GRACE_SECONDS = 60.0  # for a checkpoint, after SIGTERM
_SIGN_SECONDS = 0.5
_log = logging.getLogger(__name__)


class SeedsDisplay(Display, Protocol):
    """Display of the progress of several trainings."""

    def show_seeds(self, steps: Mapping[int, int | None]) -> None:
        """Shows the seeds that are training with their steps; None while a process starts."""


@dataclass(frozen=True)
class SeedsResult:
    """The output of ``runner run --seeds --json``, without its schema version."""

    name: str
    status: Status
    run_id: str
    folder: str
    runs: dict[int, str]
    """Names by seed, of the runs that have started."""
    values: dict[str, dict[int, float]]
    """The last evaluation, by metric and seed."""
    means: dict[str, Interval]
    """Of metrics that all seeds have, at the last step that they have in common."""
    failures: dict[int, str]
    """Why, by seed."""
    seconds: float
    exit_code: ExitCode
    synthetic: bool = False
    """Whether the data are synthetic."""

    def data(self) -> dict[str, Any]:
        """Returns the fields as a JSON object."""
        data = asdict(self) | {
            "means": {name: mean._asdict() for name, mean in self.means.items()}
        }
        del data["exit_code"]
        return data


def train_seeds(
    recipes: Mapping[int, Recipe], registry: Registry, workspace: Workspace, display: SeedsDisplay, parallel: int,
    go_on: bool, tags: Mapping[str, str], note: str, again: str, takeover: bool = False,
) -> SeedsResult:  # fmt: skip
    """Trains the same recipe with each of these seeds; ``parallel`` of them at a
    time share the processor's cores.

    Those that fail do not stop the others. SIGTERM and Ctrl-C let every training write a checkpoint.

    Args:
        recipes: by seed.
        registry: contains their plugins.
        workspace: contains groups and runs.
        display: displays the progress of all runs.
        parallel: number of simultaneous trainings.
        go_on: whether to continue the newest unfinished group of the same recipes, if there is one.
        tags: the user's tags of every run.
        note: the user's description of every run.
        again: the command that continues the group.
        takeover: whether a process on another machine that may own the group counts as dead.

    Raises:
        StorageError: MLflow's store or the workspace is not available at the start.
        UsageError: another process is working on the group to continue.
    """
    started = time.perf_counter()
    named = user_tags(tags)
    store = Store(workspace)
    recipe = next(iter(recipes.values()))
    group = _begun(recipes, workspace, store, go_on, takeover, named, note)
    folder = RunFolder(workspace.seeds / group.name)
    make_folder(folder.path)
    published = partial(_publish, store, recipes, group, again)
    published()
    begun = kept.runs_of(workspace, group)
    finished = {seed for seed, run in begun.items() if _is_finished(run)}

    def known() -> dict[str, Any]:
        return {
            "step": len(finished),
            "seconds": group.seconds + time.perf_counter() - started,
        }

    with heartbeat(folder, group, known) as ended, stop_on_signals() as stop:
        given = {"group": [group.name, group.run_id], "tags": dict(tags), "note": note}
        together = _Together(display, {seed: _step(run) for seed, run in begun.items()})

        def train(seed: int) -> None:
            order = _Order(
                recipes[seed], registry, workspace, begun.get(seed), parallel, given
            )
            with together.training(seed):
                order.carry_out(stop, partial(together.advance, seed))
            finished.add(seed)

        failures = _failures(
            train, [seed for seed in recipes if seed not in finished], parallel, stop
        )
        code = next((error.exit_code for error in failures.values()), ExitCode.DONE)
        if stop.asked is not None:
            code = stopped_by(stop.asked, recipe)
        seconds = time.perf_counter() - started
        result, curves, means = _came_to(
            workspace, group, folder.path, len(recipes), failures, seconds, code
        )
        ended.update(
            status=result.status,
            metrics=_metrics(means),
            reason=redact("; ".join(result.failures.values())),
        )
        published(result, curves, means)
    return result


def _failures(
    train: Callable[[int], None], seeds: Sequence[int], parallel: int, stop: Stop
) -> dict[int, RunnerError]:
    """Trains ``parallel`` seeds at a time; returns the errors of those that
    failed without a signal.
    """
    found: dict[int, RunnerError] = {}

    def one(seed: int) -> None:
        try:
            if not stop:
                train(seed)
        except RunnerError as error:
            if not stop:
                found[seed] = error

    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(one, seeds))
    return found


def _came_to(
    workspace: Workspace, group: Record, folder: Path, count: int, failures: Mapping[int, RunnerError], seconds: float,
    code: ExitCode,
) -> tuple[SeedsResult, kept.Curves, list[tuple[str, int, Interval]]]:  # fmt: skip
    """The result, and the curves and means that it is made from."""
    status: Status = (
        "FINISHED" if code == ExitCode.DONE else "FAILED" if failures else "KILLED"
    )
    runs = kept.runs_of(workspace, group)
    curves = kept.evaluations(runs)
    means = list(kept.means(curves, count, group.bounds))
    result = SeedsResult(
        name=group.name, status=status, run_id=str(group.run_id), folder=str(folder),
        runs={seed: each.name for seed, each in runs.items()}, values=kept.last(curves),
        means={name: mean for name, _, mean in means}, failures={seed: str(each) for seed, each in failures.items()},
        seconds=seconds, synthetic=group.synthetic, exit_code=code,
    )  # fmt: skip
    return result, curves, means


def _begun(
    recipes: Mapping[int, Recipe],
    workspace: Workspace,
    store: Store,
    go_on: bool,
    takeover: bool,
    tags: Mapping[str, str],
    note: str,
) -> Record:
    """Returns the group to continue, or a new one that is created in MLflow."""
    digests = {seed: recipe.digest for seed, recipe in recipes.items()}
    for group in kept.groups(workspace) if go_on else ():
        if group.digests == digests and group.status != "FINISHED":
            RunFolder(workspace.seeds / group.name).confirm_abandoned(takeover)
            return group.model_copy(
                update={
                    "status": "RUNNING",
                    "reason": "",
                    "owner": Owner.this_process(),
                }
            )
    recipe, now = next(iter(recipes.values())), time.time()
    name = f"{folder_name(recipe.name)}-seeds"
    run_id = store.create_run(
        store.experiment(recipe.tracking.experiment, view_of(recipe)), name
    )
    name = f"{name}-{run_id[:DIGITS]}"
    store.rename_run(run_id, name)
    overrides = {
        path: value for path, value in recipe.overrides.items() if path != "seed"
    }
    return Record(
        kind="seeds", name=name, recipe=recipe.name, digest=recipe.digest, digests=digests, goal=len(recipes),
        unit="seeds", experiment=recipe.tracking.experiment, tracking_uri=workspace.recorded_uri(shown(store.uri)),
        run_id=run_id, owner=Owner.this_process(), started=now, heartbeat=now, overrides=params_of(overrides),
        headline=headline_of(recipe), synthetic=recipe.data.is_synthetic(), tags=dict(tags), note=text(note),
        bounds=dict(kept.bounds_of(recipe)),
    )  # fmt: skip


def _metrics(means: Sequence[tuple[str, int, Interval]]) -> dict[str, float]:
    """Returns the last mean of each evaluation metric and the bounds of its interval, by key."""
    latest = {
        key: value for name, _, mean in means for key, value in _keyed(name, mean)
    }
    return {key: value for key, value in latest.items() if math.isfinite(value)}


def _keyed(name: str, mean: Interval) -> Iterator[tuple[str, float]]:
    """Yields a mean and the bounds of its interval with their keys."""
    key = mlflow_key(f"eval/{name}")
    yield from zip((key, *interval_keys(key)), mean, strict=True)


def _step(folder: RunFolder) -> int:
    """Returns the step at which the run continues or ended."""
    record = folder.record()
    return (
        0
        if record is None
        else record.step
        if record.status == "FINISHED"
        else folder.last_checkpoint or 0
    )


def _is_finished(folder: RunFolder) -> bool:
    record = folder.record()
    return record is not None and record.status == "FINISHED"


@dataclass(frozen=True)
class _Order:
    """The arguments of one training of the group."""

    recipe: Recipe
    registry: Registry
    workspace: Workspace
    folder: RunFolder | None  # of the run to continue
    parallel: int
    given: Mapping[str, Any]  # group, tags and note of a new run

    def carry_out(
        self, stop: Stop, advance: Callable[[int, dict[str, float]], None]
    ) -> None:
        """Trains in a child process, which is stopped together with this one; raises a
        ``ChildError`` with the error.
        """
        # This process owns the group now, and with it all runs that the former owner had started.
        begun = self.folder is not None and not self.folder.obstacle(takeover=True)
        folder = str(self.folder.path) if self.folder and begun else None
        options = {
            "workspace": str(self.workspace.root),
            "folder": folder,
            **self.given,
        }
        threads = max(1, usable_cores() // self.parallel) if self.parallel > 1 else None
        limits, files = Limits(grace=_GRACE_SECONDS), self.registry.files
        with Child(
            __name__,
            self.recipe,
            plugin_files=files,
            options=options,
            limits=limits,
            threads=threads,
        ) as child:
            while (told := child.receive(stop.__bool__)) is not None:
                advance(told["step"], told["metrics"])


class _Together:
    """Shows the progress of several trainings as that of one."""

    def __init__(self, display: SeedsDisplay, steps: dict[int, int]) -> None:
        self._display = display
        self._steps = steps
        self._training: dict[int, int | None] = {}
        self._lock = threading.Lock()
        display.advance(sum(steps.values()), {})

    @contextmanager
    def training(self, seed: int) -> Iterator[None]:
        """Shows inside the ``with`` that a seed is training."""
        with self._lock:
            self._training[seed] = None
            self._display.show_seeds(dict(self._training))
        try:
            yield
        finally:
            with self._lock:
                del self._training[seed]
                self._display.show_seeds(dict(self._training))

    def advance(self, seed: int, step: int, metrics: dict[str, float]) -> None:
        """Updates the progress of one of the seeds."""
        with self._lock:
            self._steps[seed] = step
            self._training[seed] = step
            self._display.show_seeds(dict(self._training))
            self._display.advance(sum(self._steps.values()), metrics)


class _Reporting(NoOutput):
    """Sends the progress of the training to the parent."""

    def __init__(self, parent: Parent) -> None:
        self._parent, self._told = parent, 0.0

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Twice a second at most."""
        if time.monotonic() - self._told > _SIGN_SECONDS:
            self._told = time.monotonic()
            self._parent.tell(step=step, metrics=metrics)


def main(parent: Parent) -> None:
    """Trains one seed of the group, from its newest checkpoint if there is one."""
    recipe, registry = parent.load()
    options = parent.options
    folder = RunFolder(Path(options["folder"])) if options["folder"] else None
    if folder is not None:
        changed = [
            str(each)
            for each in drift(folder.path / LOCK_NAME, recipe, registry)
            if each.matters
        ]
        if changed:
            raise UsageError(
                f"run {folder.name} would not continue as it started: {'; '.join(changed)}"
            )
    name, run_id = options["group"]
    result = run(
        recipe, registry, Workspace(options["workspace"]), _Reporting(parent), folder,
        own_tags=options["tags"], note=options["note"], parent=(name, run_id), takeover=True,
    )  # fmt: skip
    sys.exit(result.exit_code)


def _publish(
    store: Store, recipes: Mapping[int, Recipe], group: Record, again: str, result: SeedsResult | None = None,
    curves: kept.Curves | None = None, means: Sequence[tuple[str, int, Interval]] = (),
) -> None:  # fmt: skip
    """Writes the group and its results to MLflow; a repetition changes only what is new."""
    now, recipe, run_id = (
        time.time_ns() // 1_000_000,
        next(iter(recipes.values())),
        str(group.run_id),
    )
    metrics = [
        (key, value, now, step)
        for name, step, mean in means
        for key, value in _keyed(name, mean)
        if math.isfinite(value)
    ]
    values = {name: value for name, value in recipe.values().items() if name != "seed"}
    overridden = [
        each for each in assignments(recipe.overrides) if not each.startswith("seed=")
    ]
    facts = {
        "recipe": f"{code(recipe.name)}, from {code(shown_path(recipe.path))}",
        "result": f"{result.status}; {_spelled(result.means, recipe.headline)}"
        if result
        else "",
        "seeds": ", ".join(map(str, recipes)),
        "overridden": code(*overridden),
        "continue it": "" if result and result.status == "FINISHED" else code(again),
        "compare it": code(
            f"runner compare {group.name.rpartition('-')[2]} OTHER_GROUP"
        ),
    }
    tags = {
        **group.tags, "kind": "seeds", "overrides": ", ".join(overridden) or "none",
        "mlflow.source.name": str(recipe.path),
        DESCRIPTION: "\n\n".join(filter(None, (group.note, describe(facts)))),
    }  # fmt: skip
    try:
        store.send(
            run_id,
            metrics,
            params_of({**values, "seeds": sorted(recipes)}),
            params_of(tags),
        )
        if result is not None:
            for path in kept.draw(
                curves or {},
                recipe.headline,
                recipe.length[0],
                Path(result.folder),
                group.bounds,
            ):
                store.client.log_artifact(run_id, str(path))
        store.set_status(run_id, result.status if result else "RUNNING", now)
    except (
        Exception
    ) as error:  # MLflow raises whatever its database and network drivers raise
        _log.warning(
            "the results of %s are missing in MLflow: %s",
            group.name,
            str(error).partition("\n")[0],
        )


def _spelled(means: Mapping[str, Interval], headline: Sequence[str]) -> str:
    """The means with their intervals, the headline first."""
    names = dict.fromkeys([*(name for name in headline if name in means), *means])
    return ", ".join(
        f"eval/{name} {figure(means[name].mean)} [{figure(means[name].low)}, {figure(means[name].high)}]"
        for name in names
    )
