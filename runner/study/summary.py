"""What a study has come to so far, read from its storage alone."""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from runner.study.attempts import (
    ATTEMPTS,
    CAUSE,
    DISTURBED,
    NEIGHBOURS,
    OVERHEAD,
    REASON,
    VALUES,
    VERDICT,
    Used,
    used,
)
from runner.study.config import StudyConfig
from runner.study.leases import Lease
from runner.study.space import STAGES, is_on
from runner.study.store import DEFINITION

FEWEST = 5
"""Trials with a stage, and without, that its worth needs."""
FEWEST_DECIDE = 16
"""Trials that importance needs; with fewer it mostly shows chance."""
_TOP = 5
"""Trials that are the best, to importance, if a tenth of all are fewer."""
RESAMPLES = 2000


@dataclass(frozen=True)
class Row:
    """One trial."""

    number: int
    state: str
    """Optuna's: COMPLETE, PRUNED, FAIL, RUNNING or WAITING."""
    cause: str
    """What became of it: done, pruned, out of memory, diverged, ...; infeasible if a bound is not kept."""
    reason: str
    values: Mapping[str, float]
    settings: Mapping[str, Any]
    verdict: str
    """The gate's; empty if it was not asked."""
    best: bool
    """Whether nothing is better in all objectives."""
    is_recipe: bool
    """Whether it is the recipe as it was given."""
    seconds: float


@dataclass(frozen=True)
class Worth:
    """A stage across the study: the median of an objective with it and without."""

    stage: str
    objective: str
    on: float
    off: float
    low: float
    """Lower end of the 95 % bootstrap interval of the difference of the medians."""
    high: float
    trials_on: int
    trials_off: int


@dataclass(frozen=True)
class Summary:
    """Everything that ``runner study show`` says."""

    name: str
    file: str
    objectives: Mapping[str, str]
    """Direction by metric."""
    budget: Mapping[str, Any]
    used: Used
    seconds_left: float | None
    """Until all trials of the budget are done, at the pace so far; None if there is no pace yet."""
    rows: Sequence[Row]
    importance: Mapping[str, Mapping[str, float]]
    """Share of each setting, by objective; PED-ANOVA (Watanabe, Bansal and Hutter 2023)."""
    worth: Sequence[Worth]
    causes: Mapping[str, int]
    overhead_s: float | None
    """What the runner took around a trial's training, in the median."""
    disturbed: int
    """Trials whose measured speed is in doubt."""

    @property
    def best(self) -> list[Row]:
        """The best trial, or the Pareto front, in the order of the first objective."""
        name, direction = next(iter(self.objectives.items()))
        front = [row for row in self.rows if row.best]
        return sorted(front, key=lambda row: row.values[name], reverse=direction == "maximize")

    def data(self) -> dict[str, Any]:
        """As one JSON object."""
        return asdict(self) | {"best": [row.number for row in self.best]}


def summarise(study: Study, leases: Sequence[Lease] = ()) -> Summary:
    """Reads a study.

    Args:
        study: begun by the runner.
        leases: who works on it now.
    """
    described = study.user_attrs[DEFINITION]
    config = StudyConfig.model_validate(described["config"])
    waits = TrialState.WAITING  # beyond a budget that was lowered
    trials = [t for t in study.get_trials(deepcopy=False) if t.number < config.budget.trials or t.state != waits]
    front = {trial.number for trial in study.best_trials} if any(_counts(trial) for trial in trials) else set()
    rows = [_row(trial, config, front) for trial in trials]
    spent = used(trials, leases)
    done = [row for row in rows if row.state in ("COMPLETE", "PRUNED", "FAIL")]
    pace = spent.seconds / len(done) if done else None
    overheads = [trial.user_attrs[OVERHEAD] for trial in trials if OVERHEAD in trial.user_attrs]
    return Summary(
        name=study.study_name,
        file=described["file"],
        objectives={
            name: "minimize" if direction == StudyDirection.MINIMIZE else "maximize"
            for name, direction in zip(config.objectives, study.directions, strict=True)
        },
        budget=config.budget.model_dump(mode="json"),
        used=spent,
        seconds_left=None if pace is None else _left(pace * (len(trials) - len(done)), spent, config),
        rows=rows,
        importance=_importance(study, config, trials),
        worth=_worths(rows, config),
        causes=dict(Counter(row.cause for row in done)),
        overhead_s=statistics.median(overheads) if overheads else None,
        disturbed=sum(trial.user_attrs.get(NEIGHBOURS, 0.0) > DISTURBED for trial in trials),
    )


def _left(seconds: float, spent: Used, config: StudyConfig) -> float:
    limit = config.budget.seconds
    return seconds if limit is None else max(0.0, min(seconds, limit - spent.seconds))


def _counts(trial: FrozenTrial) -> bool:
    return trial.state == TrialState.COMPLETE and all(value <= 0 for value in trial.constraints.values())


def _row(trial: FrozenTrial, config: StudyConfig, front: set[int]) -> Row:
    kept = trial.user_attrs
    broken = [f"{name} is {value:.4g} beyond its bound" for name, value in trial.constraints.items() if value > 0]
    cause = str(kept.get(CAUSE, trial.state.name.lower())) if trial.state.is_finished() else trial.state.name.lower()
    if trial.state == TrialState.COMPLETE and broken:
        cause = "infeasible"
    return Row(
        number=trial.number,
        state=trial.state.name,
        cause=cause,
        reason=str(kept.get(REASON, "")) or (", ".join(broken) if cause == "infeasible" else ""),
        values=dict(zip(config.objectives, trial.values or (), strict=False)),
        settings=kept.get(VALUES, {}),
        verdict=str(kept.get(VERDICT, {}).get("outcome", "")),
        best=trial.number in front,
        is_recipe=trial.number == 0 and bool(trial.system_attrs.get("fixed_params")),
        seconds=used([trial]).device_seconds if ATTEMPTS in kept else 0.0,
    )


def _importance(study: Study, config: StudyConfig, trials: Sequence[FrozenTrial]) -> dict[str, dict[str, float]]:
    """How much each setting decides; PED-ANOVA looks at what sets the best trials apart."""
    counting = [trial for trial in trials if _counts(trial)]
    if len(counting) < FEWEST_DECIDE:
        return {}
    evaluator = PedAnovaImportanceEvaluator(target_quantile=max(0.1, _TOP / len(counting)))
    plain = optuna.create_study(directions=study.directions)  # without what failed, and without this one's attributes
    for trial in counting:
        kept = {"params": trial.params, "distributions": trial.distributions, "values": trial.values}
        plain.add_trial(optuna.create_trial(**kept))
    found = {}
    for number, name in enumerate(config.objectives):
        sign = 1.0 if study.directions[number] == StudyDirection.MINIMIZE else -1.0

        def target(trial: FrozenTrial, number: int = number, sign: float = sign) -> float:
            return sign * float(trial.values[number])

        if len({trial.values[number] for trial in counting}) == 1:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that low is good, which the sign sees to
            try:
                found[name] = dict(get_param_importances(plain, evaluator=evaluator, target=target))
            except (ValueError, RuntimeError):  # nothing varies
                continue
    return found


def _worths(rows: Sequence[Row], config: StudyConfig) -> list[Worth]:
    done = [row for row in rows if row.state == "COMPLETE" and row.cause == "done"]
    found = []
    for path in config.space:
        section, _, stage = path.partition(".")
        if section != STAGES or "." in stage:
            continue
        for name in config.objectives:
            on = [row.values[name] for row in done if is_on(row.settings[path])]
            off = [row.values[name] for row in done if not is_on(row.settings[path])]
            if min(len(on), len(off)) >= FEWEST:
                low, high = _interval(on, off)
                middle = statistics.median(on), statistics.median(off)
                found.append(Worth(stage, name, *middle, low, high, len(on), len(off)))
    return found


def _interval(on: Sequence[float], off: Sequence[float]) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of the difference of two medians (Efron and Tibshirani 1993)."""
    draw = np.random.default_rng(0)
    medians = [np.median(draw.choice(each, (RESAMPLES, len(each))), axis=1) for each in (on, off)]
    low, high = np.quantile(medians[0] - medians[1], [0.025, 0.975])
    return float(low), float(high)
