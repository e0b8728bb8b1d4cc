"""Optuna's storage for the studies of a workspace or of many machines."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
import time
import uuid
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock
from optuna.exceptions import ExperimentalWarning
from optuna.storages import RDBStorage
from optuna.study import Study
from optuna.trial import Trial, TrialState
from sqlalchemy import exc

from runner.recipe.joined_results import accepted_drift, data_key
from runner.recipe.recipe import Recipe
from runner.recipe.yaml_nodes import read
from runner.study.definition import Definition
from runner.study.leases import WAIT_SECONDS, Leases
from runner.study.sampler import PerTrialSampler, pruner
from runner.system.errors import StorageError, UsageError
from runner.system.files import is_link, make_folder, remove_quietly, rename
from runner.system.secrets import redact
from runner.system.suggestions import suggestion
from runner.system.workspace_paths import sqlite_uri
from runner.tracking.read_only import copy_if_read_only
from runner.tracking.workspace import Workspace

VARIABLE = "OPTUNA_STORAGE"
_DATABASE = "optuna.db"
# The attribute of a study that has its description.
DEFINITION = "runner.definition"
# The attribute of a study that distinguishes it from others of its name.
IDENTITY = "runner.id"
_log = logging.getLogger(__name__)
# The attribute of a study that has the code and packages of its trials.
COMPUTATION = "runner.computation"
# The lease for adding trials to the queue; trials have numbers from 0.
TOP_UP = -1
_TRIES = 5
_TIMEOUTS = {
    "sqlite": {"timeout": 60},
    "postgresql": {"connect_timeout": 20},
    "mysql": {"connect_timeout": 20},
}

# It would warn that every conditional setting is sampled independently.
optuna.logging.set_verbosity(optuna.logging.ERROR)


class StudyStore(RDBStorage):
    """Optuna's storage, with the studies of the runner."""

    @classmethod
    def open(cls, workspace: Workspace, reading: bool = False) -> StudyStore:
        """Opens ``OPTUNA_STORAGE`` if set, else a SQLite file in the workspace; a ``StorageError`` if it cannot.

        With ``reading``, a file that cannot be written is opened as a copy, and none is created: a ``UsageError`` if
        there is none.
        """
        database = workspace.root / _DATABASE
        if reading and VARIABLE not in os.environ and not is_link(database):
            if not database.exists():
                raise UsageError(f"no studies in {workspace.root}; start one: runner study run STUDY.yaml")
            copied = copy_if_read_only(database)
            if copied is not None:
                store = cls.open(Workspace(copied.parent))
                weakref.finalize(store, remove_quietly, copied.parent)
                return store

        url = os.environ.get(VARIABLE) or sqlite_uri(database)
        url = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)
        dialect = re.split(r"\W", url)[0]
        engine = {"pool_pre_ping": True, "connect_args": _TIMEOUTS.get(dialect, {})}
        try:
            make_folder(workspace.root)
            if is_link(database):
                raise OSError(f"{database} is a symbolic link, which is not followed")
            # A database that several processes create together stays broken.
            with FileLock(workspace.root / "optuna.lock"):
                for _ in range(_TRIES - 1):
                    with suppress(exc.IntegrityError, exc.ProgrammingError):
                        return cls(url, engine_kwargs=engine)
                    # A worker on another machine is creating the tables.
                    time.sleep(0.3)
                return cls(url, engine_kwargs=engine)
        except (exc.SQLAlchemyError, ImportError, OSError, RuntimeError, ValueError) as error:
            reason = redact(str(error)).partition("\n")[0]
            raise StorageError(
                f"study storage {redact(url)} cannot be used: {reason}; start its server, or name another in "
                f"{VARIABLE} (PostgreSQL needs: pip install 'proven-runner[postgres]')"
            ) from error

    @property
    def dashboard(self) -> str:
        """The command that shows it in a browser; the URL of a server, in which a secret may be, is the variable's."""
        if self.url.startswith("sqlite:"):
            return f"optuna-dashboard {shlex.quote(self.url)}"
        return f'optuna-dashboard "{self.url.partition(":")[0]}:${{{VARIABLE}#*:}}"'

    @classmethod
    @contextmanager
    def session(cls, workspace: Workspace, reading: bool = False) -> Iterator[StudyStore]:
        """Opens the storage inside the ``with``; a ``StorageError`` reports if it
        becomes unreachable.
        """
        store = cls.open(workspace, reading)
        try:
            yield store
        except (exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            reason = redact(str(error)).partition("\n")[0]
            raise StorageError(
                f"study storage {redact(store.url)} does not answer any more: {reason}; the same command continues "
                "from there"
            ) from error
        finally:
            store.remove_session()
            store.engine.dispose()

    def create(self, definition: Definition, allow_drift: bool = False) -> Study:
        """Returns the study of a definition, which is created if there is none.

        Args:
            definition: The study.
            allow_drift: Whether its trials are continued although code or packages have changed.

        Raises:
            UsageError: The study of that name has another definition, or its code or packages have changed.
        """
        config = definition.config
        recipe = definition.recipe
        goal = recipe.length[1]
        directions = [
            # With ``reach`` the objective is the time until the metric is reached.
            objective.direction if objective.reach is None else "minimize"
            for objective in config.objectives.values()
        ]
        study = optuna.create_study(
            storage=self,
            study_name=config.name,
            sampler=PerTrialSampler(config),
            load_if_exists=True,
            pruner=pruner(config, goal, recipe.train.evaluate_every or goal),
            directions=directions,
        )

        stored = study.user_attrs.get(DEFINITION)
        if stored is None:
            if study.trials:
                raise UsageError(f"study '{config.name}' was not created by the runner; give this one another name")
            study.set_user_attr(IDENTITY, uuid.uuid4().hex[:8])
            with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
                # optuna-dashboard shows these names.
                study.set_metric_names(list(config.objectives))
        elif stored["digest"] != definition.digest:
            changes = ", ".join(definition.differing(stored)[:6]) or "the code of the recipe"
            raise UsageError(
                f"study '{config.name}' was created with another definition ({changes}); give this one another name, "
                "or replace that one: --fresh"
            )

        computation = definition.computation()
        # Studies of earlier versions have none.
        stored_computation = study.user_attrs.get(COMPUTATION)
        if stored_computation is not None:
            for change in accepted_drift(title_of(config.name), stored_computation, computation, allow_drift):
                _log.warning("drift: %s", change)
        if stored_computation != computation:
            study.set_user_attr(COMPUTATION, computation)
        # Budget and limits may change between two sessions.
        study.set_user_attr(DEFINITION, definition.described)
        return study

    def find(self, reference: str) -> Study:
        """A study by its name, or by its file; a ``UsageError`` if there is none."""
        name = reference
        if Path(reference).is_file():
            name_node = read(Path(reference), []).get("name")
            if name_node is not None:
                name = str(name_node.value)

        study_names = optuna.get_all_study_names(self)
        if name not in study_names:
            raise UsageError(f"no study '{name}' in {redact(self.url)}{suggestion(name, study_names)}")
        study = optuna.load_study(study_name=name, storage=self)
        if DEFINITION not in study.user_attrs:
            raise UsageError(f"study '{name}' was not created by the runner")
        return study

    def top_up(self, study: Study, definition: Definition, leases: Leases) -> None:
        """Puts as many trials into the queue as the budget has, the recipe as it is first, if the space has it."""
        with leases.waiting(TOP_UP):
            trial_count = len(study.get_trials(deepcopy=False))
            for number in range(trial_count, definition.config.budget.trials):
                recipe_settings = definition.as_given() if number == 0 else None
                study.enqueue_trial(recipe_settings or {})

    def trial(self, study: Study, number: int) -> Trial:
        """Returns an unfinished trial by its number, in state RUNNING, to continue it."""
        study_id = self.get_study_id_from_name(study.study_name)
        trial_id = self.get_trial_id_from_study_id_trial_number(study_id, number)
        self.set_trial_state_values(trial_id, TrialState.RUNNING)
        return Trial(study, trial_id)


def title_of(name: str) -> str:
    """Returns how messages name a study."""
    return f"study '{name}'"


def data_attribute(recipe: Recipe) -> str:
    """The attribute of a study that has the fingerprint of the data that a trial with this recipe reads.

    Data may be drawn with the seed of the recipe.
    """
    key = f"{recipe.seed} {data_key(recipe)}"
    return f"runner.data.{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def file_of(reference: str, workspace: Workspace) -> tuple[str, list[str], float | None]:
    """The file of a study that is named by it or by its name, with the assignments and seconds that it was given."""
    if Path(reference).is_file():
        return reference, [], None
    with StudyStore.session(workspace, reading=True) as store:
        description = store.find(reference).user_attrs[DEFINITION]
    return description["file"], description["sets"], description["config"]["budget"]["seconds"]


def forget(name: str, workspace: Workspace) -> None:
    """Forgets what a study of that name has tried, and lays its folder aside; MLflow keeps it.

    Raises:
        UsageError: A worker is active; for one on another machine, that may take
            a minute to determine.
    """
    with StudyStore.session(workspace) as store:
        leases = Leases(store.engine, name)
        while _is_held(leases, name):
            time.sleep(WAIT_SECONDS)
        if name in optuna.get_all_study_names(store):
            optuna.delete_study(study_name=name, storage=store)
        leases.clear()
    folder = workspace.studies / name
    if folder.exists():
        rename(folder, folder.with_name(f"{name}.{int(time.time())}.before"))


def _is_held(leases: Leases, name: str) -> bool:
    """Returns whether a worker may be alive; raises a ``UsageError`` if one certainly is."""
    is_held = False
    for lease in leases.all():
        is_alive = leases.alive(lease)
        if is_alive:
            raise UsageError(f"study '{name}' is being worked on: process {lease.pid} on {lease.owner.host}")
        is_held = is_held or is_alive is None
    return is_held


def verdict_key(recipe: Recipe, searched: Mapping[str, Any]) -> str:
    """The attribute of a study that has the gate's verdict on these stages.

    Numbers that are searched make no difference to it; whatever else is searched does.
    """
    stages = recipe.values()["optimization"]
    stages_on = {kind: value for kind, value in stages.items() if value != "off"}
    categories = {path: value for path, value in searched.items() if isinstance(value, str | bool | None)}
    text = json.dumps([recipe.model.kind, recipe.data.kind, stages_on, categories], sort_keys=True)
    return f"runner.verdict.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
