"""A run in MLflow. The training writes to a file, and a thread sends the file to MLflow."""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from runner.plugin.sink import Sink
from runner.recipe.recipe import Recipe
from runner.system.errors import StorageError
from runner.system.faults import reach
from runner.system.files import remove_quietly
from runner.system.processes import Owner
from runner.system.synthetic import DATA_TAG, SMOKE_TAG, SYNTHETIC
from runner.tracking.keys import mlflow_key
from runner.tracking.mlflow_view import headline_of, view_of
from runner.tracking.periodic import Periodic
from runner.tracking.record import Record, Status
from runner.tracking.recorder import Recorder
from runner.tracking.run_copy import RunCopy
from runner.tracking.sink_feed import SinkFeed
from runner.tracking.spool import Shipper
from runner.tracking.store import (
    HEADLINE,
    OBJECTIVE,
    USER_TAGS,
    Store,
    params_of,
    shown,
    text,
    user_tags,
)
from runner.tracking.system import SystemMonitor
from runner.tracking.workspace import RunFolder, Workspace

_log = logging.getLogger(__name__)


class Tracker(Recorder):
    """Logs metrics and artifacts of one run; made by ``Tracker.open`` or ``Tracker.reopen``.

    Only these two and ``close`` wait for MLflow.
    """

    def __init__(
        self,
        store: Store,
        folder: RunFolder,
        record: Record,
        recipe: Recipe,
        tags: Mapping[str, str],
        cursor: int | None = None,
        step: int = 0,
        began: float | None = None,
    ) -> None:
        """Starts to log to the MLflow run of the record."""
        assert record.run_id is not None
        self.run_id = record.run_id
        self.note = record.note
        self.headline = record.headline
        self._record = record
        self._newest = dict(record.metrics)
        self._seconds_before = record.seconds
        self.began = time.perf_counter() if began is None else began
        """Start of this process's work on the run, on the clock of ``perf_counter``."""
        self.closed = self.began
        """When the final status was set, on the same clock."""
        super().__init__(folder.spool, cursor, step)

        self.run_name = folder.name
        self.run_dir = folder.path
        self.tracking_uri = shown(store.uri)
        self._store = store
        self._folder = folder
        self._warned = False
        self._shipper = Shipper(store, self.run_id, folder.spool)
        # A run that MLflow has just created is running.
        if cursor is not None:
            self.spool.append(status="RUNNING")
        if not cursor:
            self.spool.append(params=params_of(recipe.values()))
            tags = {**tags, **record.tags}
        # As MLflow's page will have them.
        self.spool.append(tags=params_of({**tags, **self._tags(recipe)}))
        self._monitor = SystemMonitor(self.run_dir) if recipe.tracking.system_metrics else None
        self._threads = [
            Periodic("sync", seconds=2.0, action=self.spool.sync),
            Periodic("heartbeat", seconds=5.0, action=self._write_record),
            Periodic("system", seconds=10.0, action=self._sample),
            Periodic("mlflow", seconds=5.0, action=self._shipper.try_to_ship),
        ]
        self._feeds: list[tuple[SinkFeed, Periodic]] = []
        url = recipe.tracking.second_copy
        self._copy: tuple[RunCopy, Periodic] | None = None
        if url is not None:
            copy = RunCopy(url, self.run_dir)
            self._copy = copy, Periodic("second copy", seconds=5.0, action=copy.update)

    def _tags(self, recipe: Recipe) -> dict[str, str]:
        """Returns the tags by which the runner finds and describes the run."""
        record = self._record
        tags = {"run_dir": str(self.run_dir), HEADLINE: ",".join(record.headline)}
        if record.synthetic:
            tags[DATA_TAG] = SYNTHETIC
        if record.smoke:
            tags[SMOKE_TAG] = "true"
        objective = recipe.objective
        if objective is not None:
            tags[OBJECTIVE] = f"{objective.direction} {mlflow_key(f'eval/{objective.name}')}"
        if record.tags:
            tags[USER_TAGS] = ",".join(record.tags)
        tags["process.host"] = record.owner.host
        return tags

    @classmethod
    def open(
        cls,
        workspace: Workspace,
        recipe: Recipe,
        tags: Mapping[str, str],
        own_tags: Mapping[str, str] | None = None,
        note: str = "",
        group: str = "",
        began: float | None = None,
        processes: int = 1,
    ) -> Self:
        """Starts an MLflow run, its folder, which is named after its id, and the
        threads for its log.

        ``tags`` describe the run in addition to the recipe; ``own_tags`` and ``note`` are the
        user's, and are also in the run's record; ``group`` is its group of seeds; ``began`` is the
        start of the command, on the clock of ``perf_counter``; ``processes`` is the number of those
        that train together. Raises ``StorageError`` if MLflow's store or the workspace cannot be
        reached or written.
        """
        valid_tags = user_tags(own_tags or {})
        store = Store(workspace)
        experiment_id = store.experiment(recipe.tracking.experiment, view_of(recipe))
        folder = RunFolder.create(workspace.runs, recipe.name)
        now = time.time()
        started = now if began is None else now - (time.perf_counter() - began)
        record = _first_record(
            folder.name,
            recipe,
            started=started,
            heartbeat=now,
            tracking_uri=workspace.recorded_uri(shown(store.uri)),
            group=group,
            tags=valid_tags,
            note=text(note),
            processes=processes,
        )
        run_id = None
        try:
            folder.write(record)
            folder.reserve()
            reach("start.folder")
            run_id = store.create_run(experiment_id, folder.name, round(1e3 * started))
            reach("start.tracked")
            record = folder.take_name(record, run_id)
            store.rename_run(run_id, folder.name)
            return cls(store, folder, record, recipe, tags, began=began)
        except (StorageError, OSError) as error:
            # A run that could not start leaves only its status in MLflow.
            # Whatever MLflow's drivers raise: the first error is the relevant one.
            with suppress(Exception):
                run_id = run_id or store.run_named(experiment_id, folder.name)
                if run_id:
                    store.set_status(run_id, "FAILED", int(time.time() * 1e3))
            remove_quietly(folder.path)
            folder.release()
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{folder.path}: {error.strerror}; name another disk in RUNNER_WORKSPACE") from error

    @classmethod
    def reopen(
        cls,
        workspace: Workspace,
        folder: RunFolder,
        recipe: Recipe,
        tags: Mapping[str, str],
        cursor: int,
        step: int,
        began: float | None = None,
        processes: int = 1,
    ) -> Self:
        """Continues a run whose process is dead and whose folder this process has claimed.

        ``cursor`` is the result of ``mark`` when the checkpoint was written, or 0 without a
        checkpoint: then the process may have died before it logged the recipe, which is logged
        again. ``tags`` are the new facts about the run. Raises ``StorageError`` like ``open``.
        """
        record = folder.record()
        assert record is not None  # the caller has found the run by it
        store = Store(workspace)
        if workspace.recorded_uri(shown(store.uri)) != record.tracking_uri:
            recorded = workspace.resolved_uri(record.tracking_uri)
            raise StorageError(
                f"run {folder.name} is kept in {recorded}, not in {shown(store.uri)}; "
                "name its store in MLFLOW_TRACKING_URI"
            )
        unit, goal = recipe.length
        changes = {
            "digest": recipe.digest,
            "goal": goal,
            "unit": unit,
            "owner": Owner.this_process(),
            "heartbeat": time.time(),
            "status": "RUNNING",
            "reason": "",
            "processes": processes,
            "overrides": {**record.overrides, **params_of(recipe.overrides)},
        }
        resumed_record = record.model_copy(update=changes)
        try:
            folder.write(resumed_record)
            folder.reserve()
            return cls(store, folder, resumed_record, recipe, tags, cursor, step, began)
        except OSError as error:
            with suppress(OSError):
                folder.write(record)
            raise StorageError(f"{folder.path}: {error.strerror}; free some space there") from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs like ``Recorder.log``, and adds the newest values to the run's record."""
        super().log(metrics, step)
        self._newest |= {mlflow_key(name): float(value) for name, value in metrics.items()}

    def tag(self, name: str, value: str) -> None:
        """Sets a tag, replacing an earlier value."""
        self.spool.append(tags=params_of({name: value}))

    def mark_changed(self, changes: str) -> None:
        """Marks the run as one whose learner was changed by callbacks, in a tag and in its record."""
        self.tag("callbacks.changed", changes)
        self._record = self._record.model_copy(update={"changed_by": changes})

    def artifact(self, path: Path) -> None:
        """Logs a file or folder of the run's folder; it is copied later and must stay as it is while the run lasts."""
        self.spool.append(artifact=str(path.relative_to(self.run_dir)))

    def dataset(self, settings: Mapping[str, Any], fingerprint: str | None) -> None:
        """Logs the dataset of the run: the ``data`` of its recipe, and the fingerprint of the
        data.
        """
        description = dict(settings)
        if fingerprint:
            description["fingerprint"] = fingerprint
        profile = json.dumps(description)
        digest = hashlib.sha256(profile.encode()).hexdigest()[:8]
        name = settings["kind"]
        if self._record.synthetic:
            name = f"synthetic {name}"
        self.spool.append(dataset={"name": text(name), "digest": digest, "profile": profile})

    def feed(self, sinks: Iterable[type[Sink]]) -> None:
        """Gives everything that is logged to these sinks as well."""
        for sink in sinks:
            feed = SinkFeed(sink, self.spool.path, self.run_name)
            thread = Periodic(f"sink-{sink.kind}", seconds=5.0, action=feed.update)
            self._feeds.append((feed, thread))

    def model(self, folder: Path, step: int) -> None:
        """Logs a folder of the run's folder as its model at a step; like an artifact otherwise."""
        self.spool.append(step=step, model=str(folder.relative_to(self.run_dir)))

    def close(self, status: Status, reason: str = "", patience: float = 30.0) -> bool:
        """Sends what is left, then sets the run's final status and gives its folder up; whether MLflow has everything.

        MLflow is waited for ``patience`` seconds, whether it refuses or is slow; what it has not stays in the spool.
        """
        # The last thread sends the log to MLflow, and is stopped when everything is written.
        *threads, mlflow = self._threads
        for thread in threads:
            thread.stop()
        self._sample()
        self._folder.use_reserve()
        tag = "ended" if status == "FINISHED" else "error"
        self.spool.append(urgent=True, status=status, tags={tag: text(reason)} if reason else {})
        self.closed = time.perf_counter()
        self._write_record(self.closed, status=status, reason=reason)
        self.spool.sync()
        self._close_feeds()
        self._close_copy(patience)
        delivered = self._deliver(mlflow, patience)
        self.spool.close()
        self._folder.release()
        if self.spool.held:
            _log.warning(
                "%d lines could not be written to %s and are lost",
                len(self.spool.held),
                self.spool.path,
            )
        return delivered and not self.spool.held

    def _close_feeds(self) -> None:
        for feed, thread in self._feeds:
            thread.stop()
            try:
                feed.close()
            except Exception as error:
                _log.warning("%s: its last metrics are missing: %s", thread.name, error)

    def _close_copy(self, patience: float) -> None:
        """Completes the second copy in a separate thread, because storage may hang."""
        if self._copy is None:
            return
        copy, updates = self._copy
        errors: list[Exception] = []

        def finish() -> None:
            # It waits for an update that is under way.
            updates.stop()
            try:
                copy.close()
            # Whatever the drivers of a storage raise.
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=finish, name="runner-copy-end", daemon=True)
        thread.start()
        thread.join(patience)
        if errors or thread.is_alive():
            reason = f"{type(errors[0]).__name__}: {errors[0]}" if errors else f"no answer for {patience:g} s"
            _log.warning("the second copy of %s is incomplete: %s", self.run_name, reason)

    def _deliver(self, mlflow: Periodic, patience: float) -> bool:
        """Sends the log in a separate thread, because a slow or hanging store
        cannot be interrupted.
        """
        deadline = time.monotonic() + patience

        def ship() -> None:
            mlflow.stop()
            while not self._shipper.try_to_ship() and time.monotonic() < deadline:
                time.sleep(1.0)
            if self.spool.held:
                # The disk has refused the status, which therefore goes to MLflow directly.
                with suppress(Exception):  # whatever MLflow's drivers raise
                    self._store.set_status(self.run_id, self._record.status, int(self._record.heartbeat * 1e3))

        thread = threading.Thread(target=ship, name="runner-end", daemon=True)
        thread.start()
        thread.join(patience)
        if thread.is_alive() or self._shipper.pending:
            self._shipper.abandoned.set()
            _log.warning(
                "the last %d bytes of %s are not in MLflow; send them later: runner sync %s",
                self._shipper.pending,
                self.spool.path,
                self.run_name,
            )
            return False
        return True

    def _write_record(self, now: float | None = None, **changes: object) -> None:
        if now is None:
            now = time.perf_counter()
        values = {
            "heartbeat": time.time(),
            "step": self.step,
            "seconds": self._seconds_before + now - self.began,
            "metrics": dict(self._newest),
        }
        self._record = self._record.model_copy(update={**values, **changes})
        try:
            self._folder.write(self._record)
        except OSError as error:
            if not self._warned:
                _log.warning(
                    "%s: %s; 'runner ls' will not show the progress of this run",
                    self.run_dir,
                    error.strerror,
                )
            self._warned = True

    def _sample(self) -> None:
        if self._monitor is not None:
            self.log(self._monitor.sample(), self.step)


def _first_record(name: str, recipe: Recipe, **values: Any) -> Record:
    """Returns the record of a new run: what follows from its recipe, and further values."""
    unit, goal = recipe.length
    return Record(
        name=name,
        recipe=recipe.name,
        digest=recipe.digest,
        goal=goal,
        unit=unit,
        experiment=recipe.tracking.experiment,
        owner=Owner.this_process(),
        overrides=params_of(recipe.overrides),
        headline=headline_of(recipe),
        synthetic=recipe.data.is_synthetic(),
        smoke=recipe.train.smoke,
        **values,
    )
