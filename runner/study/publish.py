"""A study in MLflow: one run for the study, and below it one for every trial."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.secrets import redact
from runner.study.training import SPOOL
from runner.tracking.periodic import Periodic
from runner.tracking.shipper import Shipper
from runner.tracking.store import Store
from runner.tracking.values import key, params_of, text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optuna.study import Study

SHIP_SECONDS = 5.0
PARENT = "runner.mlflow_run"
"""The attribute of a study that has the parent's id."""
_STATUS = {"COMPLETE": "FINISHED", "PRUNED": "KILLED", "FAIL": "FAILED"}
_log = logging.getLogger(__name__)


class Publisher:
    """Writes a study to MLflow. A store that has gone away costs no trial: what it lacks is sent when it is back.

    Args:
        store: has answered.
        experiment: the name of the MLflow experiment.
        study: which.
    """

    def __init__(self, store: Store, experiment: str, study: Study) -> None:
        self._store, self._study = store, study
        self._experiment_id = store.experiment(experiment)

    def begin(self, description: Mapping[str, Any]) -> None:
        """The parent run, made once whoever comes first.

        Raises:
            StorageError: MLflow cannot be reached.
        """
        run_id = self._run(self._study.study_name, PARENT, self._study)
        self._try(lambda: self._store.set_status(run_id, "RUNNING", _now()))
        self._try(lambda: self._store.send(run_id, [], params_of(description), {"study": "parent"}))

    def trial(self, name: str, trial: Any, values: Mapping[str, Any]) -> str:
        """The run of a trial that begins, or goes on.

        Raises:
            StorageError: MLflow cannot be reached.
        """
        run_id = self._run(name, PARENT, trial)
        tags = {"mlflow.parentRunId": self._study.user_attrs[PARENT], "study": self._study.study_name,
                "trial": str(trial.number)}  # fmt: skip
        self._try(lambda: self._store.send(run_id, [], params_of(values), tags))
        self._try(lambda: self._store.set_status(run_id, "RUNNING", _now()))
        return run_id

    @contextmanager
    def shipping(self, run_id: str, folder: Path) -> Iterator[None]:
        """Carries what a training logs to MLflow, beside it and a last time when it has ended."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SPOOL).touch()
        shipper = Shipper(self._store, run_id, folder / SPOOL)
        beside = Periodic("mlflow", SHIP_SECONDS, shipper.try_to_ship)
        try:
            yield
        finally:
            beside.stop()
            shipper.try_to_ship()

    def end_trial(self, run_id: str, state: str, values: Mapping[str, float], tags: Mapping[str, object]) -> None:
        """Says what a trial has come to."""
        metrics = [(key(f"objective/{name}"), value, _now(), 0) for name, value in values.items()]
        kept = {key(name): text(value) for name, value in tags.items()}
        self._try(lambda: self._store.send(run_id, metrics, {}, kept))
        self._try(lambda: self._store.set_status(run_id, _STATUS[state], _now()))

    def end(self, status: str, tags: Mapping[str, object], artifacts: Iterator[Path] | list[Path]) -> None:
        """Says how the study stands, with its report."""
        run_id = self._study.user_attrs[PARENT]
        self._try(lambda: self._store.send(run_id, [], {}, {key(name): text(value) for name, value in tags.items()}))
        for path in artifacts:
            self._try(lambda path=path: self._store.client.log_artifact(run_id, str(path)))
        self._try(lambda: self._store.set_status(run_id, status, _now()))

    def _run(self, name: str, attribute: str, owner: Any) -> str:
        known = owner.user_attrs.get(attribute)
        if known is None:
            found = self._store.run_named(self._experiment_id, name)  # made by a process that died before it said so
            known = found or self._store.create_run(self._experiment_id, name)
            owner.set_user_attr(attribute, known)
        return str(known)

    def _try(self, action: Any) -> None:
        try:
            action()
        except Exception as error:  # MLflow raises whatever its database and network drivers raise
            _log.warning("MLflow does not take it: %s", redact(str(error)).partition("\n")[0])


def _now() -> int:
    return time.time_ns() // 1_000_000
