"""The record of an ablation for ``runner ls``, in the ablation's folder, also
during the measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from runner.ablation.analysis import Result
from runner.ablation.experiment import Experiment
from runner.ablation.measurement_log import MeasurementLog
from runner.system.processes import Owner
from runner.tracking.heartbeat import heartbeat
from runner.tracking.record import Record
from runner.tracking.store import params_of, shown
from runner.tracking.workspace import RunFolder, Workspace
from runner.verify.variants import ALL


@contextmanager
def recorded(
    experiment: Experiment, log: MeasurementLog, workspace: Workspace
) -> Iterator[Callable[[Result], None]]:
    """Keeps the record of an ablation by time; what it yields takes the result."""

    def rounds() -> int:
        return sum("update" in entry for entry in log.entries)

    goal = experiment.config.rounds.most * len(experiment.cases)
    with heartbeat_of(experiment, log, workspace, "rounds", goal, rounds) as final:

        def take(result: Result) -> None:
            ratios = {
                " ".join(filter(None, (case.name, variant.name))): (
                    variant.name,
                    variant.ratio.value,
                )
                for case in result.cases
                for variant in case.variants
                if not variant.caught
            }
            final.update(
                status="STOPPED" if result.interrupted else "FINISHED",
                run_id=result.run_id or None,
                metrics={name: ratio for name, (_, ratio) in ratios.items()},
                headline=tuple(
                    name for name, (variant, _) in ratios.items() if variant == ALL
                ),
            )
            if not result.interrupted:
                # A finished ablation is shown as complete, although more rounds were allowed.
                final["goal"] = rounds()

        yield take


@contextmanager
def heartbeat_of(
    experiment: Experiment,
    log: MeasurementLog,
    workspace: Workspace,
    unit: str,
    goal: int,
    count: Callable[[], int],
) -> Iterator[dict[str, Any]]:
    """Keeps the record of an ablation in the workspace up to date until it ends.

    An ablation in a folder of the user (``--out``) has no record.

    Args:
        experiment: The ablation.
        log: Its measurements.
        workspace: Where its record is, if its folder is there.
        unit: What ``count`` counts.
        goal: The largest count.
        count: Called for the progress.

    Yields:
        Entries of the record at the end.
    """
    # ``runner ls`` lists the folders of the workspace only.
    if log.folder.parent != workspace.ablations:
        yield {}
        return
    folder = RunFolder(log.folder)
    recipe = experiment.cases[0].recipe
    started = time.time()
    record = Record(
        kind="ablation",
        name=folder.name,
        recipe=recipe.name,
        digest=experiment.digest,
        unit=unit,
        goal=goal,
        experiment=recipe.tracking.experiment,
        tracking_uri=workspace.recorded_uri(shown(workspace.tracking_uri)),
        owner=Owner.this_process(),
        started=started - log.seconds,
        heartbeat=started,
        overrides=params_of(recipe.overrides),
        synthetic=recipe.data.is_synthetic(),
    )
    with heartbeat(
        folder, record, lambda: {"seconds": log.seconds, "step": count()}
    ) as final:
        yield final
