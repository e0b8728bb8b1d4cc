"""A study in MLflow: one run for the study, and below it one for every trial."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.study.definition import UNESSENTIAL, Definition
from runner.study.store import IDENTITY
from runner.study.training import SPOOL
from runner.system.errors import StorageError
from runner.system.files import write_durably
from runner.system.secrets import redact_values
from runner.tracking.periodic import Periodic
from runner.tracking.spool import Shipper
from runner.tracking.store import Store
from runner.tracking.values import key, params_of, text

if TYPE_CHECKING:
    from optuna.study import Study

SHIP_SECONDS = 5.0
PARENT = "runner.mlflow_run"
"""The attribute of a study that has the parent's id."""
_TOLD = "told.json"
_STATUS = {"COMPLETE": "FINISHED", "PRUNED": "KILLED", "FAIL": "FAILED"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Told:
    """What a trial has come to, kept in its folder until MLflow has it."""

    name: str
    number: int
    state: str
    params: Mapping[str, Any]
    values: Mapping[str, float]
    tags: Mapping[str, Any]
    at: int
    """When, in milliseconds since 1970."""

    def keep(self, folder: Path) -> None:
        """Writes it into the trial's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / _TOLD, json.dumps(redact_values(asdict(self)), default=str) + "\n")


class Publisher:
    """Writes a study to MLflow. A store that goes away costs no trial: what it lacks is sent when it is back.

    Args:
        store: has answered.
        experiment: the name of the MLflow experiment.
        study: which.
    """

    def __init__(self, store: Store, experiment: str, study: Study) -> None:
        self._store, self._study = store, study
        self._experiment_id = store.experiment(experiment)

    def name_of(self, number: int | None = None) -> str:
        """The name of the study's run, or of a trial's; no other study has the same, whatever it is called."""
        name = f"{self._study.study_name}-{self._study.user_attrs[IDENTITY]}"
        return name if number is None else f"{name}-{number:04d}"

    def begin(self, definition: Definition) -> None:
        """The parent run, which is made if there is none; one worker at a time may ask.

        Raises:
            StorageError: MLflow cannot be reached.
        """
        if PARENT not in self._study.user_attrs:
            self._study.set_user_attr(PARENT, self._run(self.name_of()))
        run_id = self._study.user_attrs[PARENT]
        self._try(lambda: self._store.set_status(run_id, "RUNNING", _now()))
        config = definition.config
        settings = config.model_dump(mode="json", exclude=set(UNESSENTIAL))
        params = params_of({"study": settings, "recipe": definition.recipe.name})
        may_change = params_of({name: getattr(config, name).model_dump(mode="json") for name in ("budget", "limits")})
        self._try(lambda: self._store.send(run_id, [], params, {"study": "parent", **may_change}))

    def trial(self, name: str, number: int, params: Mapping[str, Any]) -> str:
        """The run of a trial that begins, or goes on; empty if MLflow cannot be reached now."""
        try:
            run_id = self._run(name)
        except StorageError as error:
            _log.warning("%s; it is told when it answers again", error)
            return ""
        tags = {"mlflow.parentRunId": self._study.user_attrs[PARENT], "study": self._study.study_name,
                "trial": str(number)}  # fmt: skip
        self._try(lambda: self._store.send(run_id, [], params_of(params), tags))
        self._try(lambda: self._store.set_status(run_id, "RUNNING", _now()))
        return run_id

    @contextmanager
    def shipping(self, run_id: str, folder: Path) -> Iterator[None]:
        """Carries what a training logs to MLflow, beside it and a last time when it has ended."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SPOOL).touch()
        if not run_id:
            yield
            return
        shipper = Shipper(self._store, run_id, folder / SPOOL)
        beside = Periodic("mlflow", SHIP_SECONDS, shipper.try_to_ship)
        try:
            yield
        finally:
            beside.stop()
            shipper.try_to_ship()

    def interrupt(self, run_id: str) -> None:
        """Says that a trial stands still."""
        if run_id:
            self._try(lambda: self._store.set_status(run_id, "KILLED", _now()))

    def catch_up(self, trials: Path) -> None:
        """Sends what trials have come to and MLflow does not have yet.

        Args:
            trials: the folder that has a folder for each.
        """
        for kept in sorted(trials.glob(f"*/{_TOLD}")):
            with suppress(FileNotFoundError):  # another worker has sent it just now
                told = Told(**json.loads(kept.read_text(encoding="utf-8")))
                run_id = self.trial(told.name, told.number, told.params)
                if not run_id:
                    return
                if self._send(run_id, told, list(kept.parent.glob(f"seed-*/{SPOOL}"))):
                    kept.rename(kept.with_name("sent.json"))

    def _send(self, run_id: str, told: Told, spools: Sequence[Path]) -> bool:
        """Sends what a trial has come to; whether MLflow has all of it."""
        metrics = [(key(f"objective/{name}"), value, told.at, 0) for name, value in told.values.items()]
        tags = {key(name): text(value) for name, value in told.tags.items()}
        sent = [Shipper(self._store, run_id, spool).try_to_ship() for spool in spools]
        sent.append(self._try(lambda: self._store.send(run_id, metrics, {}, tags)))
        sent.append(self._try(lambda: self._store.set_status(run_id, _STATUS[told.state], told.at)))
        return all(sent)

    def end(self, status: str, tags: Mapping[str, object], artifacts: Sequence[Path]) -> None:
        """Says how the study stands, with its report."""
        run_id = self._study.user_attrs[PARENT]
        self._try(lambda: self._store.send(run_id, [], {}, {key(name): text(value) for name, value in tags.items()}))
        for path in artifacts:
            self._try(partial(self._store.client.log_artifact, run_id, str(path)))
        self._try(lambda: self._store.set_status(run_id, status, _now()))

    def _run(self, name: str) -> str:
        """The run of that name, which a process that died may have made."""
        found = self._store.run_named(self._experiment_id, name)
        return found or self._store.create_run(self._experiment_id, name)

    def _try(self, action: Callable[[], object]) -> bool:
        try:
            action()
        except Exception as error:  # MLflow raises whatever its database and network drivers raise
            _log.warning("MLflow does not take it: %s", str(error).partition("\n")[0])
            return False
        return True


def _now() -> int:
    return time.time_ns() // 1_000_000
