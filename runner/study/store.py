"""The studies of a workspace, or of many machines: Optuna's storage, with what a study needs beside trials."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optuna
import sqlalchemy.exc
from filelock import FileLock
from optuna.exceptions import ExperimentalWarning
from optuna.storages import RDBStorage
from optuna.study import Study
from optuna.trial import Trial, TrialState

from runner.recipe.recipe import Recipe, flatten
from runner.study.definition import UNESSENTIAL, Definition
from runner.study.leases import Leases, connect_args
from runner.study.sampler import PerTrialSampler, pruner
from runner.system.errors import StorageError, UsageError
from runner.system.names import suggestion
from runner.system.secrets import redact, redact_values
from runner.tracking import Workspace

VARIABLE = "OPTUNA_STORAGE"
DEFINITION, IDENTITY, VERDICT = "runner.definition", "runner.id", "runner.verdict."
"""Attributes of a study."""
TOP_UP = -1
"""The lease of whoever adds trials to the queue."""
_TRIES = 5

optuna.logging.set_verbosity(optuna.logging.ERROR)  # it would say of every conditional setting that it is drawn alone


@dataclass(frozen=True)
class StudyStore:
    """An Optuna storage that has answered."""

    url: str
    storage: RDBStorage

    @classmethod
    def open(cls, workspace: Workspace) -> StudyStore:
        """Opens ``OPTUNA_STORAGE`` if that is set, else a SQLite file in the workspace.

        Raises:
            StorageError: it cannot be reached or written.
        """
        url = database(workspace)
        try:
            workspace.root.mkdir(parents=True, exist_ok=True)
            with FileLock(workspace.root / "optuna.lock"):  # a database that is made by several at once stays broken
                return cls(url, _connect(url))
        except (sqlalchemy.exc.SQLAlchemyError, ImportError, OSError, RuntimeError, ValueError) as error:
            reason = redact(str(error)).partition("\n")[0]
            raise StorageError(
                f"study storage {redact(url)} cannot be used: {reason}; start its server, or name another in "
                f"{VARIABLE} (PostgreSQL needs: pip install 'proven-runner[postgres]')"
            ) from error

    def close(self) -> None:
        """Closes the connections."""
        self.storage.remove_session()
        self.storage.engine.dispose()

    def create(self, definition: Definition) -> Study:
        """The study of that definition, which is made if there is none of that name.

        Raises:
            UsageError: there is one of that name, with another definition.
        """
        config, recipe = definition.config, definition.recipe
        _, goal = recipe.length
        directions = ["minimize" if each.reach is not None else each.direction for each in config.objectives.values()]
        study = optuna.create_study(
            storage=self.storage, study_name=config.name, directions=directions, sampler=PerTrialSampler(config),
            pruner=pruner(config, goal, recipe.train.evaluate_every or goal), load_if_exists=True,
        )  # fmt: skip
        new = json.loads(json.dumps(redact_values(_described(definition))))
        kept = study.user_attrs.get(DEFINITION)
        if kept is None and study.trials:
            raise UsageError(f"study '{config.name}' was not begun by the runner; give this one another name")
        if kept is None:
            study.set_user_attr(IDENTITY, uuid.uuid4().hex[:8])
            study.set_user_attr(DEFINITION, new)
            with warnings.catch_warnings():  # Optuna calls it experimental; optuna-dashboard shows the names
                warnings.simplefilter("ignore", ExperimentalWarning)
                study.set_metric_names(list(config.objectives))
        elif kept["digest"] != new["digest"]:
            old, now = _essentials(kept), _essentials(new)
            differing = sorted(name for name in old.keys() | now.keys() if old.get(name) != now.get(name))
            shown = ", ".join(differing[:6]) or "what the recipe runs"
            raise UsageError(
                f"study '{config.name}' was begun with another definition ({shown}); give this one another name, or "
                "replace that one: --fresh"
            )
        else:
            study.set_user_attr(DEFINITION, new)  # budget and limits may change
        return study

    def find(self, name: str) -> Study:
        """A study by its name.

        Raises:
            UsageError: there is none.
        """
        known = optuna.get_all_study_names(self.storage)
        if name not in known:
            raise UsageError(f"no study '{name}' in {redact(self.url)}{suggestion(name, known)}")
        study = optuna.load_study(study_name=name, storage=self.storage)
        if DEFINITION not in study.user_attrs:
            raise UsageError(f"study '{name}' was not begun by the runner")
        return study

    def delete(self, name: str, leases: Leases) -> None:
        """Forgets a study.

        Raises:
            UsageError: a worker is at it.
        """
        if name not in optuna.get_all_study_names(self.storage):
            return
        busy = leases.living()
        if busy:
            raise UsageError(f"study '{name}' is being worked on: process {busy[0].pid} on {busy[0].place.split()[0]}")
        optuna.delete_study(study_name=name, storage=self.storage)
        leases.clear()

    def top_up(self, study: Study, definition: Definition, leases: Leases) -> None:
        """Puts as many trials into the queue as the budget has, the recipe as it is first, if the space has it."""
        trials = definition.config.budget.trials
        with leases.waiting(TOP_UP):
            for number in range(len(study.get_trials(deepcopy=False)), trials):
                study.enqueue_trial((definition.as_given() or {}) if number == 0 else {})

    def trial(self, study: Study, number: int) -> Trial:
        """A trial that is not finished, by its number, to go on with: it runs from now on."""
        study_id = self.storage.get_study_id_from_name(study.study_name)
        trial_id = self.storage.get_trial_id_from_study_id_trial_number(study_id, number)
        self.storage.set_trial_state_values(trial_id, TrialState.RUNNING)
        return Trial(study, trial_id)


def database(workspace: Workspace) -> str:
    """The address of the storage: ``OPTUNA_STORAGE``, or else a SQLite file in the workspace."""
    url = os.environ.get(VARIABLE) or f"sqlite:///{workspace.root / 'optuna.db'}"
    return re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)


def verdict_key(recipe: Recipe, searched: Mapping[str, Any]) -> str:
    """The attribute of a study that has the gate's verdict on these stages.

    Numbers that are searched make no difference to it; whatever else is searched does.
    """
    on = {kind: value for kind, value in recipe.values()["optimization"].items() if value != "off"}
    others = {path: value for path, value in searched.items() if isinstance(value, str | bool | None)}
    text = json.dumps([recipe.model.kind, recipe.data.kind, on, others], sort_keys=True)
    return VERDICT + hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Says where study and trials stand when the storage goes away.

    Raises:
        StorageError: it did.
    """
    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        reason = redact(str(error)).partition("\n")[0]
        raise StorageError(
            f"study storage {redact(url)} does not answer any more: {reason}; the same command goes on from there"
        ) from error


def _connect(url: str) -> RDBStorage:
    engine = {"pool_pre_ping": True, "connect_args": connect_args(url)}
    for attempt in range(_TRIES):
        try:
            return RDBStorage(url, engine_kwargs=engine)
        except (sqlalchemy.exc.IntegrityError, sqlalchemy.exc.ProgrammingError):
            if attempt == _TRIES - 1:
                raise
            time.sleep(0.3)  # a worker on another machine makes the tables just now
    raise AssertionError


def _essentials(described: Mapping[str, Any]) -> dict[str, Any]:
    """What the digest is made of, by dotted path."""
    config = {name: value for name, value in described["config"].items() if name not in UNESSENTIAL}
    return dict(flatten({**config, "recipe": described["recipe"]}))


def _described(definition: Definition) -> dict[str, Any]:
    return {
        "digest": definition.digest,
        "file": str(definition.path.resolve()),
        "sets": list(definition.sets[len(definition.config.set) :]),
        "config": definition.config.model_dump(mode="json"),
        "recipe": definition.recipe.values(),
    }
