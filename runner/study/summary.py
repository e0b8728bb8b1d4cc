"""What a study has come to so far, read from its storage alone."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from runner.study import attempts as kept
from runner.study.attempts import Used, used
from runner.study.config import Parameter, StudyConfig, is_on
from runner.study.leases import Lease, Leases
from runner.study.store import DEFINITION, StudyStore

if TYPE_CHECKING:
    from runner.tracking.workspace import Workspace

FEWEST = 5  # trials with a stage, and without, that its worth needs
FEWEST_DECIDE = 16  # trials that importance needs; with fewer it mostly shows chance
_TOP = 5  # trials that are the best, to importance, if a tenth of all are fewer
_RESAMPLES = 2000


@dataclass(frozen=True)
class Row:
    """One trial."""

    number: int
    state: str  # Optuna's: COMPLETE, PRUNED, FAIL, RUNNING or WAITING
    cause: str  # what became of it: done, pruned, out of memory, diverged, ...; infeasible if a bound is not kept
    reason: str
    values: Mapping[str, float]
    settings: Mapping[str, Any]
    verdict: str  # the gate's; empty if it was not asked
    best: bool  # whether nothing is better in all objectives
    is_recipe: bool  # whether it is the recipe as it was given
    seconds: float


@dataclass(frozen=True)
class Worth:
    """A stage across the study: the median of an objective with it and without."""

    stage: str
    objective: str
    on: float
    off: float
    low: float  # of the 95 % bootstrap interval of the difference of the medians
    high: float
    trials_on: int
    trials_off: int


@dataclass(frozen=True)
class Summary:
    """Everything that ``runner study show`` says."""

    name: str
    file: str
    objectives: Mapping[str, str]  # direction by metric
    budget: Mapping[str, Any]
    used: Used
    seconds_left: float | None  # for the rest of the budget's trials, at the pace so far; None if there is none yet
    rows: Sequence[Row]
    importance: Mapping[str, Mapping[str, float]]  # share of each setting, by objective
    worth: Sequence[Worth]
    causes: Mapping[str, int]
    overhead_s: float | None  # what the runner took around a trial's training, in the median
    disturbed: int  # trials whose measured speed is in doubt

    @property
    def best(self) -> list[Row]:
        """The best trial, or the Pareto front, in the order of the first objective."""
        name, direction = next(iter(self.objectives.items()))
        front = [row for row in self.rows if row.best]
        return sorted(front, key=lambda row: row.values[name], reverse=direction == "maximize")

    def data(self) -> dict[str, Any]:
        """As one JSON object."""
        return asdict(self) | {"best": [row.number for row in self.best]}


def find(reference: str, workspace: Workspace) -> tuple[Study, Summary]:
    """A study by its name or its file, as it stands."""
    with StudyStore.session(workspace) as store:
        study = store.find(reference)
        return study, summarise(study, Leases(store.storage.engine, study.study_name).all())


def summarise(study: Study, leases: Sequence[Lease] = ()) -> Summary:
    """Reads a study that was begun by the runner, and on which those who hold leases work now."""
    described = study.user_attrs[DEFINITION]
    config = StudyConfig.model_validate(described["config"])
    waits = TrialState.WAITING  # beyond a budget that was lowered
    trials = [t for t in study.get_trials(deepcopy=False) if t.number < config.budget.trials or t.state != waits]
    counting = [t for t in trials if t.state == TrialState.COMPLETE and all(v <= 0 for v in t.constraints.values())]
    front = {trial.number for trial in study.best_trials} if counting else set()
    rows = [_row(trial, config, trial.number in front) for trial in trials]
    spent = used(trials, leases)
    done = [row for row, trial in zip(rows, trials, strict=True) if trial.state.is_finished()]
    left = None
    if done:
        left = spent.seconds / len(done) * (len(trials) - len(done))
        if config.budget.seconds is not None:
            left = max(0.0, min(left, config.budget.seconds - spent.seconds))
    overheads = [trial.user_attrs[kept.OVERHEAD] for trial in trials if kept.OVERHEAD in trial.user_attrs]
    directions = [direction.name.lower() for direction in study.directions]
    return Summary(
        name=study.study_name, file=described["file"], budget=config.budget.model_dump(mode="json"),
        objectives=dict(zip(config.objectives, directions, strict=True)),
        used=spent, seconds_left=left, rows=rows, causes=dict(Counter(row.cause for row in done)),
        importance=_importance(study, list(config.objectives), counting),
        worth=_worths([row for row in rows if row.cause == "done"], config),
        overhead_s=statistics.median(overheads) if overheads else None,
        disturbed=sum(trial.user_attrs.get(kept.NEIGHBOURS, 0.0) > kept.DISTURBED for trial in trials),
    )  # fmt: skip


def _row(trial: FrozenTrial, config: StudyConfig, best: bool) -> Row:
    attributes, cause = trial.user_attrs, trial.state.name.lower()
    reason = str(attributes.get(kept.REASON, ""))
    broken = [f"{name} is {value:.4g} beyond its bound" for name, value in trial.constraints.items() if value > 0]
    if trial.state == TrialState.COMPLETE and broken:
        cause, reason = "infeasible", reason or ", ".join(broken)
    elif trial.state.is_finished():
        cause = str(attributes.get(kept.CAUSE, cause))
    return Row(
        number=trial.number, state=trial.state.name, cause=cause, reason=reason, best=best,
        values=dict(zip(config.objectives, trial.values or (), strict=False)),
        settings=attributes.get(kept.VALUES, {}), verdict=str(attributes.get(kept.VERDICT, {}).get("outcome", "")),
        is_recipe=trial.number == 0 and bool(trial.system_attrs.get("fixed_params")),
        seconds=used([trial]).device_seconds,
    )  # fmt: skip


def _importance(study: Study, names: Sequence[str], counting: Sequence[FrozenTrial]) -> dict[str, dict[str, float]]:
    """How much each setting decides by PED-ANOVA (Watanabe, Bansal and Hutter 2023): what sets the best apart."""
    if len(counting) < FEWEST_DECIDE:
        return {}
    evaluator = PedAnovaImportanceEvaluator(target_quantile=max(0.1, _TOP / len(counting)))
    found = {}
    for number, (name, direction) in enumerate(zip(names, study.directions, strict=True)):
        plain = optuna.create_study(direction=direction)  # of this objective alone, and without what failed
        for each in counting:
            value = each.values[number]
            plain.add_trial(optuna.create_trial(params=each.params, distributions=each.distributions, value=value))
        if len({trial.values[number] for trial in counting}) > 1:
            with suppress(ValueError, RuntimeError):  # it raises where nothing varies
                found[name] = dict(get_param_importances(plain, evaluator=evaluator))
    return found


def _worths(done: Sequence[Row], config: StudyConfig) -> list[Worth]:
    """Every stage that is switched, with the 95 % percentile bootstrap interval (Efron and Tibshirani 1993)."""
    found = []
    for parameter, name in itertools.product(map(Parameter, config.space, config.space.values()), config.objectives):
        if parameter.stage is None:
            continue
        on = [row.values[name] for row in done if is_on(row.settings[parameter.path])]
        off = [row.values[name] for row in done if not is_on(row.settings[parameter.path])]
        if min(len(on), len(off)) >= FEWEST:
            draw = np.random.default_rng(0)
            medians = [np.median(draw.choice(each, (_RESAMPLES, len(each))), axis=1) for each in (on, off)]
            low, high = map(float, np.quantile(medians[0] - medians[1], [0.025, 0.975]))
            middle = statistics.median(on), statistics.median(off)
            found.append(Worth(parameter.stage, name, *middle, low, high, len(on), len(off)))
    return found
