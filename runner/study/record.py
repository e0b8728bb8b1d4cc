"""The record of a study for ``runner ls``, in the study's folder, updated with every trial."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from optuna.study import Study, StudyDirection

from runner.study.attempts import ATTEMPTS, Used
from runner.study.definition import Definition
from runner.study.publish import PARENT
from runner.study.summary import is_valid
from runner.system.processes import Owner
from runner.tracking.record import Record, Status
from runner.tracking.store import params_of, shown
from runner.tracking.workspace import Workspace


def study_record(
    name: str,
    definition: Definition,
    study: Study,
    here: Workspace,
    status: Literal["RUNNING"] | Status,
) -> Record:
    """Returns the record of a study, whose folder has this name."""
    config = definition.config
    recipe = definition.recipe
    now = time.time()
    trials = study.get_trials(deepcopy=False)
    used = Used.by(trials)
    starts = [attempt["begin"] for trial in trials for attempt in trial.user_attrs.get(ATTEMPTS, ())]

    sign = 1 if study.directions[0] == StudyDirection.MAXIMIZE else -1
    valid_values = [trial.values for trial in trials if is_valid(trial)]
    best: Sequence[float] = max(valid_values, key=lambda values: sign * values[0], default=[])
    return Record(
        kind="study",
        name=name,
        recipe=recipe.name,
        digest=definition.digest,
        unit="trials",
        goal=config.budget.trials,
        step=used.trials,
        experiment=recipe.tracking.experiment,
        tracking_uri=here.recorded_uri(shown(here.tracking_uri)),
        owner=Owner.this_process(),
        started=min(starts, default=now),
        heartbeat=now,
        run_id=study.user_attrs.get(PARENT),
        status=status,
        seconds=used.seconds,
        overrides=params_of(recipe.overrides),
        synthetic=recipe.data.is_synthetic(),
        headline=tuple(config.objectives),
        metrics=dict(zip(config.objectives, best, strict=False)),
    )
