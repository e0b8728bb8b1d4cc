"""Runs one trial of a study: suggestion, verdict of the gate, trainings, and result."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, Protocol

import psutil
from optuna.trial import Trial, TrialState

from runner.child.spawn import Cause
from runner.recipe.joined_results import Computation, accepted_drift
from runner.recipe.loader import assignments
from runner.recipe.recipe import Recipe
from runner.recipe.yaml_nodes import RecipeError
from runner.study import summary
from runner.study.attempts import CLOCK_CHANGED, KILLED, Attempts, neighbours
from runner.study.config import VERIFY, label
from runner.study.definition import Definition
from runner.study.logged_values import Logged, bounded_values, excesses, logged_by, objectives
from runner.study.publish import Publisher
from runner.study.space import spelled
from runner.study.store import data_attribute, title_of, verdict_key
from runner.study.training import PRUNED, TrainingOutcome, judge, limits_of, train
from runner.system.errors import RunnerError, UsageError
from runner.system.faults import reach
from runner.system.files import remove_quietly
from runner.system.secrets import redact, redact_values
from runner.system.text_lines import figures
from runner.tracking.workspace import SPOOL, folder_name
from runner.training.budget import fitted
from runner.training.checkpoint import CHECKPOINTS, checkpoints
from runner.training.signals import Stop

# The constraint that marks configurations without a result.
FEASIBLE = "trained"
_GATE = "gate"
_NOT_REACHED = "not reached"
# The configuration is not to blame.
_NOT_MEASURED = "not measured"
# These belong to the configuration, which would end like that again:
_INFEASIBLE = (
    Cause.OUT_OF_MEMORY,
    Cause.DIVERGED,
    Cause.TIMEOUT,
    Cause.INVALID,
    _GATE,
    _NOT_REACHED,
)
_STATES = dict.fromkeys((*_INFEASIBLE, PRUNED), TrialState.PRUNED) | {str(Cause.DONE): TrialState.COMPLETE}
# The same training might end well another time.
_TRANSIENT = (Cause.CRASHED, Cause.HUNG)
# Attempts beyond the retries that may end with their worker before the training is taken to be the reason.
_MOST_KILLED = 8


class StudyDisplay(Protocol):
    """Display of the progress of a study."""

    def say(self, text: str) -> None:
        """Prints a line that stays."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Entered around what takes a while."""

    def standing(self, trials: int, seconds: float, best: Mapping[str, float]) -> None:
        """Called with the finished trials, the used seconds, and the best values so far."""

    def trial(self, number: int, doing: str, figures: str = "") -> None:
        """Called with phase and progress of a trial; empty when this worker has left it."""


class TrialStoppedError(RunnerError):
    """The worker was stopped, or was silent for too long and lost its trial."""


@dataclass(frozen=True)
class WorkerContext:
    """State that the trials of one worker share."""

    definition: Definition
    publisher: Publisher
    plugin_files: Sequence[Path]
    stop: Stop
    display: StudyDisplay
    trials_folder: Path
    computation: Computation
    allow_drift: bool


class TrialRun:
    """Performs one trial: suggestion, verdict of the gate, trainings, and result.

    Args:
        context: State that the trials of the worker share.
        trial: The unfinished trial, in state RUNNING.
        last_seen: When its previous worker was last seen, in seconds since 1970; 0 if there was none.
        lost: Set as soon as the trial belongs to another worker.
    """

    def __init__(
        self,
        context: WorkerContext,
        trial: Trial,
        last_seen: float,
        lost: Event,
    ) -> None:
        self._definition = context.definition
        self._config = context.definition.config
        self._publisher = context.publisher
        self._plugin_files = context.plugin_files
        self._computation = context.computation
        self._allow_drift = context.allow_drift
        self._stop = context.stop
        self._display = context.display
        self._folder = context.trials_folder / f"{trial.number:04d}"

        self._trial = trial
        self._lost = lost
        self._attempts = Attempts(trial, last_seen, lost)
        self._limits = limits_of(self._config)
        self._run_id = ""
        self._params: dict[str, Any] = {}  # searched settings
        self._settings: dict[str, Any] = {}  # all of them, once the recipe is put together
        self._overrides = ""
        self._trained_seconds = 0.0
        self._start = time.time()

    def run(self) -> None:
        """Performs the trial; raises a ``TrialStoppedError`` if it is continued elsewhere or later."""
        settled = self._definition.space.settle(lambda parameter: parameter.suggested(self._trial))
        self._params = {path: label(value) for path, value in settled.items()}
        self._overrides = ", ".join(assignments(settled))
        self._trial.set_user_attr(summary.VALUES, redact_values(self._params))
        reach("study.suggested")
        self._say(", ".join(f"{path.rpartition('.')[2]} {spelled(value)}" for path, value in self._params.items()))
        try:
            recipe = self._recipe(settled)
        except RecipeError as error:
            self._finish(TrainingOutcome(Cause.INVALID, str(error)))
            return

        self._settings = recipe.printable()
        self._run_id = self._publisher.trial(self._trial.number, self._settings, {"overrides": self._overrides})
        name = folder_name(self._publisher.name_of(self._trial.number))
        self._trial.set_user_attr(summary.RECIPE, {**self._settings, "name": name})
        try:
            outcome = self._rejection(recipe) or self._train(settled)
            if self._lost.is_set():
                raise self._stopped_error()
        except (TrialStoppedError, UsageError):
            # The run in MLflow of a lost trial belongs to its new worker.
            if not self._lost.is_set():
                self._publisher.interrupt(self._run_id)
            raise
        reach("study.trained")
        self._finish(outcome)
        reach("study.told")

    def _recipe(self, settled: Mapping[str, Any], seed: int | None = None) -> Recipe:
        """Returns the recipe of a training, with the stages that its memory budget needs.

        Raises:
            RecipeError: The settings do not fit together, or the plan exceeds the budget.
        """
        recipe = self._definition.recipe_of(settled, seed)
        return fitted(recipe, self._definition.catalog, self._say)

    def _rejection(self, recipe: Recipe) -> TrainingOutcome | None:
        """Returns the gate's objection; it judges the same stage settings once per study."""
        constraint = self._config.constraints.get(VERIFY)
        if constraint is None:
            return None

        study = self._trial.study
        key = verdict_key(recipe, self._params)
        verdict = study.user_attrs.get(key)
        if verdict is None:
            verdict = self._judge(recipe)
            study.set_user_attr(key, verdict)
        self._trial.set_user_attr(summary.VERDICT, verdict)

        rejected = ("FAIL", "INCONCLUSIVE") if constraint == "pass" else ("FAIL",)
        if verdict["outcome"] in rejected:
            return TrainingOutcome(_GATE, f"{verdict['outcome']}: {verdict['summary']}")
        return None

    def _judge(self, recipe: Recipe) -> dict[str, Any]:
        self._show("waiting for the gate")
        with self._attempts.at(_GATE) as attempt:
            verdict = redact_values(judge(recipe, self._plugin_files, self._limits, self._must_stop))
            attempt["cause"] = _GATE
        # The verdict of a gate that was interrupted is worth nothing.
        if self._must_stop():
            raise self._stopped_error()
        return dict(verdict)

    def _train(self, settled: Mapping[str, Any]) -> TrainingOutcome:
        """Trains with every seed; the mean counts."""
        objectives_by_seed: list[dict[str, float]] = []
        bounded_by_seed: list[dict[str, float]] = []
        seeds = self._definition.seeds
        for number, seed in enumerate(seeds, start=1):
            prefix = f"seed_{seed}/" if len(seeds) > 1 else ""
            folder = self._folder / f"seed-{seed}"
            outcome = self._train_seed(self._recipe(settled, seed), folder, prefix)
            if outcome.cause != Cause.DONE:
                return outcome
            metrics = [*self._config.objectives, *self._config.constraints]
            logged = logged_by(folder / SPOOL, prefix, metrics)
            outcome = self._evaluate_seed(seed, logged)
            if outcome.cause != Cause.DONE:
                return outcome
            objectives_by_seed.append(dict(outcome.objectives))
            bounded_by_seed.append(bounded_values(self._config, logged))

            if self._config.pruner_kind == "wilcoxon":
                first_objective = next(iter(outcome.objectives.values()))
                is_hopeless = not self._should_continue(first_objective, number)
                # After the last seed nothing is left to save.
                if is_hopeless and number < len(seeds):
                    return TrainingOutcome(PRUNED, f"after {number} of {len(seeds)} seeds")

        return TrainingOutcome(
            objectives=_mean_by_name(objectives_by_seed),
            violations=excesses(self._config, _mean_by_name(bounded_by_seed)),
        )

    def _evaluate_seed(self, seed: int, logged: Logged) -> TrainingOutcome:
        """Returns the objectives of a complete training, or why it does not count."""
        attempts = self._attempts.of(seed)
        intervals = [(attempt["begin"], attempt["end"]) for attempt in attempts if "end" in attempt]
        if self._config.times and any(CLOCK_CHANGED in attempt for attempt in attempts):
            names = ", ".join(self._config.times)
            return TrainingOutcome(_NOT_MEASURED, f"{names}: the clock was set, or the machine slept, meanwhile")
        values: dict[str, float] = {}
        for name, value in objectives(self._config, logged, intervals).items():
            if value is None:
                goal = self._config.objectives[name].reach
                return TrainingOutcome(_NOT_REACHED, f"{name} did not reach {goal:g}")
            if not math.isfinite(value):
                return TrainingOutcome(Cause.DIVERGED, f"{name} is {value}")
            values[name] = value
        return TrainingOutcome(objectives=values)

    def _train_seed(self, recipe: Recipe, folder: Path, prefix: str) -> TrainingOutcome:
        """Performs one training, which continues after interruptions that may not be repeated."""
        seed = recipe.seed
        retries = self._config.retries
        prunes_by_step = self._config.pruner_kind in ("median", "hyperband")
        metric = next(iter(self._config.objectives)) if prunes_by_step else ""
        goal = recipe.length[1]
        must_restart = False
        if prunes_by_step and self._attempts.of(seed) and self._was_hopeless(goal):
            return TrainingOutcome(PRUNED)

        def is_worth_continuing(value: float, step: int) -> bool:
            # Optuna learns of the last value, too; but a complete training is not pruned.
            return self._should_continue(value, step) or step >= goal

        while len(self._attempts.of(seed, KILLED)) <= retries + _MOST_KILLED:
            if must_restart or not checkpoints(folder / CHECKPOINTS):
                remove_quietly(folder)
            self._refuse_edits()
            self._show("starting", self._seed_label(seed).rstrip(", "))
            # Starts the measurement of the load by others, which ends with the training.
            psutil.cpu_percent(percpu=True)
            with self._attempts.at(seed) as attempt, self._publisher.shipping(self._run_id, folder):
                outcome = train(
                    recipe,
                    folder,
                    self._plugin_files,
                    self._limits,
                    should_stop=lambda _step: self._must_stop(),
                    should_continue=is_worth_continuing,
                    metric=metric,
                    metric_prefix=prefix,
                    on_progress=lambda step, metrics: self._show_progress(recipe, step, metrics),
                    on_data=lambda fingerprint: self._compare_data(recipe, fingerprint),
                )
                attempt["cause"] = outcome.cause

            if outcome.cause == Cause.STOPPED:
                raise self._stopped_error()
            must_restart = outcome.must_restart
            if must_restart:
                self._say(f"{outcome.reason}; it starts again")
                continue
            self._trained_seconds += outcome.training_seconds or 0.0
            if self._config.timed:
                self._note_neighbours(outcome)
            if outcome.cause not in _TRANSIENT or len(self._attempts.of(seed, *_TRANSIENT)) > retries:
                return outcome
            self._say(f"{outcome.cause}, {outcome.reason}; it is tried again")
        return TrainingOutcome(Cause.CRASHED, "its workers were killed with it, again and again")

    def _refuse_edits(self) -> None:
        """Raises a UsageError if a file was edited since this worker started.

        Trials before and after that are different experiments.
        """
        present = self._definition.computation()
        accepted_drift(title_of(self._config.name), self._computation, present, is_allowed=False)

    def _compare_data(self, recipe: Recipe, fingerprint: str | None) -> None:
        """Stores the fingerprint of the data, or raises a UsageError if other trials have read other data."""
        study = self._trial.study
        attribute = data_attribute(recipe)
        stored = study.user_attrs.get(attribute)
        if stored == fingerprint:
            return
        if stored is not None:
            self._say("drift: the data have changed since the study started")
            if not self._allow_drift:
                raise UsageError(
                    f"the data have changed since {title_of(self._config.name)} started; "
                    "restore them, or accept that with --allow-drift"
                )
        study.set_user_attr(attribute, fingerprint)

    def _note_neighbours(self, outcome: TrainingOutcome) -> None:
        """Stores the greatest load by other programs during a measurement of speed."""
        load = neighbours(outcome.cpu_seconds, outcome.seconds)
        greatest_load = max(load, self._trial.user_attrs.get(summary.NEIGHBOURS, 0.0))
        self._trial.set_user_attr(summary.NEIGHBOURS, round(greatest_load, 3))
        if load > summary.DISTURBED:
            self._say(f"others took {load:.0%} of the processor, so it may be slow")

    def _say(self, text: str) -> None:
        self._display.say(f"trial {self._trial.number}: {text}")

    def _show(self, doing: str, figures: str = "") -> None:
        self._display.trial(self._trial.number, doing, figures)

    def _show_progress(self, recipe: Recipe, step: int, metrics: Mapping[str, float]) -> None:
        unit, goal = recipe.length
        progress = f"{self._seed_label(recipe.seed)}{step:,}/{goal:,} {unit} ({step / goal:.0%})"
        values = figures({name: metrics[name] for name in self._config.objectives if name in metrics})
        self._show("training", f"{progress}, {values}" if values else progress)

    def _seed_label(self, seed: int) -> str:
        return f"seed {seed}, " if len(self._definition.seeds) > 1 else ""

    def _must_stop(self) -> bool:
        return bool(self._stop) or self._lost.is_set()

    def _stopped_error(self) -> RunnerError:
        reason = "belongs to another worker now" if self._lost.is_set() else "will continue from its checkpoint"
        return TrialStoppedError(f"trial {self._trial.number} {reason}")

    def _should_continue(self, value: float, step: int) -> bool:
        """Reports a value to Optuna, once, and returns whether the trial should continue."""
        stored_trial = self._trial.study.get_trials(deepcopy=False)[self._trial.number]
        # A resumed training repeats the steps after its checkpoint, and Optuna warns of a second value.
        if step not in stored_trial.intermediate_values:
            self._trial.report(value, step)
        is_hopeless = self._trial.should_prune()
        reach("study.judged")
        return not is_hopeless

    def _was_hopeless(self, goal: int) -> bool:
        """Returns whether the trial is pruned by what its previous worker reported last."""
        reported_steps = self._trial.study.get_trials(deepcopy=False)[self._trial.number].intermediate_values
        # A complete training is not pruned.
        return max(reported_steps, default=goal) < goal and self._trial.should_prune()

    def _finish(self, outcome: TrainingOutcome) -> None:
        """Writes the result of the trial to Optuna and MLflow."""
        trial = self._trial
        reason = redact(outcome.reason)
        state = _STATES.get(outcome.cause, TrialState.FAIL)
        trial.set_user_attr(summary.CAUSE, str(outcome.cause))
        trial.set_user_attr(summary.REASON, reason)
        constraints = {FEASIBLE: float(outcome.cause in _INFEASIBLE), **outcome.violations}
        for constraint, value in constraints.items():
            if constraint not in trial.constraints:
                trial.set_constraint(constraint, value)

        tags = {
            "overrides": self._overrides,
            "state": state.name,
            "cause": outcome.cause,
            "reason": reason,
            **outcome.violations,
        }
        self._publisher.tell(self._folder, self._settings or self._params, outcome.objectives, tags)

        # With several attempts, the time of the killed ones is unknown.
        seeds = self._definition.seeds
        if outcome.objectives and all(len(self._attempts.of(seed)) == 1 for seed in seeds):
            overhead = time.time() - self._start - self._trained_seconds
            trial.set_user_attr(summary.OVERHEAD, round(overhead, 3))
        values = None
        if outcome.objectives:
            values = [outcome.objectives[name] for name in self._config.objectives]
        trial.study.tell(trial, values, state=state)
        for path in self._folder.glob(f"seed-*/{CHECKPOINTS}"):
            remove_quietly(path)
        self._say(figures(outcome.objectives) or ", ".join(filter(None, [outcome.cause, reason])))


def _mean_by_name(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of every value over mappings with the same names; NaN of opposite infinities."""
    means = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        means[name] = math.nan if {math.inf, -math.inf} <= set(values) else statistics.fmean(values)
    return means
