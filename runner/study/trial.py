"""One trial: suggested, judged by the gate if that is asked, trained with every seed, and told for what it was."""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from optuna.trial import Trial, TrialState

from runner.engine.loop import CHECKPOINTS
from runner.errors import RunnerError, UsageError
from runner.faults import reach
from runner.hardware import usable_cores
from runner.proof.verdict import Outcome
from runner.recipe import Recipe, RecipeError
from runner.secrets import redact, redact_values
from runner.study.config import VERIFY, Direction
from runner.study.definition import Definition
from runner.study.gate import judge
from runner.study.process import Cause, Ended, Training
from runner.study.publish import Publisher, Told
from runner.study.space import label
from runner.study.store import verdict_key
from runner.study.training import SPOOL
from runner.study.values import Interval, bounds, history, objectives
from runner.tracking.values import folder_name

ATTEMPTS, RECIPE, VALUES, CAUSE, REASON, OVERHEAD = (
    f"runner.{name}" for name in ("attempts", "recipe", "values", "cause", "reason", "overhead_s")
)
"""Attributes of a trial."""
MEASURED, NEIGHBOURS, MEMORY, VERDICT = (
    f"runner.{name}" for name in ("measured", "neighbours", "peak_memory_gib", "verdict")
)
FEASIBLE = "trained"
"""The constraint that tells Optuna of a configuration that cannot be trained to a result."""
DISTURBED = 0.1
"""The share of the processor that others may take before a measurement of speed counts as disturbed."""
GATE, NOT_REACHED = "gate", "not reached"
_INFEASIBLE = {Cause.OUT_OF_MEMORY, Cause.DIVERGED, Cause.TIMEOUT, GATE, NOT_REACHED}
"""They belong to the configuration: it would end like that again."""
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
        self._name = f"{self._trial.study.study_name}-{self._trial.number:04d}"
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
            raise LostError(f"trial {self._trial.number} is another worker's now")
        reach("study.trained")
        self._tell(result)
        reach("study.told")

    def _judged(self, recipe: Recipe) -> _Result | None:
        """What the gate has against the configuration; asked once a study for stages with the same settings."""
        wanted = self._config.constraints.get(VERIFY)
        if wanted is None:
            return None
        key = verdict_key(recipe.values()["optimization"])
        study = self._trial.study
        verdict = study.user_attrs.get(key)
        if verdict is None:
            try:
                verdict = judge(recipe, self._files)
            except RunnerError as error:
                return _Result(cause=Cause.FAILED, reason=f"the gate could not judge it: {error}")
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
        for number, seed in enumerate(self._definition.seeds):
            prefix = f"seed_{seed}/" if len(self._definition.seeds) > 1 else ""
            folder = self._folder / f"seed-{seed}"
            recipe = self._definition.recipe_of(settled, seed)
            ended = self._attempts(recipe, folder, prefix, number)
            if ended.cause != Cause.DONE:
                return _Result(cause=ended.cause, reason=ended.reason)
            logged = history(folder / SPOOL, prefix)
            values = objectives(self._config, logged, self._intervals(seed))
            missing = [name for name, value in values.items() if value is None]
            if missing:
                goal = self._config.objectives[missing[0]].reach
                return _Result(cause=NOT_REACHED, reason=f"{missing[0]} did not reach {goal:g}")
            endless = [name for name, value in values.items() if value is not None and not math.isfinite(value)]
            if endless:
                return _Result(cause=Cause.DIVERGED, reason=f"{endless[0]} is {values[endless[0]]}")
            found.append({name: value for name, value in values.items() if value is not None})
            excess.append(bounds(self._config, logged))
            if self._config.pruner_kind == "wilcoxon" and not self._goes_on(next(iter(found[-1].values())), number):
                return _Result(cause=Cause.PRUNED, reason=f"after {number + 1} of {len(self._definition.seeds)} seeds")
        return _Result(_means(found), _means(excess))

    def _attempts(self, recipe: Recipe, folder: Path, prefix: str, number: int) -> Ended:
        """One training, gone on with where it was interrupted by what need not come again."""
        goal, _ = recipe.goal
        evaluated = self._config.pruner_kind in ("median", "hyperband")
        name, objective = next(iter(self._config.objectives.items()))
        failures = sum(1 for each in self._kept() if each["seed"] == recipe.seed and each.get("failed"))
        if failures or any(each["seed"] == recipe.seed for each in self._kept()):
            self._whole = False  # the time of the earlier attempt is not known to the second
        while True:
            training = Training(
                recipe, folder, name if evaluated else "", prefix, self._files, self._config.limits,
                lambda value, step: self._goes_on(value, number * (goal + 1) + step, objective.direction),
                lambda: self._stop() or self._lost(),
            )  # fmt: skip
            self._note(begin=time.time(), seed=recipe.seed)
            busy, began = _busy(), time.time()
            with self._publisher.shipping(self._run_id, folder):
                ended = training.run()
            self._note(end=time.time(), seed=recipe.seed, failed=ended.cause.transient, cause=ended.cause)
            self._measure(ended, _busy() - busy, time.time() - began)
            if self._lost():
                raise LostError(f"trial {self._trial.number} is another worker's now")
            if ended.cause == Cause.STOPPED:
                raise StoppedError(f"trial {self._trial.number} goes on from its checkpoint another time")
            failures += ended.cause.transient
            if not ended.cause.transient or failures > self._config.retries:
                return ended
            self._whole = False
            self._say(f"trial {self._trial.number}: {ended.cause}, {ended.reason}; it is tried again")

    def _goes_on(self, value: float, step: int, direction: Direction | None = None) -> bool:
        """Reports a value to Optuna, once, and asks whether the trial is worth going on with."""
        known = self._trial.study.get_trials(deepcopy=False)[self._trial.number].intermediate_values
        if step not in known:
            self._trial.report(value, step)
        return not self._trial.should_prune()

    def _measure(self, ended: Ended, busy: float, seconds: float) -> None:
        """Keeps what the training took, and what others took of the processor meanwhile."""
        if ended.training_seconds is None:
            self._whole = False
        else:
            self._trained += ended.training_seconds
        kept = self._trial.user_attrs
        self._trial.set_user_attr(MEMORY, max(round(ended.peak_memory / 2**30, 3), kept.get(MEMORY, 0.0)))
        if self._config.timed:
            others = max(0.0, busy - ended.cpu_seconds) / max(1e-9, seconds * usable_cores())
            self._trial.set_user_attr(NEIGHBOURS, round(max(others, kept.get(NEIGHBOURS, 0.0)), 3))
            if others > DISTURBED:
                self._say(f"trial {self._trial.number}: others took {others:.0%} of the processor, so it may be slow")

    def _shown(self) -> str:
        return ", ".join(f"{path.rpartition('.')[2]} {_figure(value)}" for path, value in self._params.items())

    def _kept(self) -> list[dict[str, Any]]:
        return list(self._trial.user_attrs.get(ATTEMPTS, []))

    def _intervals(self, seed: int) -> list[Interval]:
        return [(each["begin"], each["end"]) for each in self._kept() if each["seed"] == seed and "end" in each]

    def _note(self, **what: Any) -> None:
        """Begins an attempt, or adds to the last one."""
        attempts = self._kept()
        if "begin" in what:
            attempts.append(what)
        else:
            attempts[-1] = {**attempts[-1], **what}
        self._trial.set_user_attr(ATTEMPTS, attempts)

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
        if infeasible or result.cause == Cause.PRUNED:
            state = TrialState.PRUNED
        tags = {"state": state.name, "cause": result.cause, "reason": reason, **result.excess}
        values = [result.values[objective] for objective in self._config.objectives] if done else None
        now = time.time_ns() // 1_000_000
        Told(self._name, trial.number, state.name, self._params, result.values, tags, now).keep(self._folder)
        self._publisher.catch_up(self._folder.parent)
        if self._whole and done:
            trial.set_user_attr(OVERHEAD, round(time.time() - self._began - self._trained, 3))
        with suppress(ValueError):  # another worker has told it: what it says is the same
            trial.study.tell(trial, values, state=state)
        for path in self._folder.glob(f"seed-*/{CHECKPOINTS}"):
            shutil.rmtree(path, ignore_errors=True)
        came = ", ".join(f"{each} {value:.4g}" for each, value in result.values.items())
        self._say(f"trial {name}: {came or f'{result.cause}, {reason}'}")


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _means(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(one[name] for one in each) for name in each[0]}


def _busy() -> float:
    """Seconds that this machine's processors have worked."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))

