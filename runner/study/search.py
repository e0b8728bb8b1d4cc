"""How the workers of a study are begun: by its file or its name, anew, and several beside each other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from runner.child.spawn import Child, ChildError, Limits
from runner.study.leases import Leases
from runner.study.store import DEFINITION, StudyStore
from runner.system.errors import RunnerError
from runner.system.hardware import usable_cores

if TYPE_CHECKING:
    from runner.child.protocol import Parent
    from runner.study.definition import Definition
    from runner.tracking.workspace import Workspace
    from runner.train.signals import Stop

_END_SECONDS = 60.0  # for workers, to write their checkpoints


def file_of(reference: str, workspace: Workspace) -> tuple[str, list[str]]:
    """The file of a study that is named by it or by its name, with the assignments that it was begun with."""
    if Path(reference).is_file():
        return reference, []
    with StudyStore.session(workspace) as store:
        described = store.find(reference).user_attrs[DEFINITION]
    return described["file"], described["sets"]


def fresh(definition: Definition, workspace: Workspace) -> None:
    """Forgets what a study of that name has tried, unless a worker is at it; MLflow keeps it."""
    name = definition.config.name
    with StudyStore.session(workspace) as store:
        store.delete(name, Leases(store.storage.engine, name))
    folder = workspace.root / "studies" / name
    if folder.exists():
        folder.rename(folder.with_name(f"{name}.{int(time.time())}.before"))


def work_together(
    study: str, sets: Sequence[str], files: Sequence[Path], parallel: int, stop: Stop, say: Callable[[str], None]
) -> str:
    """Starts so many workers on this machine for a study's file, and waits for them; says why they ended early."""
    own = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(own) if own.isdecimal() else max(1, usable_cores() // parallel)
    say(f"{parallel} workers with {threads} threads each")
    options = {"study": study, "sets": list(sets)}

    def one(_number: int) -> ChildError | None:
        try:
            with Child(
                "runner.study.search", plugin_files=files, options=options, limits=Limits(grace=_END_SECONDS),
                threads=threads, talks=True,
            ) as worker:  # fmt: skip
                while (told := worker.receive(lambda: bool(stop))) is not None:
                    say(told["say"])
        except ChildError as error:
            return error
        return None

    with ThreadPoolExecutor(parallel) as pool:
        failed = [error for error in pool.map(one, range(parallel)) if error is not None]
    if failed and not stop:
        error = RunnerError(f"{len(failed)} of {parallel} workers failed; what they said is above")
        error.exit_code = failed[0].exit_code
        raise error
    return "it was told to end" if stop else ""


def main(parent: Parent) -> None:
    """One of several workers of this machine."""
    from runner.plugin.registry import Registry
    from runner.study.definition import load_study
    from runner.study.worker import work
    from runner.tracking.workspace import Workspace
    from runner.train.signals import stop_on_signals

    registry = Registry(parent.plugin_files)
    definition = load_study(parent.options["study"], parent.options["sets"], registry)
    with stop_on_signals() as stop:
        work(definition, Workspace(), registry.files, stop, lambda text: parent.tell(say=text))
