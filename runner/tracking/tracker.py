"""One run as MLflow will show it. Training writes to a file; a thread carries the file to MLflow."""

from __future__ import annotations

import getpass
import logging
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from runner.system.errors import StorageError
from runner.system.faults import reach
from runner.system.liveness import Owner
from runner.tracking.connection import shown
from runner.tracking.folder import Record, RunFolder, Status
from runner.tracking.history import History
from runner.tracking.periodic import Periodic
from runner.tracking.recorder import Recorder
from runner.tracking.shipper import Shipper
from runner.tracking.store import Store
from runner.tracking.system import SystemMonitor
from runner.tracking.values import key, params_of, text
from runner.tracking.workspace import Workspace

SHIP_SECONDS = 5.0
SYNC_SECONDS = 2.0
SAMPLE_SECONDS = 10.0
HEARTBEAT_SECONDS = 5.0
_log = logging.getLogger(__name__)


class Target(NamedTuple):
    """What a run sets out to do."""

    digest: str
    """Of its recipe."""
    goal: int
    unit: str
    """What ``goal`` counts: steps or updates."""


NO_TARGET = Target("", 0, "steps")


class Tracker:
    """Logs metrics and artifacts of one run; made by ``Tracker.open`` or ``Tracker.reopen``.

    Only these two and ``close`` wait for MLflow. Whatever else is logged goes to the run's spool, so that an MLflow
    server that dies costs neither metrics nor training time.

    Attributes:
        run_id: MLflow's id.
        run_name: name in MLflow and of the run's folder: ``<recipe>-<8 digits>``.
        tracking_uri: MLflow's store, without a password.
        run_dir: folder of this run alone.
    """

    def __init__(
        self, store: Store, folder: RunFolder, record: Record, run_id: str, history: History, step: int
    ) -> None:
        self.run_id = run_id
        self.run_name = folder.name
        self.tracking_uri = shown(store.uri)
        self.run_dir = folder.path
        self._folder = folder
        self._record = record
        self._recorder = Recorder(folder.spool, history, step)
        self._spool = self._recorder.spool
        self._shipper = Shipper(store, run_id, self._spool.path)
        self._warned = False

    @classmethod
    def open(
        cls,
        workspace: Workspace,
        experiment: str,
        run_name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        system_metrics: bool = True,
        target: Target = NO_TARGET,
    ) -> Tracker:
        """Starts an MLflow run, its folder and the threads beside the training.

        Args:
            workspace: where the run's folder and, by default, MLflow's database are.
            experiment: name of the MLflow experiment; created if need be.
            run_name: start of the run's name.
            params: the resolved recipe, nested; logged flat under dotted names.
            tags: what describes the run beside its settings (source commit, stages, hardware).
            system_metrics: whether to sample processor, memory, disk and GPU.
            target: what the run sets out to do.

        Raises:
            StorageError: MLflow's store or the workspace cannot be reached or written.
        """
        store = Store.open(workspace)
        experiment_id = store.experiment(experiment)
        folder = RunFolder.create(workspace.runs, run_name)
        try:
            now = time.time()
            record = Record(
                name=folder.name, recipe=run_name, **target._asdict(), experiment=experiment,
                tracking_uri=shown(store.uri), owner=Owner.this_process(), started=now, heartbeat=now,
            )  # fmt: skip
            folder.write(record)
            folder.reserve()
            reach("start.folder")
            tracker = cls._with_run(store, experiment_id, folder, record, History(), record.step)
            tracker._recorder.append(
                run_id=tracker.run_id, experiment_id=experiment_id, tracking_uri=tracker.tracking_uri
            )
            tracker._recorder.append(params=params_of(params))
        except (StorageError, OSError) as error:
            _withdraw(store, experiment_id, folder)
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{folder.path}: {error.strerror}; name another disk in RUNNER_WORKSPACE") from error
        tracker._start(_origin(), tags, system_metrics)
        return tracker

    @classmethod
    def reopen(
        cls,
        workspace: Workspace,
        folder: RunFolder,
        cursor: int,
        step: int,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        system_metrics: bool = True,
    ) -> Tracker:
        """Goes on with a run whose process is dead.

        Metrics that the dead process logged after the checkpoint are not logged again when the training comes past
        them; they are compared.

        Args:
            workspace: as for ``open``.
            folder: the run's folder, which this process has claimed.
            cursor: what ``mark`` said when the checkpoint was written; 0 without a checkpoint.
            step: that of the checkpoint.
            params: as for ``open``; logged if the process died before its first checkpoint, perhaps before it had.
            tags: what is new about the run.
            system_metrics: as for ``open``.

        Raises:
            StorageError: MLflow's store or the run's folder cannot be reached or written.
        """
        record = folder.record()
        assert record is not None  # the caller has found the run by it
        store = Store.open(workspace)
        if shown(store.uri) != record.tracking_uri:
            raise StorageError(
                f"run {folder.name} is kept in {record.tracking_uri}, not in {shown(store.uri)}; "
                "name its store in MLFLOW_TRACKING_URI"
            )
        alive = record.model_copy(
            update={"owner": Owner.this_process(), "heartbeat": time.time(), "status": "RUNNING", "reason": ""}
        )
        try:
            folder.write(alive)
            folder.reserve()
            experiment_id = store.experiment(record.experiment)
            history = History.read(folder.spool, cursor, step)
            tracker = cls._with_run(store, experiment_id, folder, alive, history, step)
            tracker._recorder.append(status="RUNNING")
            if not cursor:
                tracker._recorder.append(params=params_of(params))
        except OSError as error:
            with suppress(OSError):
                folder.write(record)
            raise StorageError(f"{folder.path}: {error.strerror}; free some space there") from error
        tracker._start({} if cursor else _origin(), tags, system_metrics)
        return tracker

    @classmethod
    def _with_run(
        cls, store: Store, experiment_id: str, folder: RunFolder, record: Record, history: History, step: int
    ) -> Tracker:
        """With the MLflow run of that name, which is made if the process died before it could be."""
        run_id = record.run_id or store.run_named(experiment_id, folder.name)
        if run_id is None:
            run_id = store.create_run(experiment_id, folder.name)
        reach("start.tracked")
        if record.run_id is None:
            record = record.model_copy(update={"run_id": run_id})
            folder.write(record)
        return cls(store, folder, record, run_id, history, step)

    def _start(self, origin: Mapping[str, str], tags: Mapping[str, str], system_metrics: bool) -> None:
        owner = {f"process.{name}": str(value) for name, value in self._record.owner}
        tags = {**origin, **owner, "run_dir": str(self.run_dir), **tags}
        self._recorder.append(tags={key(name): text(value) for name, value in tags.items()})
        self._monitor = SystemMonitor(self.run_dir) if system_metrics else None
        self._threads = [
            Periodic("sync", SYNC_SECONDS, self._spool.sync),
            Periodic("heartbeat", HEARTBEAT_SECONDS, self._beat),
            Periodic("system", SAMPLE_SECONDS, self._sample),
            Periodic("mlflow", SHIP_SECONDS, self._shipper.try_to_ship),
        ]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs metrics of one step, with the time of this call; see ``Recorder.log``."""
        self._recorder.log(metrics, step)

    def mark(self) -> int:
        """The place in the spool from which a run that resumes here has to read; for ``reopen``."""
        return self._recorder.mark()

    def sync(self) -> None:
        """Makes durable what was logged so far.

        Raises:
            OSError: the disk refuses it.
        """
        self._recorder.sync()

    def tag(self, name: str, value: str) -> None:
        """Sets a tag, replacing an earlier value."""
        self._recorder.append(tags={key(name): text(value)})

    def artifact(self, path: Path, folder: str = "") -> None:
        """Logs a file or a folder, which is copied later: it must stay as it is while the run lasts.

        Args:
            path: the file or folder, inside the run's folder.
            folder: where to put it among the run's artifacts; their root by default.

        Raises:
            ValueError: it lies elsewhere.
        """
        self._recorder.append(artifact=str(path.relative_to(self.run_dir)), folder=folder)

    def close(self, status: Status, reason: str = "", patience: float = 30.0) -> bool:
        """Sends what is left, then sets the run's final status and gives its folder up.

        Args:
            status: how the run really ended.
            reason: why it failed.
            patience: seconds for which MLflow is waited for, whether it refuses or is slow.

        Returns:
            Whether MLflow has everything; what it has not stays in the spool.
        """
        sync, heartbeat, system, mlflow = self._threads
        system.stop()
        self._sample()
        sync.stop()
        heartbeat.stop()
        self._folder.use_reserve()
        tags = {"tags": {"error": text(reason)}} if reason else {}
        self._recorder.append(urgent=True, status=status, **tags)
        self._write_record(status=status, reason=reason)
        self._spool.sync()
        delivered = self._deliver(mlflow, patience)
        self._spool.close()
        self._folder.release()
        if self._spool.held:
            _log.warning("%d lines could not be written to %s and are lost", self._spool.held, self._spool.path)
        return delivered and not self._spool.held

    def _deliver(self, mlflow: Periodic, patience: float) -> bool:
        """In a thread of its own, because a store that is slow or hangs lets nobody interrupt it."""
        thread = threading.Thread(
            target=self._ship_until, args=(mlflow, time.monotonic() + patience), name="runner-end", daemon=True
        )
        thread.start()
        thread.join(patience)
        delivered = not thread.is_alive() and not self._shipper.pending
        if not delivered:
            self._shipper.abandon()
            _log.warning(
                "MLflow lacks the last %d bytes of %s; send them later: runner sync %s",
                self._shipper.pending, self._spool.path, self.run_name,
            )  # fmt: skip
        return delivered

    def _ship_until(self, mlflow: Periodic, deadline: float) -> None:
        mlflow.stop()
        while not self._shipper.try_to_ship() and time.monotonic() < deadline:
            time.sleep(1.0)
        if self._spool.held:  # the status is among what the disk refuses
            with suppress(Exception):  # whatever MLflow's drivers raise
                self._shipper.set_status(self._record.status, int(self._record.heartbeat * 1e3))

    def _beat(self) -> None:
        self._write_record()

    def _write_record(self, **changes: object) -> None:
        changed = {"heartbeat": time.time(), "step": self._recorder.step, **changes}
        self._record = self._record.model_copy(update=changed)
        try:
            self._folder.write(self._record)
        except OSError as error:
            if not self._warned:
                _log.warning("%s: %s; 'runner ls' will not know how this run goes", self.run_dir, error.strerror)
            self._warned = True

    def _sample(self) -> None:
        if self._monitor is not None:
            self.log(self._monitor.sample(), self._recorder.step)


def _withdraw(store: Store, experiment_id: str, folder: RunFolder) -> None:
    """Leaves nothing of a run that could not begin but its status in MLflow."""
    with suppress(Exception):  # whatever MLflow's drivers raise: the reason for which it could not begin counts
        run_id = store.run_named(experiment_id, folder.name)
        if run_id is not None:
            store.set_status(run_id, "FAILED", int(time.time() * 1e3))
    shutil.rmtree(folder.path, ignore_errors=True)
    folder.release()


def _origin() -> dict[str, str]:
    """The tags from which MLflow's page fills its columns User and Source."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = str(psutil.Process().uids().real)
    return {"mlflow.user": user, "mlflow.source.type": "LOCAL", "mlflow.source.name": Path(sys.argv[0]).name}
