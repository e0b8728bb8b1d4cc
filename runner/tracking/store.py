"""MLflow as the runner uses it: explicit run ids, batches that it accepts, nothing cut in silence."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.system.errors import StorageError
from runner.tracking.connection import connect, is_http, shown
from runner.tracking.values import folder_name

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment

    from runner.tracking.workspace import Workspace

Metric = tuple[str, float, int, int]
"""Key, value, timestamp in milliseconds, step."""

_BATCH = {"metrics": 1000, "params": 100, "tags": 100}
"""What MLflow takes in one call."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Store:
    """An MLflow tracking store that has answered."""

    client: MlflowClient
    uri: str
    artifacts: Path | None
    """Where new experiments keep their artifacts; None where a server decides."""

    @classmethod
    def open(cls, workspace: Workspace) -> Store:
        """Opens the store, creating the workspace's own database where ``MLFLOW_TRACKING_URI`` names no other.

        Raises:
            StorageError: the store cannot be reached or written.
        """
        uri = workspace.tracking_uri
        return cls(connect(uri), uri, None if is_http(uri) else workspace.artifacts)

    def experiment(self, name: str) -> str:
        """The id of the experiment of that name, which is created if need be.

        Raises:
            StorageError: the name belongs to a deleted experiment, or the store cannot be written.
        """
        from mlflow.exceptions import MlflowException

        try:
            found = self.client.get_experiment_by_name(name) or self._create(name)
        except MlflowException as error:
            raise StorageError(f"cannot create experiment '{name}' in {shown(self.uri)}: {error}") from error
        if found.lifecycle_stage != "active":
            raise StorageError(
                f"experiment '{name}' is deleted in {shown(self.uri)}; choose another tracking.experiment, or restore "
                f"it: mlflow experiments restore --experiment-id {found.experiment_id}"
            )
        return str(found.experiment_id)

    def _create(self, name: str) -> Experiment:
        from mlflow.exceptions import MlflowException

        location = (self.artifacts / folder_name(name)).as_uri() if self.artifacts else None
        # The tag opens MLflow's page for training runs; without it the page asks what kind of experiment this is.
        tags = {"mlflow.experimentKind": "custom_model_development"}
        try:
            return self.client.get_experiment(self.client.create_experiment(name, location, tags))
        except MlflowException:
            created_by_another_runner = self.client.get_experiment_by_name(name)
            if created_by_another_runner is None:
                raise
            return created_by_another_runner

    def create_run(self, experiment_id: str, name: str, started: int | None = None) -> str:
        """Starts a run of that name and returns its id.

        Args:
            experiment_id: the experiment that it belongs to.
            name: of the run.
            started: when it began, in milliseconds; now, unless given.

        Raises:
            StorageError: the store cannot be written.
        """
        from mlflow.exceptions import MlflowException

        try:
            return str(self.client.create_run(experiment_id, start_time=started, run_name=name).info.run_id)
        except MlflowException as error:
            raise StorageError(f"cannot start a run in {shown(self.uri)}: {error}") from error

    def run_named(self, experiment_id: str, name: str) -> str | None:
        """The id of the run of that name; None if there is none.

        Raises:
            StorageError: the store cannot be reached.
        """
        from mlflow.exceptions import MlflowException

        try:
            found = self.client.search_runs([experiment_id], f"attributes.run_name = '{name}'", max_results=1)
        except MlflowException as error:
            raise StorageError(f"cannot look for a run in {shown(self.uri)}: {error}") from error
        return str(found[0].info.run_id) if found else None

    def set_status(self, run_id: str, status: str, time_ms: int) -> None:
        """Sets how a run ended, or that it is running again.

        Raises:
            MlflowException: the store cannot be reached.
        """
        if status == "RUNNING":
            self.client.update_run(run_id, status=status)
        else:
            self.client.set_terminated(run_id, status, time_ms)

    def send(self, run_id: str, metrics: Sequence[Metric], params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Writes values to a run; writing the same ones again changes nothing.

        A value that the store refuses for good (a param that had another value) is reported and passed over.

        Raises:
            MlflowException: the store cannot be reached.
        """
        from mlflow.entities import Metric, Param, RunTag

        self._send(run_id, "params", [Param(key, value) for key, value in params.items()])
        self._send(run_id, "tags", [RunTag(key, value) for key, value in tags.items()])
        self._send(run_id, "metrics", [Metric(*metric) for metric in metrics])

    def _send(self, run_id: str, kind: str, items: list[Any]) -> None:
        size = _BATCH[kind]
        for start in range(0, len(items), size):
            batch = items[start : start + size]
            if self._refused(run_id, kind, batch):  # find the ones that are
                for item in batch:
                    if reason := self._refused(run_id, kind, [item]):
                        _log.warning("MLflow refused %s '%s': %s", kind[:-1], item.key, reason)

    def _refused(self, run_id: str, kind: str, batch: list[Any]) -> str:
        from mlflow.exceptions import MlflowException

        try:
            self.client.log_batch(run_id, **{kind: batch})  # type: ignore[arg-type]
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            return str(error)
        return ""
