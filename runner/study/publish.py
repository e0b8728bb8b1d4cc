"""A study in MLflow: one run for the study, and below it one for every trial."""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna.study import Study

from runner.recipe.recipe import flatten
from runner.study.definition import Definition
from runner.study.store import IDENTITY
from runner.system.errors import StorageError
from runner.system.files import make_folder, open_file
from runner.system.suggestions import shown_path
from runner.system.text_lines import figures
from runner.tracking.description import DESCRIPTION, code, describe
from runner.tracking.keys import mlflow_key
from runner.tracking.mlflow_view import view_of
from runner.tracking.periodic import Periodic
from runner.tracking.spool import Shipper, Spool, unsent
from runner.tracking.store import Metric, Store, params_of
from runner.tracking.workspace import SPOOL

if TYPE_CHECKING:
    from runner.study.summary import Summary

_SHIP_SECONDS = 5.0
# The attribute of a study with the id of its run, which is the parent of the runs of its trials.
PARENT = "runner.mlflow_run"
_STATUS = {"COMPLETE": "FINISHED", "PRUNED": "STOPPED", "FAIL": "FAILED"}
_log = logging.getLogger(__name__)


class Publisher:
    """Writes a study to MLflow. An unreachable store fails no trial: missing data
    are sent when it is available again.

    Only one worker at a time may create the publisher of a study. The identity of a study is
    unique, even if names repeat.
    """

    def __init__(self, store: Store, study: Study, definition: Definition) -> None:
        self._store = store
        self._study = study
        self._name = f"{study.study_name}-{study.user_attrs[IDENTITY]}"
        config = definition.config
        recipe = definition.recipe
        view = view_of(recipe, tuple(config.objectives))
        self._experiment_id = store.experiment(recipe.tracking.experiment, view)
        # The value of these objectives equals the last logged value, and is in the same column:
        self._last_value_objectives = [
            name
            for name, objective in config.objectives.items()
            if objective.reach is None and objective.value in (None, "last")
        ]
        self._has_several_seeds = config.seeds > 1

        if PARENT not in study.user_attrs:
            study.set_user_attr(PARENT, self._run(self._name))
        self._parent = study.user_attrs[PARENT]
        self._facts = _facts(definition)
        settings = {path: value for path, value in flatten(definition.essentials, "study") if value is not None}
        params = params_of({**settings, "recipe": recipe.name})
        tags = {
            "kind": "study",
            "study": study.study_name,
            "overrides": ", ".join(definition.sets) or "none",
            DESCRIPTION: describe(self._facts),
            "mlflow.source.name": str(definition.path),
            **config.model_dump(
                mode="json",
                include={"budget", "limits"},
                exclude_none=True,
            ),
        }
        self._send(self._parent, params, params_of(tags), "RUNNING")

    def name_of(self, number: int) -> str:
        """The name of a trial's recipe."""
        return f"{self._name}-{number:04d}"

    def trial(self, number: int, settings: Mapping[str, Any], tags: Mapping[str, object]) -> str:
        """Returns the run of a trial that starts or continues, with its recipe; empty if MLflow
        cannot be reached now.
        """
        run_id = self._run_of(number)
        if run_id:
            all_tags = {**self._tags(number), **params_of(tags)}
            self._send(run_id, params_of(settings), all_tags, "RUNNING")
        return run_id

    @contextmanager
    def shipping(self, run_id: str, folder: Path) -> Iterator[None]:
        """Sends the log of a training to MLflow during the training, and a last time after its
        end.
        """
        make_folder(folder)
        os.close(open_file(folder / SPOOL, os.O_WRONLY | os.O_CREAT))
        if not run_id:
            yield
            return
        shipper = Shipper(self._store, run_id, folder / SPOOL)
        background = Periodic("mlflow", _SHIP_SECONDS, shipper.try_to_ship)
        try:
            yield
        finally:
            background.stop()
            shipper.try_to_ship()

    def interrupt(self, run_id: str) -> None:
        """Marks a trial as interrupted."""
        if run_id:
            self._send(run_id, {}, {}, "STOPPED")

    def tell(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        values: Mapping[str, float],
        tags: Mapping[str, object],
    ) -> None:
        """Writes the result of a trial to a spool in its folder, which is named
        by its number, and sends it.
        """
        make_folder(folder)
        number = int(folder.name)
        set_tags = {name: tag for name, tag in tags.items() if tag != ""}
        spool = Spool(folder / SPOOL)
        spool.append(
            params=params_of(settings),
            status=_STATUS[str(tags["state"])],
            # With one seed, the training has logged the metric under its name already.
            metrics=self._metrics(values, with_names_of_metrics=self._has_several_seeds),
            tags={**self._tags(number), **params_of(set_tags)},
        )
        spool.close()
        self.catch_up(folder.parent)

    def catch_up(self, trials: Path) -> None:
        """Sends results of trials that MLflow does not have yet, from a folder
        with one subfolder per trial.
        """
        for spool in filter(unsent, sorted(trials.glob(f"*/{SPOOL}"))):
            run_id = self._run_of(int(spool.parent.name))
            if not run_id:
                return
            seed_spools = spool.parent.glob(f"seed-*/{SPOOL}")
            # The result comes last: it stays unsent until everything else is sent.
            spools = (*seed_spools, spool)
            all(Shipper(self._store, run_id, path).try_to_ship() for path in spools)

    def end(self, status: str, summary: Summary, artifacts: Sequence[Path]) -> None:
        """Writes the status of the study with its report, and the values of the best trial."""
        for path in artifacts:
            self._try(self._store.client.log_artifact, self._parent, str(path))
        best_trials = summary.best
        metrics: list[Metric] = []
        if best_trials:
            values = self._metrics(best_trials[0].values, with_names_of_metrics=True)
            metrics = [(name, value, _now(), summary.used.trials) for name, value in values.items()]
        tags = {
            "best.trials": [row.number for row in best_trials],
            "trials": summary.used.trials,
            DESCRIPTION: describe(self._facts | {"result": _result(status, summary)}),
        }
        self._try(
            self._store.send,
            self._parent,
            metrics,
            {},
            params_of(tags),
        )
        self._try(self._store.set_status, self._parent, status, _now())

    def _metrics(self, values: Mapping[str, float], with_names_of_metrics: bool) -> dict[str, float]:
        """Returns the values of objectives, if wanted also under the names of a run's metrics."""
        metrics = {f"objective/{name}": value for name, value in values.items()}
        if with_names_of_metrics:
            metrics |= {name: value for name, value in values.items() if name in self._last_value_objectives}
        return {mlflow_key(name): value for name, value in metrics.items()}

    def _run(self, name: str) -> str:
        """The run of that name, which a process that died may have made."""
        run_id = self._store.run_named(self._experiment_id, name)
        return run_id or self._store.create_run(self._experiment_id, name)

    def _run_of(self, number: int) -> str:
        """The run of a trial; empty, with a warning, if MLflow cannot be reached now."""
        try:
            # The differing part comes first, because columns are narrow.
            return self._run(f"trial {number} of {self._name}")
        except StorageError as error:
            _log.warning("%s; the results are sent when it is available again", error)
            return ""

    def _tags(self, number: int) -> dict[str, str]:
        name = self._study.study_name
        facts = {
            "trial": f"{number} of the study {code(name)}",
            "use it": code(f"runner study best {name} --trial {number} > trial.yaml"),
            "look at the study": code(f"runner study show {name}"),
        }
        return {
            "mlflow.parentRunId": self._parent,
            "kind": "trial",
            "study": name,
            "trial": str(number),
            DESCRIPTION: describe(facts),
        }

    def _send(
        self,
        run_id: str,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        status: str,
    ) -> None:
        self._try(
            self._store.send,
            run_id,
            [],
            params,
            tags,
        )
        self._try(self._store.set_status, run_id, status, _now())

    def _try(self, send: Callable[..., object], *arguments: Any) -> None:
        try:
            send(*arguments)
        except Exception as error:  # MLflow raises whatever its database and network drivers raise
            _log.warning("MLflow does not take it: %s", str(error).partition("\n")[0])


def _result(status: str, summary: Summary) -> str:
    """Returns the progress of a study and its best trial, for the description of its run."""
    result = f"{status}; {summary.used.trials} of {summary.budget['trials']} trials"
    best_trials = summary.best
    if not best_trials:
        return result
    best = best_trials[0]
    result += f"; trial {best.number} is best"
    if len(best_trials) > 1:
        result += f" in {next(iter(best.values))}, of {len(best_trials)} on the Pareto front"
    return f"{result}: {figures(best.values)}"


def _facts(definition: Definition) -> dict[str, str]:
    """Returns the description of a study, with the commands for it."""
    config = definition.config
    file = shlex.quote(shown_path(definition.path))
    searched = [path.removeprefix("optimization.") for path in config.space]
    objectives = (f"{name} ({objective.direction})" for name, objective in config.objectives.items())
    return {
        "recipe": f"{code(definition.recipe.name)}, from {code(shown_path(definition.recipe.path))}",
        # There is no result yet.
        "result": "",
        "overridden": code(*definition.sets),
        "searched": code(*searched),
        "objectives": ", ".join(objectives),
        "continue it": code(f"runner study run {file}"),
        "look at it": code(f"runner study show {config.name}"),
        "use what is best": code(f"runner study best {config.name} > best.yaml"),
    }


def _now() -> int:
    return time.time_ns() // 1_000_000
