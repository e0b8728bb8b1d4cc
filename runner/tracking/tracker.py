"""One run as MLflow will show it. Training writes to a file; a thread carries the file to MLflow."""

from __future__ import annotations

import getpass
import logging
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import psutil

from runner.errors import StorageError
from runner.tracking.connection import shown
from runner.tracking.periodic import Periodic
from runner.tracking.shipper import Shipper
from runner.tracking.spool import Spool
from runner.tracking.store import Store
from runner.tracking.system import SystemMonitor
from runner.tracking.values import folder_name, key, params_of, text
from runner.tracking.workspace import Workspace

Status = Literal["FINISHED", "FAILED", "KILLED"]

SPOOL = "spool.jsonl"
SHIP_SECONDS = 5.0
SYNC_SECONDS = 2.0
SAMPLE_SECONDS = 10.0
_log = logging.getLogger(__name__)


class Tracker:
    """Logs metrics and artifacts of one run; made by ``Tracker.open``.

    Only ``open`` and ``close`` wait for MLflow. Whatever else is logged goes to the run's spool, so that an MLflow
    server that dies costs neither metrics nor training time.

    Attributes:
        run_id: MLflow's id.
        run_name: name in MLflow and of the run's folder: ``<recipe>-<first 8 digits of the id>``.
        experiment_id: MLflow's id of the experiment.
        tracking_uri: MLflow's store, without a password.
        run_dir: folder of this run alone.
    """

    def __init__(self, store: Store, experiment_id: str, run_id: str, run_name: str, run_dir: Path) -> None:
        self.run_id = run_id
        self.run_name = run_name
        self.experiment_id = experiment_id
        self.tracking_uri = shown(store.uri)
        self.run_dir = run_dir
        self._spool = Spool(run_dir / SPOOL)
        self._shipper = Shipper(store, run_id, self._spool.path)
        self._names: dict[str, str] = {}
        self._not_finite: set[str] = set()
        self._step = 0

    @classmethod
    def open(
        cls,
        workspace: Workspace,
        experiment: str,
        run_name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        system_metrics: bool = True,
    ) -> Tracker:
        """Starts an MLflow run, its folder and the threads beside the training.

        Args:
            workspace: where the run's folder and, by default, MLflow's database are.
            experiment: name of the MLflow experiment; created if need be.
            run_name: start of the run's name.
            params: the resolved recipe, nested; logged flat under dotted names.
            tags: what describes the run beside its settings (source commit, stages, hardware).
            system_metrics: whether to sample processor, memory, disk and GPU.

        Raises:
            StorageError: MLflow's store or the workspace cannot be reached or written.
        """
        store = Store.open(workspace)
        experiment_id = store.experiment(experiment)
        run_id, name = store.create_run(experiment_id, run_name)
        run_dir = workspace.runs / folder_name(name)
        try:
            run_dir.mkdir(parents=True)
            tracker = cls(store, experiment_id, run_id, name, run_dir)
        except OSError as error:
            store.client.set_terminated(run_id, "FAILED")
            raise StorageError(
                f"run folder {run_dir} cannot be made: {error.strerror}; name a writable folder in RUNNER_WORKSPACE"
            ) from error
        tracker._start(params, {**_origin(), "run_dir": str(run_dir), **tags}, system_metrics)
        return tracker

    def _start(self, params: Mapping[str, object], tags: Mapping[str, str], system_metrics: bool) -> None:
        self._append(run_id=self.run_id, experiment_id=self.experiment_id, tracking_uri=self.tracking_uri)
        self._append(params=params_of(params))
        self._append(tags={key(name): text(value) for name, value in tags.items()})
        self._monitor = SystemMonitor(self.run_dir) if system_metrics else None
        self._threads = [
            Periodic("sync", SYNC_SECONDS, self._spool.sync),
            Periodic("system", SAMPLE_SECONDS, self._sample),
            Periodic("mlflow", SHIP_SECONDS, self._shipper.try_to_ship),
        ]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs metrics of one step, with the time of this call.

        NaN and infinities are kept as they are in the spool and reach MLflow as NaN, which leaves a gap in the curve;
        a tag ``not_finite.<metric>`` names the first of each metric.

        Args:
            metrics: numbers by name; ``/`` groups them into sections of MLflow's page.
            step: environment steps or updates so far.
        """
        self._step = max(self._step, step)
        values: dict[str, float | str] = {}
        for given, number in metrics.items():
            name = self._names.get(given) or self._names.setdefault(given, key(given))
            value = float(number)
            if math.isfinite(value):
                values[name] = value
            else:
                values[name] = str(value)
                self._report_not_finite(name, value, step)
        self._append(step=step, metrics=values)

    def _report_not_finite(self, name: str, value: float, step: int) -> None:
        if name not in self._not_finite:
            self._not_finite.add(name)
            self._append(tags={key(f"not_finite.{name}"): f"{value} at step {step}"})

    def tag(self, name: str, value: str) -> None:
        """Sets a tag, replacing an earlier value."""
        self._append(tags={key(name): text(value)})

    def artifact(self, path: Path, folder: str = "") -> None:
        """Logs a file or a folder, which is copied later: it must stay as it is while the run lasts.

        Args:
            path: the file or folder.
            folder: where to put it among the run's artifacts; their root by default.
        """
        inside = path.is_relative_to(self.run_dir)
        self._append(artifact=str(path.relative_to(self.run_dir) if inside else path.resolve()), folder=folder)

    def close(self, status: Status, patience: float = 30.0) -> bool:
        """Sends what is left, then sets the run's final status.

        Args:
            status: how the run really ended.
            patience: seconds for which a store that does not answer is tried again.

        Returns:
            Whether MLflow has everything; what it has not stays in the spool.
        """
        sync, system, mlflow = self._threads
        system.stop()
        self._sample()
        self._append(status=status)
        sync.stop()
        mlflow.stop()
        deadline = time.monotonic() + patience
        delivered = self._shipper.try_to_ship()
        while not delivered and time.monotonic() < deadline:
            time.sleep(1.0)
            delivered = self._shipper.try_to_ship()
        self._spool.close()
        if not delivered:
            _log.warning("MLflow lacks the last %d bytes of %s", self._shipper.pending, self._spool.path)
        if self._spool.held:
            _log.warning("%d lines could not be written to %s and are lost", self._spool.held, self._spool.path)
        return delivered and not self._spool.held

    def _sample(self) -> None:
        if self._monitor is not None:
            self.log(self._monitor.sample(), self._step)

    def _append(self, **record: Any) -> None:
        self._spool.append({"t": time.time_ns() // 1_000_000, **record})


def _origin() -> dict[str, str]:
    """The tags from which MLflow's page fills its columns User and Source."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = str(psutil.Process().uids().real)
    return {"mlflow.user": user, "mlflow.source.type": "LOCAL", "mlflow.source.name": Path(sys.argv[0]).name}
