"""A worker takes trials from the study's queue to their end, one after the other, until the budget is spent."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any, Literal, Protocol

import psutil
from filelock import FileLock, Timeout
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState

from runner.child.spawn import Cause
from runner.recipe.document import RecipeError
from runner.recipe.loader import assignments
from runner.recipe.recipe import Recipe
from runner.study import summary as kept
from runner.study.config import VERIFY, label, spelled
from runner.study.definition import Definition
from runner.study.publish import Publisher
from runner.study.record import study_record
from runner.study.report import write_report
from runner.study.store import BEAT_SECONDS, DEAD_SECONDS, Leases, StudyStore, verdict_key
from runner.study.training import PRUNED, Ended, judge, limits_of, train
from runner.system.errors import RunnerError, UsageError
from runner.system.faults import reach
from runner.system.files import make_folder, remove_quietly
from runner.system.lines import figures
from runner.system.secrets import redact, redact_values
from runner.tracking.periodic import Periodic
from runner.tracking.record import Status
from runner.tracking.store import Store
from runner.tracking.workspace import SPOOL, RunFolder, Workspace, folder_name
from runner.train.budget import fitted
from runner.train.checkpoint import CHECKPOINTS, checkpoints
from runner.train.signals import Stop

FEASIBLE = "trained"  # the constraint that marks configurations without a result
BEGINNING, REPORTING = -2, -3  # the leases for creating the study, and for writing its report
_GATE, _NOT_REACHED = "gate", "not reached"
# These belong to the configuration, which would end like that again:
_INFEASIBLE = (Cause.OUT_OF_MEMORY, Cause.DIVERGED, Cause.TIMEOUT, Cause.INVALID, _GATE, _NOT_REACHED)
_STATES = dict.fromkeys((*_INFEASIBLE, PRUNED), TrialState.PRUNED) | {str(Cause.DONE): TrialState.COMPLETE}
_TRANSIENT = (Cause.CRASHED, Cause.HUNG)  # the same training might end well another time
_MOST_KILLED = 8  # attempts beyond the retries that may end with their worker before the training is taken to be why
_SHARED = Path("/var/tmp" if os.path.isdir("/var/tmp") else tempfile.gettempdir())  # noqa: S108 (a lock, not data)
_WAIT_SECONDS = 1.0  # between two looks whether a trial of another worker has become free


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


def work(definition: Definition, here: Workspace, files: Sequence[Path], stop: Stop, display: StudyDisplay) -> str:
    """Works on a study, writes its report, and returns why it ended before all trials, or "".

    Raises:
        StorageError: The study's storage or MLflow cannot be reached.
        UsageError: The study was created with another definition, or no training logs a metric.
    """
    with StudyStore.session(here) as store:
        with display.phase("opening the study"):
            worker = _Worker(definition, here, store, files, stop, display)
        try:
            with display.phase("looking for a trial"):
                ended = worker.run()
        except RunnerError:
            worker.conclude()
            raise
        worker.conclude()
        return ended


class _Worker:
    """Works on one study; raises what ``work`` does."""

    def __init__(
        self, definition: Definition, here: Workspace, store: StudyStore, files: Sequence[Path], stop: Stop,
        display: StudyDisplay,
    ) -> None:  # fmt: skip
        config = definition.config
        self.definition, self.files, self.stop, self.display = definition, files, stop, display
        self.folder = here.studies / config.name
        self.here = here
        make_folder(self.folder)
        tracking = Store(here)
        self._store, self._leases = store, Leases(store.engine, config.name)
        with self._leases.waiting(BEGINNING):
            self.study = store.create(definition)
            self.publisher = Publisher(tracking, self.study, definition)
        store.top_up(self.study, definition, self._leases)
        self.publisher.catch_up(self.folder / "trials")
        self.note("RUNNING")
        # Trials that are timed wait for each other on one machine, whatever study they belong to.
        self._alone = FileLock(_SHARED / f"runner-timing-{os.getuid()}.lock") if config.timed else None

    def run(self) -> str:
        """Works until all trials are finished; returns the reason of an earlier end."""
        while not self.stop:
            with self._turn() as mine:
                ended, took = self._look_for_one() if mine else (None, False)
            if ended is not None:
                return ended
            if not took:
                time.sleep(_WAIT_SECONDS)
        return "stopped by a signal"

    def conclude(self) -> None:
        """Writes the present report, and sends it to MLflow."""
        with self.display.phase("writing the report"), self._leases.waiting(REPORTING):
            summary = kept.summarise(self.study, dashboard=self._store.dashboard)
            files = write_report(summary, self.folder)
            status: Status = "KILLED" if self.stop else "FINISHED"
            self.publisher.end(status, summary, files)
            self.note(status)

    def note(self, status: Literal["RUNNING"] | Status) -> None:
        """Updates the display of the study, and its record unless the disk refuses."""
        record = study_record(self.folder.name, self.definition, self.study, self.here, status)
        self.display.standing(record.step, record.seconds, record.metrics)
        with suppress(OSError):
            RunFolder(self.folder).write(record)

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Waits until no other local worker measures a trial; yields False if stopped before."""
        if self._alone is not None:
            with suppress(Timeout):
                self._alone.acquire(blocking=False)
            if not self._alone.is_locked:
                self.display.say("another worker of this machine measures; trials that are timed take turns")
            while not self._alone.is_locked and not self.stop:
                with suppress(Timeout):
                    self._alone.acquire(timeout=_WAIT_SECONDS)
        try:
            yield not self.stop
        finally:
            if self._alone is not None:
                self._alone.release()

    def _look_for_one(self) -> tuple[str | None, bool]:
        """Takes a trial to its end, if one is free: why nothing is left to do, None if there is; whether one was."""
        budget, leases = self.definition.config.budget, self._leases.all()
        trials = self.study.get_trials(deepcopy=False)
        unfinished = [trial for trial in trials[: budget.trials] if not trial.state.is_finished()]
        if not unfinished:
            return "", False
        used, spent = kept.Used.by(trials, leases), ""
        if used.seconds >= (budget.seconds or math.inf):
            spent = f"{budget.seconds:g} s of trials"
        elif used.device_seconds >= (budget.device_seconds or math.inf):
            spent = f"{budget.device_seconds:g} s on devices"
        # Started trials come first: the budget may end them, and suggestions need their results.
        if spent or None in [self._leases.alive(lease) for lease in leases if lease.trial >= 0]:
            unfinished = [trial for trial in unfinished if trial.state == TrialState.RUNNING]
        took = any(map(self._take, unfinished))
        return (f"the budget of {spent} is spent" if spent and not took else None), took

    def _take(self, waiting: FrozenTrial) -> bool:
        """Brings a trial to its end if it is free; whether it was."""
        number = waiting.number
        before = self._leases.holder(number)
        if not self._leases.claim(number):
            return False
        reach("study.claimed")
        lost, heard = Event(), time.monotonic()

        def beat() -> None:
            nonlocal heard
            late = time.monotonic() - heard > DEAD_SECONDS / 2  # others may take this one for dead soon
            if late or not self._leases.beat(number):
                lost.set()
            heard = time.monotonic()

        beating = Periodic("lease", BEAT_SECONDS, beat)
        try:
            if not self.study.get_trials(deepcopy=False)[number].state.is_finished():
                trial = self._store.trial(self.study, number)
                reach("study.begun")
                if before is not None:
                    self.display.say(f"trial {number} continues: its worker, process {before.pid}, is gone")
                _TrialRun(self, trial, 0.0 if before is None else before.seen, lost).run()
        except _StoppedError as error:
            self.display.say(str(error))
        except UpdateFinishedTrialError:
            self.display.say(f"trial {number} was ended by another worker")
        finally:
            beating.stop()
            self.display.trial(number, "")
            self._leases.release(number)
        self.note("RUNNING")
        return True


class _StoppedError(RunnerError):
    """The worker was stopped, or was silent for too long and lost its trial."""


class _TrialRun:
    """Performs one trial: suggestion, verdict of the gate, trainings, and result."""

    def __init__(self, worker: _Worker, trial: Trial, seen: float, lost: Event) -> None:
        self._worker, self._definition, self._trial, self._lost = worker, worker.definition, trial, lost
        self._config, self._publisher = self._definition.config, worker.publisher
        self._folder = worker.folder / "trials" / f"{trial.number:04d}"
        self._attempts, self._limits = kept.Attempts(trial, seen, lost), limits_of(self._config)
        self._run_id = ""
        self._params: dict[str, Any] = {}  # searched settings
        self._settings: dict[str, Any] = {}  # all of them, once the recipe is put together
        self._overrides = ""
        self._trained, self._began = 0.0, time.time()

    def run(self) -> None:
        """Performs the trial; raises a ``_StoppedError`` if it is continued elsewhere or later."""
        settled = self._definition.space.settle(lambda parameter: parameter.suggested(self._trial))
        self._params = {path: label(value) for path, value in settled.items()}
        self._overrides = ", ".join(assignments(settled))
        self._trial.set_user_attr(kept.VALUES, redact_values(self._params))
        reach("study.suggested")
        self._say(", ".join(f"{path.rpartition('.')[2]} {spelled(value)}" for path, value in self._params.items()))
        try:
            recipe = self._recipe(settled)
        except RecipeError as error:
            self._tell(Ended(Cause.INVALID, str(error)))
            return
        self._settings = recipe.printable()
        self._run_id = self._publisher.trial(self._trial.number, self._settings, {"overrides": self._overrides})
        name = folder_name(self._publisher.name_of(self._trial.number))
        self._trial.set_user_attr(kept.RECIPE, {**self._settings, "name": name})
        try:
            ended = self._judged(recipe) or self._train(settled)
            if self._lost.is_set():
                raise self._why_ended()
        except (_StoppedError, UsageError):
            if not self._lost.is_set():
                self._publisher.interrupt(self._run_id)
            raise
        reach("study.trained")
        self._tell(ended)
        reach("study.told")

    def _recipe(self, settled: Mapping[str, Any], seed: int | None = None) -> Recipe:
        """Returns the recipe of a training, with the stages that its memory budget needs.

        Raises:
            RecipeError: The settings do not fit together, or the plan exceeds the budget.
        """
        recipe = self._definition.recipe_of(settled, seed)
        return fitted(recipe, self._definition.catalog, self._say)

    def _judged(self, recipe: Recipe) -> Ended | None:
        """Returns the gate's objection; it judges the same stage settings once per study."""
        wanted = self._config.constraints.get(VERIFY)
        if wanted is None:
            return None
        key, study = verdict_key(recipe, self._params), self._trial.study
        verdict = study.user_attrs.get(key)
        if verdict is None:
            self._show("waiting for the gate")
            with self._attempts.at(_GATE) as attempt:
                verdict = redact_values(judge(recipe, self._worker.files, self._limits, self._is_told_to_end))
                attempt["cause"] = _GATE
            if self._is_told_to_end():
                raise self._why_ended()
            study.set_user_attr(key, verdict)
        self._trial.set_user_attr(kept.VERDICT, verdict)
        if verdict["outcome"] in (("FAIL", "INCONCLUSIVE") if wanted == "pass" else ("FAIL",)):
            return Ended(_GATE, f"{verdict['outcome']}: {verdict['summary']}")
        return None

    def _train(self, settled: Mapping[str, Any]) -> Ended:
        """Trains with every seed; what counts is the mean."""
        found, excess = list[dict[str, float]](), list[dict[str, float]]()
        seeds = self._definition.seeds
        for number, seed in enumerate(seeds, start=1):
            prefix = f"seed_{seed}/" if len(seeds) > 1 else ""
            folder = self._folder / f"seed-{seed}"
            ended = self._train_one(self._recipe(settled, seed), folder, prefix)
            if ended.cause != Cause.DONE:
                return ended
            logged = kept.logged_by(folder / SPOOL, prefix)
            active = [(each["begin"], each["end"]) for each in self._attempts.of(seed) if "end" in each]
            values = dict[str, float]()
            for name, value in kept.objectives(self._config, logged, active).items():
                if value is None:
                    return Ended(_NOT_REACHED, f"{name} did not reach {self._config.objectives[name].reach:g}")
                if not math.isfinite(value):
                    return Ended(Cause.DIVERGED, f"{name} is {value}")
                values[name] = value
            found.append(values)
            excess.append(kept.bounds(self._config, logged))
            hopeless = self._config.pruner_kind == "wilcoxon" and not self._goes_on(next(iter(values.values())), number)
            if hopeless and number < len(seeds):  # the last one is trained already
                return Ended(PRUNED, f"after {number} of {len(seeds)} seeds")
        means = [{name: statistics.fmean(one[name] for one in each) for name in each[0]} for each in (found, excess)]
        return Ended(values=means[0], excess=means[1])

    def _train_one(self, recipe: Recipe, folder: Path, prefix: str) -> Ended:
        """Performs one training, which continues after interruptions that may not be repeated."""
        (unit, goal), retries, seed = recipe.length, self._config.retries, recipe.seed
        metric = next(iter(self._config.objectives)) if self._config.pruner_kind in ("median", "hyperband") else ""
        own = f"seed {seed}, " if len(self._definition.seeds) > 1 else ""
        anew = False

        def advance(step: int, metrics: Mapping[str, float]) -> None:
            values = figures({name: metrics[name] for name in self._config.objectives if name in metrics})
            done = f"{own}{step:,}/{goal:,} {unit} ({step / goal:.0%})"
            self._show("training", f"{done}, {values}" if values else done)

        while len(self._attempts.of(seed, kept.KILLED)) <= retries + _MOST_KILLED:
            if anew or not checkpoints(folder / CHECKPOINTS):
                remove_quietly(folder)
            self._show("starting", own.rstrip(", "))
            psutil.cpu_percent(percpu=True)  # of others, from here on
            with self._attempts.at(seed) as attempt, self._publisher.shipping(self._run_id, folder):
                ended = train(
                    recipe, folder, self._worker.files, self._limits, lambda _step: self._is_told_to_end(),
                    lambda value, step: self._goes_on(value, step) or step >= goal, metric, prefix, advance,
                )  # fmt: skip
                attempt["cause"] = ended.cause
            if ended.cause == Cause.STOPPED:
                raise self._why_ended()
            anew = ended.anew
            if anew:
                self._say(f"{ended.reason}; it starts again")
                continue
            self._trained += ended.training_seconds or 0.0
            if self._config.timed:
                others = kept.neighbours(ended.cpu_seconds, ended.seconds)
                most = max(others, self._trial.user_attrs.get(kept.NEIGHBOURS, 0.0))
                self._trial.set_user_attr(kept.NEIGHBOURS, round(most, 3))
                if others > kept.DISTURBED:
                    self._say(f"others took {others:.0%} of the processor, so it may be slow")
            if ended.cause not in _TRANSIENT or len(self._attempts.of(seed, *_TRANSIENT)) > retries:
                return ended
            self._say(f"{ended.cause}, {ended.reason}; it is tried again")
        return Ended(Cause.CRASHED, "its workers were killed with it, again and again")

    def _say(self, text: str) -> None:
        self._worker.display.say(f"trial {self._trial.number}: {text}")

    def _show(self, doing: str, figures: str = "") -> None:
        self._worker.display.trial(self._trial.number, doing, figures)

    def _is_told_to_end(self) -> bool:
        return bool(self._worker.stop) or self._lost.is_set()

    def _why_ended(self) -> RunnerError:
        why = "belongs to another worker now" if self._lost.is_set() else "will continue from its checkpoint"
        return _StoppedError(f"trial {self._trial.number} {why}")

    def _goes_on(self, value: float, step: int) -> bool:
        """Reports a value to Optuna, once, and returns whether the trial should continue."""
        if step not in self._trial.study.get_trials(deepcopy=False)[self._trial.number].intermediate_values:
            self._trial.report(value, step)
        return not self._trial.should_prune()

    def _tell(self, ended: Ended) -> None:
        """Writes the result of the trial to Optuna and MLflow."""
        trial, reason, state = self._trial, redact(ended.reason), _STATES.get(ended.cause, TrialState.FAIL)
        trial.set_user_attr(kept.CAUSE, str(ended.cause))
        trial.set_user_attr(kept.REASON, reason)
        for constraint, value in {FEASIBLE: float(ended.cause in _INFEASIBLE), **ended.excess}.items():
            if constraint not in trial.constraints:
                trial.set_constraint(constraint, value)
        said = {"overrides": self._overrides, "state": state.name, "cause": ended.cause, "reason": reason}
        self._publisher.tell(self._folder, self._settings or self._params, ended.values, {**said, **ended.excess})
        if ended.values and all(len(self._attempts.of(seed)) == 1 for seed in self._definition.seeds):
            trial.set_user_attr(kept.OVERHEAD, round(time.time() - self._began - self._trained, 3))
        values = [ended.values[each] for each in self._config.objectives] if ended.values else None
        trial.study.tell(trial, values, state=state)
        for path in self._folder.glob(f"seed-*/{CHECKPOINTS}"):
            remove_quietly(path)
        self._say(figures(ended.values) or f"{ended.cause}, {reason}")
