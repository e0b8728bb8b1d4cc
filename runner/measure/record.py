"""What ``runner ls`` knows of an ablation, in its folder, also while it measures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runner.measure.analysis import Result
from runner.measure.experiment import Experiment
from runner.measure.rounds import MeasurementLog
from runner.system.processes import Owner
from runner.tracking.heartbeat import heartbeat
from runner.tracking.record import Record
from runner.tracking.store import params_of, shown
from runner.tracking.workspace import RunFolder, Workspace
from runner.verify.variants import ALL


@contextmanager
def recorded(experiment: Experiment, log: MeasurementLog, workspace: Workspace) -> Iterator[Callable[[Result], None]]:
    """Keeps the record of an ablation in the workspace, from here to its end; what it yields takes the result.

    One in a folder of its own (``--out``) has none: that folder is the user's.
    """
    if log.folder.parent != workspace.ablations:
        yield lambda _result: None
        return
    folder, recipe, now = RunFolder(log.folder), experiment.cases[0].recipe, time.time()
    record = Record(
        kind="ablation", name=folder.name, recipe=recipe.name, digest=experiment.digest, unit="rounds",
        goal=experiment.config.rounds.most * len(experiment.cases), experiment=recipe.tracking.experiment,
        tracking_uri=workspace.recorded_uri(shown(workspace.tracking_uri)), owner=Owner.this_process(),
        started=now - log.seconds, heartbeat=now, overrides=params_of(recipe.overrides),
    )  # fmt: skip

    def rounds() -> int:
        return sum("update" in entry for entry in log.entries)

    def take(result: Result) -> None:
        ratios = {
            " ".join(filter(None, (case.name, variant.name))): (variant.name, variant.ratio.value)
            for case in result.cases
            for variant in case.variants
            if not variant.caught
        }
        ended.update(
            status="KILLED" if result.interrupted else "FINISHED", run_id=result.run_id or None,
            metrics={name: ratio for name, (_, ratio) in ratios.items()},
            headline=tuple(name for name, (variant, _) in ratios.items() if variant == ALL),
        )  # fmt: skip
        if not result.interrupted:
            ended["goal"] = rounds()  # of which it needs no more

    with heartbeat(folder, record, lambda: {"seconds": log.seconds, "step": rounds()}) as ended:
        yield take
