"""The studies of a workspace, or of many machines: Optuna's storage, and suggestions that survive a restart.

Suggestions follow from the study's seed, the trial's number and what came out before, and from nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import sqlalchemy.exc
from filelock import FileLock
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, WilcoxonPruner
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.study import Study
from optuna.trial import Trial, TrialState

from runner.recipe.document import read
from runner.system.errors import StorageError, UsageError
from runner.system.names import suggestion
from runner.system.secrets import redact

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from runner.recipe.recipe import Recipe
    from runner.study.config import StudyConfig
    from runner.study.definition import Definition
    from runner.study.leases import Leases
    from runner.tracking.workspace import Workspace

VARIABLE = "OPTUNA_STORAGE"
DEFINITION, IDENTITY = "runner.definition", "runner.id"  # attributes of a study
TOP_UP = -1  # the lease of whoever adds trials to the queue
_TRIES = 5

optuna.logging.set_verbosity(optuna.logging.ERROR)  # it would say of every conditional setting that it is drawn alone


@dataclass(frozen=True)
class StudyStore:
    """An Optuna storage that has answered."""

    url: str
    storage: RDBStorage

    @classmethod
    def open(cls, workspace: Workspace) -> StudyStore:
        """Opens ``OPTUNA_STORAGE`` if set, else a SQLite file in the workspace; a ``StorageError`` if it cannot."""
        url = os.environ.get(VARIABLE) or f"sqlite:///{workspace.root / 'optuna.db'}"
        url = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)
        waits = {"sqlite": {"timeout": 60}, "postgresql": {"connect_timeout": 20}, "mysql": {"connect_timeout": 20}}
        engine = {"pool_pre_ping": True, "connect_args": waits.get(re.split(r"\W", url)[0], {})}
        try:
            workspace.root.mkdir(parents=True, exist_ok=True)
            with FileLock(workspace.root / "optuna.lock"):  # a database that is made by several at once stays broken
                for _ in range(_TRIES - 1):
                    with suppress(sqlalchemy.exc.IntegrityError, sqlalchemy.exc.ProgrammingError):
                        return cls(url, RDBStorage(url, engine_kwargs=engine))
                    time.sleep(0.3)  # a worker on another machine makes the tables just now
                return cls(url, RDBStorage(url, engine_kwargs=engine))
        except (sqlalchemy.exc.SQLAlchemyError, ImportError, OSError, RuntimeError, ValueError) as error:
            reason = redact(str(error)).partition("\n")[0]
            raise StorageError(
                f"study storage {redact(url)} cannot be used: {reason}; start its server, or name another in "
                f"{VARIABLE} (PostgreSQL needs: pip install 'proven-runner[postgres]')"
            ) from error

    @classmethod
    @contextmanager
    def session(cls, workspace: Workspace) -> Iterator[StudyStore]:
        """Opens it for a while; a ``StorageError`` says where study and trials stand if it goes away."""
        store = cls.open(workspace)
        try:
            yield store
        except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            reason = redact(str(error)).partition("\n")[0]
            raise StorageError(
                f"study storage {redact(store.url)} does not answer any more: {reason}; the same command goes on from "
                "there"
            ) from error
        finally:
            store.storage.remove_session()
            store.storage.engine.dispose()

    def create(self, definition: Definition) -> Study:
        """The study of that definition, made if there is none; a ``UsageError`` if that of its name has another."""
        config, recipe = definition.config, definition.recipe
        goal = recipe.length[1]
        study = optuna.create_study(
            storage=self.storage, study_name=config.name, sampler=PerTrialSampler(config), load_if_exists=True,
            pruner=pruner(config, goal, recipe.train.evaluate_every or goal),
            directions=[each.direction if each.reach is None else "minimize" for each in config.objectives.values()],
        )  # fmt: skip
        kept = study.user_attrs.get(DEFINITION)
        if kept is None:
            if study.trials:
                raise UsageError(f"study '{config.name}' was not begun by the runner; give this one another name")
            study.set_user_attr(IDENTITY, uuid.uuid4().hex[:8])
            with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
                study.set_metric_names(list(config.objectives))  # for optuna-dashboard
        elif kept["digest"] != definition.digest:
            shown = ", ".join(definition.differing(kept)[:6]) or "what the recipe runs"
            raise UsageError(
                f"study '{config.name}' was begun with another definition ({shown}); give this one another name, or "
                "replace that one: --fresh"
            )
        study.set_user_attr(DEFINITION, definition.described)  # budget and limits may change
        return study

    def find(self, reference: str) -> Study:
        """A study by its name, or by its file; a ``UsageError`` if there is none."""
        node = read(Path(reference), []).get("name") if Path(reference).is_file() else None
        name = reference if node is None else str(node.value)
        known = optuna.get_all_study_names(self.storage)
        if name not in known:
            raise UsageError(f"no study '{name}' in {redact(self.url)}{suggestion(name, known)}")
        study = optuna.load_study(study_name=name, storage=self.storage)
        if DEFINITION not in study.user_attrs:
            raise UsageError(f"study '{name}' was not begun by the runner")
        return study

    def delete(self, name: str, leases: Leases) -> None:
        """Forgets a study; a ``UsageError`` if a worker is at it."""
        if name not in optuna.get_all_study_names(self.storage):
            return
        if busy := leases.living():
            raise UsageError(f"study '{name}' is being worked on: process {busy[0].pid} on {busy[0].owner.host}")
        optuna.delete_study(study_name=name, storage=self.storage)
        leases.clear()

    def top_up(self, study: Study, definition: Definition, leases: Leases) -> None:
        """Puts as many trials into the queue as the budget has, the recipe as it is first, if the space has it."""
        with leases.waiting(TOP_UP):
            for number in range(len(study.get_trials(deepcopy=False)), definition.config.budget.trials):
                study.enqueue_trial((definition.as_given() or {}) if number == 0 else {})

    def trial(self, study: Study, number: int) -> Trial:
        """A trial that is not finished, by its number, to go on with: it runs from now on."""
        study_id = self.storage.get_study_id_from_name(study.study_name)
        trial_id = self.storage.get_trial_id_from_study_id_trial_number(study_id, number)
        self.storage.set_trial_state_values(trial_id, TrialState.RUNNING)
        return Trial(study, trial_id)


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

    Optuna stores no sampler's generator, so that one which goes on from trial to trial would suggest something else
    after a restart. Here a trial that is begun again, even in the middle of its suggestions, is suggested the same.
    """

    def __init__(self, config: StudyConfig) -> None:
        self._config = config
        self._together: BaseSampler

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The parameters that are drawn together, which Optuna asks for just before it has them drawn."""
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
    """Decides whether a trial goes on, whose trainings end at a step and are evaluated every so many."""
    kind, startup = config.pruner_kind, config.pruner.startup
    if kind == "median":
        return MedianPruner(n_startup_trials=5 if startup is None else startup)
    if kind == "hyperband":
        return HyperbandPruner(min_resource=max(1, every), max_resource=goal)
    if kind == "wilcoxon":
        with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
            return WilcoxonPruner(n_startup_steps=2 if startup is None else startup)
    return NopPruner()
