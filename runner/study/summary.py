"""The summary of a study: its trials, their importance for the objectives, and the worth of stages."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from runner.study.attempts import Used
from runner.study.config import StudyConfig
from runner.study.leases import Lease, Leases
from runner.study.space import Parameter, is_on
from runner.study.store import DEFINITION, StudyStore
from runner.tracking.workspace import Workspace

# Attributes of a trial:
RECIPE = "runner.recipe"
VALUES = "runner.values"
CAUSE = "runner.cause"
REASON = "runner.reason"
OVERHEAD = "runner.overhead_s"
NEIGHBOURS = "runner.neighbours"
VERDICT = "runner.verdict"

# Share of the processor that others may take before a measurement of speed is in doubt.
DISTURBED = 0.1
# Trials with a stage, and without, that its worth needs.
FEWEST = 5
# Trials that importance needs; with fewer it is dominated by noise.
FEWEST_DECIDE = 16
# Trials that count as the best for importance, if a tenth of all are fewer.
_FEWEST_BEST = 5
_RESAMPLES = 2000


@dataclass(frozen=True)
class Row:
    """The row of a trial."""

    number: int
    state: str  # Optuna's: COMPLETE, PRUNED, FAIL, RUNNING or WAITING
    # The result: done, pruned, out of memory, diverged, ...; infeasible if a bound is violated.
    cause: str
    reason: str
    values: Mapping[str, float]
    settings: Mapping[str, Any]
    verdict: str  # of the gate; empty if it did not judge
    best: bool  # whether nothing is better in all objectives
    is_recipe: bool  # whether it is the recipe as it was given
    seconds: float
    recipe: Mapping[str, Any] | None  # with its settings, once it was put together


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
    """The output of ``runner study show``."""

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
    overhead_s: float | None  # the runner's overhead per trial, in the median
    disturbed: int  # trials whose measured speed is in doubt
    seeds: int  # trainings of a trial
    logarithmic: Sequence[str]  # settings that are searched by their logarithm
    dashboard: str  # the command that shows the study in optuna-dashboard
    synthetic: bool = False  # whether the data are synthetic

    @property
    def best(self) -> list[Row]:
        """The best trial, or the Pareto front, in the order of the first objective."""
        name, direction = next(iter(self.objectives.items()))
        front = [row for row in self.rows if row.best]
        return sorted(front, key=lambda row: row.values[name], reverse=direction == "maximize")

    def data(self) -> dict[str, Any]:
        """Returns the summary as a JSON object."""
        data = asdict(self) | {"best": [row.number for row in self.best]}
        for row in data["rows"]:
            del row["recipe"]
        return data


def find(reference: str, workspace: Workspace) -> Summary:
    """Returns the present summary of a study by its name or its file."""
    with StudyStore.session(workspace, reading=True) as store:
        study = store.find(reference)
        return summarise(study, Leases(store.engine, study.study_name).all(), store.dashboard)


def summarise(study: Study, leases: Sequence[Lease] = (), dashboard: str = "") -> Summary:
    """Summarises a study of the runner; leases identify the trials that workers are running now."""
    description = study.user_attrs[DEFINITION]
    config = StudyConfig.model_validate(description["config"])
    trials = [trial for trial in study.get_trials(deepcopy=False) if _is_within_budget(trial, config)]
    valid_trials = [trial for trial in trials if is_valid(trial)]
    front = {trial.number for trial in study.best_trials} if valid_trials else set()
    rows = [_row(trial, config, trial.number in front) for trial in trials]
    used = Used.by(trials, leases)

    finished_rows = [row for row, trial in zip(rows, trials, strict=True) if trial.state.is_finished()]
    overheads = [trial.user_attrs[OVERHEAD] for trial in trials if OVERHEAD in trial.user_attrs]
    directions = (direction.name.lower() for direction in study.directions)
    return Summary(
        name=study.study_name,
        file=description["file"],
        objectives=dict(zip(config.objectives, directions, strict=True)),
        budget=config.budget.model_dump(mode="json"),
        used=used,
        seconds_left=_remaining_seconds(used, len(trials), config.budget.seconds),
        rows=rows,
        importance=_importance(study, list(config.objectives), valid_trials),
        worth=_worths([row for row in rows if row.cause == "done"], config),
        causes=dict(Counter(row.cause for row in finished_rows)),
        overhead_s=statistics.median(overheads) if overheads else None,
        disturbed=sum(trial.user_attrs.get(NEIGHBOURS, 0.0) > DISTURBED for trial in trials),
        seeds=config.seeds,
        logarithmic=[path for path, parameter in config.space.items() if parameter.log],
        dashboard=dashboard,
        synthetic=description.get("synthetic", False),
    )


def is_valid(trial: FrozenTrial) -> bool:
    """Returns whether a trial is complete and within all bounds."""
    if trial.state != TrialState.COMPLETE:
        return False
    return all(excess <= 0 for excess in trial.constraints.values())


def _is_within_budget(trial: FrozenTrial, config: StudyConfig) -> bool:
    # The queue may contain trials from before the budget was lowered.
    return trial.number < config.budget.trials or trial.state != TrialState.WAITING


def _remaining_seconds(used: Used, trial_count: int, budget_seconds: float | None) -> float | None:
    """Returns the seconds for the remaining trials at the pace so far; None if there is none yet."""
    if not used.trials:
        return None
    seconds = used.seconds / used.trials * (trial_count - used.trials)
    if budget_seconds is None:
        return seconds
    return max(0.0, min(seconds, budget_seconds - used.seconds))


def _row(trial: FrozenTrial, config: StudyConfig, best: bool) -> Row:
    attributes = trial.user_attrs
    cause = trial.state.name.lower()
    reason = str(attributes.get(REASON, ""))
    violations = [f"{name} is {value:.4g} beyond its bound" for name, value in trial.constraints.items() if value > 0]
    if trial.state == TrialState.COMPLETE and violations:
        cause = "infeasible"
        reason = reason or ", ".join(violations)
    elif trial.state.is_finished():
        cause = str(attributes.get(CAUSE, cause))

    return Row(
        number=trial.number,
        state=trial.state.name,
        cause=cause,
        reason=reason,
        values=dict(zip(config.objectives, trial.values or (), strict=False)),
        settings=attributes.get(VALUES, {}),
        verdict=str(attributes.get(VERDICT, {}).get("outcome", "")),
        best=best,
        # Only the first trial may be put into the queue with settings.
        is_recipe=trial.number == 0 and bool(trial.system_attrs.get("fixed_params")),
        seconds=Used.by([trial]).device_seconds,
        recipe=attributes.get(RECIPE),
    )


def _importance(study: Study, names: Sequence[str], trials: Sequence[FrozenTrial]) -> dict[str, dict[str, float]]:
    """Returns the importance of each setting by PED-ANOVA (Watanabe, Bansal and Hutter 2023): how
    it separates the best trials.
    """
    if len(trials) < FEWEST_DECIDE:
        return {}
    evaluator = PedAnovaImportanceEvaluator(target_quantile=max(0.1, _FEWEST_BEST / len(trials)))
    importance = {}
    for number, (name, direction) in enumerate(zip(names, study.directions, strict=True)):
        # Optuna's evaluator uses all trials of a study, also those that violate a bound.
        single_objective_study = optuna.create_study(direction=direction)
        single_objective_study.add_trials(_single_objective_trial(trial, number) for trial in trials)
        if len({trial.values[number] for trial in trials}) > 1:
            # Optuna raises an error if no setting varies.
            with suppress(ValueError, RuntimeError):
                shares = get_param_importances(single_objective_study, evaluator=evaluator)
                importance[name] = dict(shares)
    return importance


def _single_objective_trial(trial: FrozenTrial, number: int) -> FrozenTrial:
    """Returns a trial that has only the objective with that number."""
    return optuna.create_trial(
        params=trial.params,
        distributions=trial.distributions,
        value=trial.values[number],
    )


def _worths(rows: Sequence[Row], config: StudyConfig) -> list[Worth]:
    """The worth of every stage that is switched, for every objective with enough trials."""
    worths = []
    parameters = [Parameter(path, parameter_config) for path, parameter_config in config.space.items()]
    for parameter, objective in itertools.product(parameters, config.objectives):
        if parameter.stage is None:
            continue
        on = [row.values[objective] for row in rows if is_on(row.settings[parameter.path])]
        off = [row.values[objective] for row in rows if not is_on(row.settings[parameter.path])]
        if min(len(on), len(off)) >= FEWEST:
            worths.append(_worth(parameter.stage, objective, on, off))
    return worths


def _worth(stage: str, objective: str, on: Sequence[float], off: Sequence[float]) -> Worth:
    """Compares medians, with the 95 % percentile bootstrap interval (Efron and Tibshirani 1993)."""
    generator = np.random.default_rng(0)
    medians_on = np.median(generator.choice(on, (_RESAMPLES, len(on))), axis=1)
    medians_off = np.median(generator.choice(off, (_RESAMPLES, len(off))), axis=1)
    low, high = np.quantile(medians_on - medians_off, [0.025, 0.975])
    return Worth(
        stage=stage,
        objective=objective,
        on=statistics.median(on),
        off=statistics.median(off),
        low=float(low),
        high=float(high),
        trials_on=len(on),
        trials_off=len(off),
    )
