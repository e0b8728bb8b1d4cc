"""A study from its file to its report: workers, and what is written when they are done."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from optuna.study import Study

from runner.child.protocol import Parent
from runner.child.spawn import Child, ChildError, Limits
from runner.plugin.registry import Registry
from runner.recipe.document import dump_inline, read
from runner.recipe.loader import shipped
from runner.recipe.render import render
from runner.study.attempts import RECIPE
from runner.study.definition import Definition, load_study
from runner.study.leases import Leases
from runner.study.plots import draw
from runner.study.report import html
from runner.study.store import DEFINITION, StudyStore, database, storage_errors
from runner.study.summary import Summary, summarise
from runner.study.trial import Say
from runner.study.worker import REPORT as REPORTING
from runner.study.worker import Worker
from runner.system.errors import RunnerError, UsageError
from runner.system.files import write_durably
from runner.system.hardware import usable_cores
from runner.tracking import Workspace, workspace
from runner.train.signals import Stop, stop_on_signals

REPORT = "report.html"
NO_PLOTS = "No plots: matplotlib is not installed here (pip install 'proven-runner[plots]')."
NO_VALUES = "No plots: no trial has a value yet."
END_SECONDS = 60.0
"""For the workers, to write their checkpoints."""


def work(definition: Definition, workspace: Workspace, files: Sequence[Path], stop: Stop, say: Say) -> str:
    """Works on a study as one worker.

    Returns:
        Why it ended before all trials were finished; empty if they are.

    Raises:
        StorageError: the study's storage or MLflow cannot be reached.
        UsageError: the storage has a study of that name with another definition.
    """
    with storage_errors(database(workspace)):
        worker = Worker(definition, workspace, files, stop, say)
        try:
            ended = worker.run()
        except RunnerError:
            _conclude(worker, stop)
            raise
        else:
            _conclude(worker, stop)
            return ended
        finally:
            worker.close()


def work_together(study: str, sets: Sequence[str], files: Sequence[Path], parallel: int, stop: Stop, say: Say) -> str:
    """Starts as many workers on this machine as the budget says, and waits for them.

    Args:
        study: its file.
        sets: assignments for its recipe from the command line.
        files: local plugin files that the recipe needs.
        parallel: how many.
        stop: becomes true when they have to end.
        say: shows progress.

    Raises:
        RunnerError: a worker failed.
    """
    own = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(own) if own.isdecimal() else max(1, usable_cores() // parallel)
    say(f"{parallel} workers with {threads} threads each")
    options = {"study": str(study), "sets": list(sets)}

    def one(_number: int) -> ChildError | None:
        try:
            with Child(
                "runner.study.search", plugin_files=files, options=options, limits=Limits(grace=END_SECONDS),
                threads=threads, talks=True,
            ) as worker:  # fmt: skip
                while (told := worker.receive(lambda: bool(stop))) is not None:
                    say(told["say"])
        except ChildError as error:
            return error
        return None

    with ThreadPoolExecutor(parallel) as pool:
        failed = [error for error in pool.map(one, range(parallel)) if error is not None]
    if stop:
        return "it was told to end"
    if failed:
        error = RunnerError(f"{len(failed)} of {parallel} workers failed; what they said is above")
        error.exit_code = failed[0].exit_code
        raise error
    return ""


def main(parent: Parent) -> None:
    """One of several workers of this machine."""
    registry = Registry(parent.plugin_files)
    definition = load_study(parent.options["study"], parent.options["sets"], registry)
    with stop_on_signals() as stop:
        work(definition, workspace(), registry.files, stop, lambda text: parent.tell(say=text))


def fresh(definition: Definition, workspace: Workspace) -> None:
    """Forgets what a study of that name has tried; MLflow keeps it.

    Raises:
        UsageError: a worker is at it.
    """
    store = StudyStore.open(workspace)
    with storage_errors(store.url):
        leases = Leases(store.url, definition.config.name)
        store.delete(definition.config.name, leases)
        leases.close()
    folder = workspace.root / "studies" / definition.config.name
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}.{int(time.time())}.before"))


def find(reference: str, workspace: Workspace) -> tuple[Study, Summary]:
    """A study by its name or its file, as it stands.

    Raises:
        UsageError: there is none.
    """
    store = StudyStore.open(workspace)
    with storage_errors(store.url):
        study = store.find(_name(reference))
        leases = Leases(store.url, study.study_name)
        try:
            return study, summarise(study, leases.all())
        finally:
            leases.close()


def file_of(reference: str, workspace: Workspace) -> tuple[str, list[str]]:
    """The file of a study that is named by it or by its name, with the assignments that it was begun with.

    Raises:
        UsageError: there is no such study.
    """
    if Path(reference).is_file():
        return reference, []
    store = StudyStore.open(workspace)
    with storage_errors(store.url):
        described = store.find(_name(reference)).user_attrs[DEFINITION]
    return described["file"], described["sets"]


def write_report(study: Study, summary: Summary, folder: Path) -> list[Path]:
    """Writes report, pictures and the recipes of the best trials.

    Returns:
        All files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plots = draw(summary, folder)
    hint = NO_PLOTS if any(row.values for row in summary.rows) else NO_VALUES
    write_durably(folder / REPORT, html(summary, plots, hint))
    best = folder / "best"
    best.mkdir(exist_ok=True)
    for old in best.glob("*.yaml"):
        old.unlink(missing_ok=True)
    recipes = []
    for row in summary.best:
        recipes.append(best / f"trial-{row.number:04d}.yaml")
        write_durably(recipes[-1], recipe_text(study, summary, row.number))
    return [folder / REPORT, *plots, *recipes]


def recipe_text(study: Study, summary: Summary, number: int) -> str:
    """The recipe of a trial as YAML that ``runner run`` accepts and that reproduces it.

    Raises:
        UsageError: the trial has none.
    """
    trials = study.get_trials(deepcopy=False)
    kept = trials[number].user_attrs.get(RECIPE) if 0 <= number < len(trials) else None
    if kept is None:
        raise UsageError(f"study '{study.study_name}' has no trial {number} with a recipe")
    row = next(row for row in summary.rows if row.number == number)
    values = ", ".join(f"{name} {value:.6g}" for name, value in row.values.items())
    settings = ", ".join(f"{path}: {dump_inline(value)}" for path, value in row.settings.items())
    head = [f"# Trial {number} of study {study.study_name}: {values or row.cause}.", f"# Searched: {settings}"]
    return "\n".join([*head, *render(kept)]) + "\n"


def _conclude(worker: Worker, stop: Stop) -> None:
    """Writes the report as it stands, and tells MLflow."""
    with worker.leases.waiting(REPORTING):
        summary = summarise(worker.study)
        files = write_report(worker.study, summary, worker.folder)
        tags = {"best.trials": [row.number for row in summary.best], "trials": summary.used.trials, **{
            f"best.{name}": summary.best[0].values[name] for name in summary.objectives if summary.best}}  # fmt: skip
        worker.publisher.end("KILLED" if stop else "FINISHED", tags, files)


def _name(reference: str) -> str:
    """The name of a study, or the one in a file."""
    path = Path(reference)
    if path.is_file() and reference not in shipped():
        node = read(path, []).get("name")
        return str(node.value) if node is not None else reference
    return reference
