"""Optuna's storage for the studies of a workspace or of many machines, the leases
of trials, and suggestions.

Suggestions follow from the study's seed, the trial's number and what came out before, and from nothing else.
"""

from __future__ import annotations

import hashlib
import json
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
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, WilcoxonPruner
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy import BigInteger, Engine, String, delete, exc, insert, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column

from runner.recipe.document import read
from runner.recipe.recipe import Recipe
from runner.study.config import StudyConfig
from runner.study.definition import Definition
from runner.system.errors import StorageError, UsageError
from runner.system.files import is_link, make_folder, remove_quietly, rename
from runner.system.names import suggestion
from runner.system.places import sqlite_uri
from runner.system.processes import Owner
from runner.system.secrets import redact
from runner.tracking.read_only import copy_if_read_only
from runner.tracking.workspace import Workspace

VARIABLE = "OPTUNA_STORAGE"
_DATABASE = "optuna.db"
DEFINITION, IDENTITY = "runner.definition", "runner.id"  # attributes of a study
TOP_UP = -1  # the lease for adding trials to the queue
_TRIES = 5
BEAT_SECONDS = 5.0  # between two heartbeats of a worker
DEAD_SECONDS = 60.0  # without a beat after which a holder on another machine is taken for dead
_WAIT_SECONDS = 0.2

# It would warn that every conditional setting is sampled independently.
optuna.logging.set_verbosity(optuna.logging.ERROR)


class _Base(MappedAsDataclass, DeclarativeBase):
    pass


class Lease(_Base):
    """The worker of a trial: a row, unique by study and trial."""

    __tablename__ = "runner_leases"
    study: Mapped[str] = mapped_column(String(128), primary_key=True)
    trial: Mapped[int] = mapped_column(primary_key=True)
    worker: Mapped[str] = mapped_column(String(64))
    place: Mapped[str] = mapped_column(
        String(256)
    )  # host, boot, process namespace and machine, in which ``pid`` counts
    pid: Mapped[int] = mapped_column(BigInteger)
    # Start of the process, which distinguishes it from a later one with the same number.
    born: Mapped[float]
    beats: Mapped[int] = mapped_column(BigInteger)
    seen: Mapped[float]  # last heartbeat, in seconds since 1970 by the worker's clock

    @property
    def owner(self) -> Owner:
        """The process."""
        host, boot, namespace, machine = self.place.split(" ")
        return Owner(pid=self.pid, host=host, boot_id=boot, namespace=namespace, born=self.born, machine=machine)


class Leases:
    """The leases of one study, for one worker.

    A lease changes hands by one conditional statement, so that only one of several workers that find its holder dead
    gets it; a holder that was taken for dead learns it from its next beat.
    """

    def __init__(self, engine: Engine, study: str, dead_seconds: float = DEAD_SECONDS) -> None:
        self.worker = uuid.uuid4().hex
        self._engine, self._study, self._dead_seconds = engine, study, dead_seconds
        self._watched: dict[tuple[str, int], tuple[int, int, float]] = {}
        with suppress(exc.OperationalError, exc.ProgrammingError, exc.IntegrityError):  # another worker made it
            _Base.metadata.create_all(engine)

    def claim(self, trial: int) -> bool:
        """Claims a trial that has no worker, or a dead one; returns False if it belongs to
        another.
        """
        holder, own = self.holder(trial), Owner.this_process()
        place = " ".join((own.host, own.boot_id, own.namespace, own.machine))
        mine = {"worker": self.worker, "place": place, "pid": own.pid,
                "born": own.born, "beats": 0, "seen": time.time()}  # fmt: skip
        if holder is None:
            try:
                self._execute(insert(Lease).values(study=self._study, trial=trial, **mine))
            except exc.IntegrityError:
                return False
            return True  # not every database counts what is inserted
        if self.alive(holder) is not False:
            return False
        unchanged = (Lease.worker == holder.worker) & (Lease.beats == holder.beats)
        return self._execute(update(Lease).where(self._row(trial), unchanged).values(**mine))

    @contextmanager
    def waiting(self, trial: int) -> Iterator[None]:
        """Holds a lease for a moment, after any other holder has released it."""
        while not self.claim(trial):
            time.sleep(_WAIT_SECONDS)
        try:
            yield
        finally:
            self.release(trial)

    def beat(self, trial: int) -> bool:
        """Writes a heartbeat of this worker; returns False if the trial belongs to another one
        now.
        """
        mine = update(Lease).where(self._row(trial), Lease.worker == self.worker)
        return self._execute(mine.values(beats=Lease.beats + 1, seen=time.time()))

    def release(self, trial: int) -> None:
        """Gives a trial up."""
        self._execute(delete(Lease).where(self._row(trial), Lease.worker == self.worker))

    def clear(self) -> None:
        """Forgets all leases of the study."""
        self._execute(delete(Lease).where(Lease.study == self._study))

    def holder(self, trial: int) -> Lease | None:
        """Returns the lease of a trial; None if it has none."""
        return next((lease for lease in self.all() if lease.trial == trial), None)

    def all(self) -> list[Lease]:
        """The leases of the study."""
        with Session(self._engine) as session:
            return list(session.scalars(select(Lease).where(Lease.study == self._study)))

    def alive(self, lease: Lease) -> bool | None:
        """Returns whether the holder is alive; None for one on another machine without an observed
        heartbeat, until it was silent for too long.

        Silence is measured by this clock: two clocks need not agree.
        """
        known = lease.owner.alive
        if known is not None:
            return known
        key, now = (lease.worker, lease.trial), time.monotonic()
        first, beats, since = self._watched.get(key, (lease.beats, lease.beats, now))
        since = since if beats == lease.beats else now
        self._watched[key] = (first, lease.beats, since)
        return False if now - since > self._dead_seconds else lease.beats != first or None

    def _row(self, trial: int) -> Any:
        return (Lease.study == self._study) & (Lease.trial == trial)

    def _execute(self, statement: Any) -> bool:
        """Returns whether an update has changed one row."""
        with self._engine.begin() as connection:
            return int(connection.execute(statement).rowcount) == 1


class StudyStore(RDBStorage):
    """Optuna's storage, with the studies of the runner."""

    @classmethod
    def open(cls, workspace: Workspace, reading: bool = False) -> StudyStore:
        """Opens ``OPTUNA_STORAGE`` if set, else a SQLite file in the workspace; a ``StorageError`` if it cannot.

        With ``reading``, a file that cannot be written is opened as a copy, and none is created: a ``UsageError`` if
        there is none.
        """
        database = workspace.root / _DATABASE
        if reading and VARIABLE not in os.environ and not is_link(database) and not database.exists():
            raise UsageError(f"no studies in {workspace.root}; start one: runner study run STUDY.yaml")
        if reading and VARIABLE not in os.environ and not is_link(database):
            copied = copy_if_read_only(database)
            if copied is not None:
                store = cls.open(Workspace(copied.parent))
                weakref.finalize(store, remove_quietly, copied.parent)
                return store
        url = os.environ.get(VARIABLE) or sqlite_uri(database)
        url = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)
        waits = {"sqlite": {"timeout": 60}, "postgresql": {"connect_timeout": 20}, "mysql": {"connect_timeout": 20}}
        engine = {"pool_pre_ping": True, "connect_args": waits.get(re.split(r"\W", url)[0], {})}
        try:
            make_folder(workspace.root)
            if is_link(database):
                raise OSError(f"{database} is a symbolic link, which is not followed")
            # A database that several processes create together stays broken.
            with FileLock(workspace.root / "optuna.lock"):
                for _ in range(_TRIES - 1):
                    with suppress(exc.IntegrityError, exc.ProgrammingError):
                        return cls(url, engine_kwargs=engine)
                    time.sleep(0.3)  # a worker on another machine makes the tables just now
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

    def create(self, definition: Definition) -> Study:
        """The study of that definition, made if there is none; a ``UsageError`` if that of its name has another."""
        config, recipe = definition.config, definition.recipe
        goal = recipe.length[1]
        study = optuna.create_study(
            storage=self, study_name=config.name, sampler=PerTrialSampler(config), load_if_exists=True,
            pruner=pruner(config, goal, recipe.train.evaluate_every or goal),
            directions=[each.direction if each.reach is None else "minimize" for each in config.objectives.values()],
        )  # fmt: skip
        kept = study.user_attrs.get(DEFINITION)
        if kept is None:
            if study.trials:
                raise UsageError(f"study '{config.name}' was not created by the runner; give this one another name")
            study.set_user_attr(IDENTITY, uuid.uuid4().hex[:8])
            with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
                study.set_metric_names(list(config.objectives))  # for optuna-dashboard
        elif kept["digest"] != definition.digest:
            shown = ", ".join(definition.differing(kept)[:6]) or "the code of the recipe"
            raise UsageError(
                f"study '{config.name}' was created with another definition ({shown}); give this one another name, or "
                "replace that one: --fresh"
            )
        study.set_user_attr(DEFINITION, definition.described)  # budget and limits may change
        return study

    def find(self, reference: str) -> Study:
        """A study by its name, or by its file; a ``UsageError`` if there is none."""
        node = read(Path(reference), []).get("name") if Path(reference).is_file() else None
        name = reference if node is None else str(node.value)
        known = optuna.get_all_study_names(self)
        if name not in known:
            raise UsageError(f"no study '{name}' in {redact(self.url)}{suggestion(name, known)}")
        study = optuna.load_study(study_name=name, storage=self)
        if DEFINITION not in study.user_attrs:
            raise UsageError(f"study '{name}' was not created by the runner")
        return study

    def top_up(self, study: Study, definition: Definition, leases: Leases) -> None:
        """Puts as many trials into the queue as the budget has, the recipe as it is first, if the space has it."""
        with leases.waiting(TOP_UP):
            for number in range(len(study.get_trials(deepcopy=False)), definition.config.budget.trials):
                study.enqueue_trial((definition.as_given() or {}) if number == 0 else {})

    def trial(self, study: Study, number: int) -> Trial:
        """Returns an unfinished trial by its number, in state RUNNING, to continue it."""
        study_id = self.get_study_id_from_name(study.study_name)
        trial_id = self.get_trial_id_from_study_id_trial_number(study_id, number)
        self.set_trial_state_values(trial_id, TrialState.RUNNING)
        return Trial(study, trial_id)


def file_of(reference: str, workspace: Workspace) -> tuple[str, list[str], float | None]:
    """The file of a study that is named by it or by its name, with the assignments and seconds that it was given."""
    if Path(reference).is_file():
        return reference, [], None
    with StudyStore.session(workspace, reading=True) as store:
        described = store.find(reference).user_attrs[DEFINITION]
    return described["file"], described["sets"], described["config"]["budget"]["seconds"]


def forget(name: str, workspace: Workspace) -> None:
    """Forgets what a study of that name has tried, and lays its folder aside; MLflow keeps it.

    Raises:
        UsageError: A worker is active; for one on another machine, that may take
            a minute to determine.
    """
    with StudyStore.session(workspace) as store:
        leases = Leases(store.engine, name)
        while held := [(lease, alive) for lease in leases.all() if (alive := leases.alive(lease)) is not False]:
            for lease, alive in held:
                if alive:
                    raise UsageError(f"study '{name}' is being worked on: process {lease.pid} on {lease.owner.host}")
            time.sleep(_WAIT_SECONDS)
        if name in optuna.get_all_study_names(store):
            optuna.delete_study(study_name=name, storage=store)
        leases.clear()
    folder = workspace.studies / name
    if folder.exists():
        rename(folder, folder.with_name(f"{name}.{int(time.time())}.before"))


def verdict_key(recipe: Recipe, searched: Mapping[str, Any]) -> str:
    """The attribute of a study that has the gate's verdict on these stages.

    Numbers that are searched make no difference to it; whatever else is searched does.
    """
    on = {kind: value for kind, value in recipe.values()["optimization"].items() if value != "off"}
    others = {path: value for path, value in searched.items() if isinstance(value, str | bool | None)}
    text = json.dumps([recipe.model.kind, recipe.data.kind, on, others], sort_keys=True)
    return f"runner.verdict.{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class PerTrialSampler(BaseSampler):
    """A fresh sampler for every trial, and for every parameter that is not drawn together with others.

    Optuna does not store a sampler's generator, so that one sampler for all trials would suggest
    something else after a restart. Here a trial that is started again, even in the middle of its
    suggestions, receives the same suggestions.
    """

    def __init__(self, config: StudyConfig) -> None:
        self._config = config
        self._together: BaseSampler

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Returns the parameters that are sampled together; Optuna calls this
        just before sampling them.
        """
        self._together = self._new(trial.number, "")
        return self._together.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Draws parameters together."""
        return self._together.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draws one parameter by itself."""
        return self._new(trial.number, param_name).sample_independent(study, trial, param_name, param_distribution)

    def _new(self, number: int, name: str) -> BaseSampler:
        digest = hashlib.sha256(f"{self._config.seed} {number} {name}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")
        kind, startup = self._config.sampler.kind, self._config.sampler.startup or 10
        if kind == "random":
            return RandomSampler(seed=seed)
        if kind == "nsga2":
            return NSGAIISampler(seed=seed, population_size=max(2, startup))
        with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):  # conditional spaces want groups
            return TPESampler(n_startup_trials=startup, seed=seed, multivariate=True, group=True, constant_liar=True)


def pruner(config: StudyConfig, goal: int, every: int) -> BasePruner:
    """Returns the pruner for trainings that end at ``goal`` and are evaluated
    every ``every`` steps.
    """
    kind, startup = config.pruner_kind, config.pruner.startup
    if kind == "median":
        return MedianPruner(n_startup_trials=5 if startup is None else startup)
    if kind == "hyperband":
        return HyperbandPruner(min_resource=max(1, every), max_resource=goal)
    if kind == "wilcoxon":
        with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
            return WilcoxonPruner(n_startup_steps=2 if startup is None else startup)
    return NopPruner()
