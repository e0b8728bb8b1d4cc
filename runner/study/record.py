"""The record of a study for ``runner ls``, in the study's folder, updated with every trial."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from optuna.study import Study, StudyDirection
from optuna.trial import TrialState

from runner.study.definition import Definition
from runner.study.publish import PARENT
from runner.study.summary import ATTEMPTS, Used
from runner.system.processes import Owner
from runner.tracking.record import Record, Status
from runner.tracking.store import params_of, shown
from runner.tracking.workspace import Workspace


def study_record(
    name: str, definition: Definition, study: Study, here: Workspace, status: Literal["RUNNING"] | Status
) -> Record:
    """Returns the record of a study, whose folder has this name."""
    config, recipe, now = definition.config, definition.recipe, time.time()
    trials = study.get_trials(deepcopy=False)
    begun = [each["begin"] for trial in trials for each in trial.user_attrs.get(ATTEMPTS, ())]
    used, sign = Used.by(trials), 1 if study.directions[0] == StudyDirection.MAXIMIZE else -1
    counting = [
        trial.values
        for trial in trials
        if trial.state == TrialState.COMPLETE and all(value <= 0 for value in trial.constraints.values())
    ]
    best: Sequence[float] = max(counting, key=lambda values: sign * values[0], default=[])
    return Record(
        kind="study", name=name, recipe=recipe.name, digest=definition.digest, unit="trials",
        goal=config.budget.trials, step=used.trials, experiment=recipe.tracking.experiment,
        tracking_uri=here.recorded_uri(shown(here.tracking_uri)), owner=Owner.this_process(),
        started=min(begun, default=now), heartbeat=now,
        run_id=study.user_attrs.get(PARENT), status=status, seconds=used.seconds,
        overrides=params_of(recipe.overrides), synthetic=recipe.data.is_synthetic(),
        headline=tuple(config.objectives),
        metrics=dict(zip(config.objectives, best, strict=False)),
    )  # fmt: skip
