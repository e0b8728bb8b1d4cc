"""One trial: suggested, judged by the gate if that is asked, trained with every seed, and told for what it was."""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna.trial import Trial, TrialState

from runner.child.spawn import Cause
from runner.compare.verdict import Outcome
from runner.recipe.document import RecipeError
from runner.recipe.recipe import Recipe
from runner.study.attempts import (
    CAUSE,
    DISTURBED,
    GATE,
    KILLED,
    NEIGHBOURS,
    OVERHEAD,
    REASON,
    RECIPE,
    VALUES,
    VERDICT,
    Attempts,
    Neighbours,
)
from runner.study.config import VERIFY
from runner.study.definition import Definition
from runner.study.gate import judge
from runner.study.process import PRUNED, Ended, Training, begin, forget, limits_of
from runner.study.publish import Publisher, Told
from runner.study.space import figure, label
from runner.study.store import verdict_key
from runner.study.training import SPOOL
from runner.study.values import bounds, logged_by, objectives
from runner.system.errors import RunnerError, UsageError
from runner.system.faults import reach
from runner.system.secrets import redact, redact_values
from runner.tracking.workspace import folder_name
from runner.train.loop import CHECKPOINTS

FEASIBLE = "trained"
"""The constraint that tells Optuna of a configuration that cannot be trained to a result."""
NOT_REACHED = "not reached"
_INFEASIBLE = {Cause.OUT_OF_MEMORY, Cause.DIVERGED, Cause.TIMEOUT, Cause.INVALID, GATE, NOT_REACHED}
"""They belong to the configuration: it would end like that again."""
_TRANSIENT = (Cause.CRASHED, Cause.HUNG)
"""The same training might end well another time."""
_MOST_KILLED = 8
"""Attempts beyond the retries that may end with their worker before the training is taken to be why."""
Say = Callable[[str], None]


class LostError(RunnerError):
    """Another worker has taken the trial, because this one was not heard of for too long."""


class StoppedError(RunnerError):
    """The worker was told to end; the trial goes on another time."""


@dataclass
class _Result:
    values: dict[str, float] = field(default_factory=dict)
    excess: dict[str, float] = field(default_factory=dict)
    cause: str = Cause.DONE
    reason: str = ""


class TrialRun:
    """Brings one trial to its end.

    Args:
        definition: the study's.
        trial: claimed by this worker.
        folder: of this trial alone.
        publisher: carries it to MLflow.
        plugin_files: local plugin files that the recipe needs.
        stop: becomes true when the worker is told to end.
        lost: becomes true when the trial has become another worker's.
        say: shows progress.
    """

    def __init__(
        self,
        definition: Definition,
        trial: Trial,
        folder: Path,
        publisher: Publisher,
        plugin_files: Sequence[Path],
        stop: Callable[[], bool],
        lost: Callable[[], bool],
        say: Say,
    ) -> None:
        self._definition, self._config, self._trial, self._folder = definition, definition.config, trial, folder
        self._publisher, self._files, self._stop, self._lost, self._say = publisher, plugin_files, stop, lost, say
        self._attempts, self._limits = Attempts(trial), limits_of(self._config)
        self._run_id = self._name = ""
        self._params: dict[str, Any] = {}
        self._trained = 0.0
        self._whole = True
        self._began = time.time()

    def run(self) -> None:
        """Suggests, trains and tells.

        Raises:
            LostError: the trial is another worker's now.
            StoppedError: it is to go on another time.
            UsageError: the study asks for what no training logs.
        """
        settled = self._definition.space.settle(lambda parameter: parameter.suggested(self._trial))
        self._trial.set_user_attr(VALUES, redact_values({path: label(value) for path, value in settled.items()}))
        reach("study.suggested")
        self._params = {path: label(value) for path, value in settled.items()}
        self._say(f"trial {self._trial.number}: {self._shown()}")
        self._name = self._publisher.name_of(self._trial.number)
        self._run_id = self._publisher.trial(self._name, self._trial.number, self._params)
        try:
            recipe = self._definition.recipe_of(settled)
        except RecipeError as error:
            self._tell(_Result(cause=Cause.INVALID, reason=str(error)))
            return
        self._trial.set_user_attr(RECIPE, {**recipe.values(), "name": folder_name(self._name)})
        try:
            result = self._judged(recipe) or self._train(settled)
        except (StoppedError, UsageError):
            self._publisher.interrupt(self._run_id)
            raise
        if self._lost():
            raise self._why_ended()
        reach("study.trained")
        self._tell(result)
        reach("study.told")

    def _judged(self, recipe: Recipe) -> _Result | None:
        """What the gate has against the configuration; asked once a study for stages with the same settings."""
        wanted = self._config.constraints.get(VERIFY)
        if wanted is None:
            return None
        key = verdict_key(recipe, self._params)
        study = self._trial.study
        verdict = study.user_attrs.get(key)
        if verdict is None:
            self._attempts.begin(GATE)
            verdict = redact_values(judge(recipe, self._files, self._limits, self._ended))
            self._attempts.end(GATE)
            if self._ended():
                raise self._why_ended()
            study.set_user_attr(key, verdict)
        self._trial.set_user_attr(VERDICT, verdict)
        refused = [Outcome.FAIL, Outcome.INCONCLUSIVE] if wanted == "pass" else [Outcome.FAIL]
        if verdict["outcome"] in refused:
            return _Result(cause=GATE, reason=f"{verdict['outcome']}: {verdict['summary']}")
        return None

    def _train(self, settled: Mapping[str, Any]) -> _Result:
        """Trains with every seed; what counts is the mean."""
        found: list[dict[str, float]] = []
        excess: list[dict[str, float]] = []
        seeds = self._definition.seeds
        for number, seed in enumerate(seeds, start=1):
            prefix = f"seed_{seed}/" if len(seeds) > 1 else ""
            folder = self._folder / f"seed-{seed}"
            ended = self._train_one(self._definition.recipe_of(settled, seed), folder, prefix)
            if ended.cause != Cause.DONE:
                return _Result(cause=ended.cause, reason=ended.reason)
            logged = logged_by(folder / SPOOL, prefix)
            values = objectives(self._config, logged, self._attempts.intervals(seed))
            missing = [name for name, value in values.items() if value is None]
            if missing:
                goal = self._config.objectives[missing[0]].reach
                return _Result(cause=NOT_REACHED, reason=f"{missing[0]} did not reach {goal:g}")
            endless = [name for name, value in values.items() if value is not None and not math.isfinite(value)]
            if endless:
                return _Result(cause=Cause.DIVERGED, reason=f"{endless[0]} is {values[endless[0]]}")
            found.append({name: value for name, value in values.items() if value is not None})
            excess.append(bounds(self._config, logged))
            if self._config.pruner_kind == "wilcoxon":
                goes_on = self._goes_on(next(iter(found[-1].values())), number)
                if not goes_on and number < len(seeds):  # the last one is trained already
                    return _Result(cause=PRUNED, reason=f"after {number} of {len(seeds)} seeds")
        return _Result(_means(found), _means(excess))

    def _train_one(self, recipe: Recipe, folder: Path, prefix: str) -> Ended:
        """One training, gone on with where it was interrupted by what need not come again."""
        _, goal = recipe.length
        metric = next(iter(self._config.objectives)) if self._config.pruner_kind in ("median", "hyperband") else ""
        self._whole = self._whole and not self._attempts.of(recipe.seed)
        while True:
            if len(self._attempts.of(recipe.seed, KILLED)) > self._config.retries + _MOST_KILLED:
                return Ended(Cause.CRASHED, "its workers were killed with it, again and again")
            training = Training(
                recipe, folder, metric, prefix, self._files, self._limits,
                lambda value, step: self._goes_on(value, step) or step >= goal, self._ended,
            )  # fmt: skip
            begin(folder)
            self._attempts.begin(recipe.seed)
            neighbours = Neighbours()
            ended = Ended(Cause.STOPPED, "the worker ended by an error")
            try:
                with self._publisher.shipping(self._run_id, folder):
                    ended = training.run()
            finally:
                if not self._lost():
                    self._attempts.end(ended.cause)
            if ended.cause == Cause.STOPPED:
                raise self._why_ended()
            if ended.anew:
                self._say(f"trial {self._trial.number}: {ended.reason}; it begins anew")
                forget(folder)
                continue
            self._measure(ended, neighbours)
            failures = self._attempts.of(recipe.seed, *_TRANSIENT)
            if ended.cause not in _TRANSIENT or len(failures) > self._config.retries:
                return ended
            self._say(f"trial {self._trial.number}: {ended.cause}, {ended.reason}; it is tried again")

    def _ended(self) -> bool:
        return self._stop() or self._lost()

    def _why_ended(self) -> RunnerError:
        if self._lost():
            return LostError(f"trial {self._trial.number} is another worker's now")
        return StoppedError(f"trial {self._trial.number} goes on from its checkpoint another time")

    def _goes_on(self, value: float, step: int) -> bool:
        """Reports a value to Optuna, once, and asks whether the trial is worth going on with."""
        known = self._trial.study.get_trials(deepcopy=False)[self._trial.number].intermediate_values
        if step not in known:
            self._trial.report(value, step)
        return not self._trial.should_prune()

    def _measure(self, ended: Ended, neighbours: Neighbours) -> None:
        """Keeps what the training took, and what others took of the processor meanwhile."""
        self._whole = self._whole and ended.training_seconds is not None
        self._trained += ended.training_seconds or 0.0
        if self._config.timed:
            others = neighbours.share(ended.cpu_seconds)
            kept = self._trial.user_attrs.get(NEIGHBOURS, 0.0)
            self._trial.set_user_attr(NEIGHBOURS, round(max(others, kept), 3))
            if others > DISTURBED:
                self._say(f"trial {self._trial.number}: others took {others:.0%} of the processor, so it may be slow")

    def _shown(self) -> str:
        return ", ".join(f"{path.rpartition('.')[2]} {figure(value)}" for path, value in self._params.items())

    def _tell(self, result: _Result) -> None:
        """Tells Optuna and MLflow what the trial has come to."""
        trial, name = self._trial, self._trial.number
        reason = redact(result.reason)
        trial.set_user_attr(CAUSE, str(result.cause))
        trial.set_user_attr(REASON, reason)
        done = result.cause == Cause.DONE
        infeasible = result.cause in _INFEASIBLE
        for constraint, value in {FEASIBLE: float(infeasible), **result.excess}.items():
            if constraint not in trial.study.get_trials(deepcopy=False)[name].constraints:
                trial.set_constraint(constraint, value)
        state = TrialState.COMPLETE if done else TrialState.FAIL
        if infeasible or result.cause == PRUNED:
            state = TrialState.PRUNED
        tags = {"state": state.name, "cause": result.cause, "reason": reason, **result.excess}
        values = [result.values[objective] for objective in self._config.objectives] if done else None
        now = time.time_ns() // 1_000_000
        Told(self._name, trial.number, state.name, self._params, result.values, tags, now).keep(self._folder)
        self._publisher.catch_up(self._folder.parent)
        if self._whole and done:
            trial.set_user_attr(OVERHEAD, round(time.time() - self._began - self._trained, 3))
        trial.study.tell(trial, values, state=state)
        for path in self._folder.glob(f"seed-*/{CHECKPOINTS}"):
            shutil.rmtree(path, ignore_errors=True)
        came = ", ".join(f"{each} {value:.4g}" for each, value in result.values.items())
        self._say(f"trial {name}: {came or f'{result.cause}, {reason}'}")


def _means(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(one[name] for one in each) for name in each[0]}
