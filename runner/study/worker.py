"""A worker takes trials from the study's queue to their end, one after the other, until the budget is spent."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import psutil
from filelock import FileLock, Timeout
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState

from runner.child.spawn import Cause
from runner.recipe.document import RecipeError
from runner.recipe.recipe import Recipe
from runner.study import attempts as kept
from runner.study.attempts import Attempts, bounds, logged_by, neighbours, objectives, used
from runner.study.config import VERIFY, figure, label
from runner.study.leases import BEAT_SECONDS, DEAD_SECONDS, Lease, Leases
from runner.study.publish import Publisher
from runner.study.store import IDENTITY, StudyStore, verdict_key
from runner.study.training import PRUNED, Ended, judge, limits_of, prepare, train
from runner.system.errors import RunnerError, UsageError
from runner.system.faults import reach
from runner.system.secrets import redact, redact_values
from runner.tracking.periodic import Periodic
from runner.tracking.store import Store
from runner.tracking.workspace import SPOOL, folder_name
from runner.train.loop import CHECKPOINTS

if TYPE_CHECKING:
    from runner.study.definition import Definition
    from runner.tracking.workspace import Workspace
    from runner.train.signals import Stop

FEASIBLE = "trained"  # the constraint that tells Optuna of a configuration that cannot be trained to a result
BEGINNING, REPORTING = -2, -3  # the leases of whoever makes the study, and of whoever writes its report
_GATE, _NOT_REACHED = "gate", "not reached"
# These belong to the configuration, which would end like that again:
_INFEASIBLE = {Cause.OUT_OF_MEMORY, Cause.DIVERGED, Cause.TIMEOUT, Cause.INVALID, _GATE, _NOT_REACHED}
_TRANSIENT = (Cause.CRASHED, Cause.HUNG)  # the same training might end well another time
_MOST_KILLED = 8  # attempts beyond the retries that may end with their worker before the training is taken to be why
_SHARED = Path("/var/tmp" if os.path.isdir("/var/tmp") else tempfile.gettempdir())  # noqa: S108 (a lock, not data)
_WAIT_SECONDS = 1.0  # between two looks whether a trial of another worker has become free
Say = Callable[[str], None]


def work(definition: Definition, workspace: Workspace, files: Sequence[Path], stop: Stop, say: Say) -> str:
    """Works on a study as one worker, writes its report, and says why it ended before all trials; empty if it did not.

    Raises:
        StorageError: the study's storage or MLflow cannot be reached.
        UsageError: the study was begun with another definition, or asks for what no training logs.
    """
    with StudyStore.session(workspace) as store:
        worker = Worker(definition, workspace, store, files, stop, say)
        try:
            ended = worker.run()
        except RunnerError:
            worker.conclude()
            raise
        worker.conclude()
        return ended


class Worker:
    """Works on one study; raises what ``work`` does."""

    def __init__(
        self, definition: Definition, here: Workspace, store: StudyStore, files: Sequence[Path], stop: Stop, say: Say
    ) -> None:
        config = definition.config
        self.definition, self.files, self.stop, self.say = definition, files, stop, say
        self.folder = here.root / "studies" / config.name
        self.folder.mkdir(parents=True, exist_ok=True)
        tracking = Store(here)
        self._store, self._leases = store, Leases(store.storage.engine, config.name)
        with self._leases.waiting(BEGINNING):
            self.study = store.create(definition)
            self.publisher = Publisher(tracking, self.study, self.study.user_attrs[IDENTITY], definition)
        store.top_up(self.study, definition, self._leases)
        self.publisher.catch_up(self.folder / "trials")
        # Trials that are timed wait for each other on one machine, whatever study they belong to.
        self._alone = FileLock(_SHARED / f"runner-timing-{os.getuid()}.lock") if config.timed else None

    def run(self) -> str:
        """Works until there is nothing left to do; says why it ended, nothing if all trials are finished."""
        while not self.stop:
            with self._turn() as mine:
                ended, took = self._look_for_one() if mine else (None, False)
            if ended is not None:
                return ended
            if not took:
                time.sleep(_WAIT_SECONDS)
        return "it was told to end"

    def conclude(self) -> None:
        """Writes the report as it stands, and tells MLflow."""
        from runner.study.report import write_report
        from runner.study.summary import summarise

        with self._leases.waiting(REPORTING):
            summary = summarise(self.study)
            files = write_report(self.study, summary, self.folder)
            tags = {"best.trials": [row.number for row in summary.best], "trials": summary.used.trials}
            for row in summary.best[:1]:
                tags |= {f"best.{name}": row.values[name] for name in summary.objectives}
            self.publisher.end("KILLED" if self.stop else "FINISHED", tags, files)

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Waits until no other worker of this machine times a trial; false if it is told to end before."""
        said = False
        while self._alone is not None and not self.stop:
            try:
                self._alone.acquire(timeout=_WAIT_SECONDS)
                break
            except Timeout:
                if not said:
                    self.say("another worker of this machine measures; trials that are timed take turns")
                said = True
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
        so_far = used(trials, leases)
        spent = ""
        if budget.seconds is not None and so_far.seconds >= budget.seconds:
            spent = f"{budget.seconds:g} s of trials"
        elif budget.device_seconds is not None and so_far.device_seconds >= budget.device_seconds:
            spent = f"{budget.device_seconds:g} s on devices"
        begun = [trial for trial in unfinished if trial.state == TrialState.RUNNING]
        # What has begun comes first: to be ended when the budget is spent, and for the next suggestion to know of it.
        others = [lease for lease in leases if lease.trial >= 0 and not self._leases.is_dead(lease)]
        doubtful = not all(self._leases.is_alive(lease) for lease in others)
        took = any(self._take(trial) for trial in (begun if spent or doubtful else unfinished))
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
                    self.say(f"trial {number} goes on: its worker, process {before.pid}, is gone")
                _TrialRun(self, trial, before, lost).run()
        except _StoppedError as error:
            self.say(str(error))
        except UpdateFinishedTrialError:
            self.say(f"trial {number} was ended by another worker")
        finally:
            beating.stop()
            self._leases.release(number)
        return True


class _StoppedError(RunnerError):
    """The worker was told to end, or another has taken the trial because this one was not heard of for too long."""


@dataclass
class _Result:
    cause: str = Cause.DONE
    reason: str = ""
    values: dict[str, float] = field(default_factory=dict)
    excess: dict[str, float] = field(default_factory=dict)


class _TrialRun:
    """Brings one trial to its end: suggested, judged by the gate if that is asked, trained with every seed, told."""

    def __init__(self, worker: Worker, trial: Trial, before: Lease | None, lost: Event) -> None:
        self._worker, self._definition, self._trial, self._lost = worker, worker.definition, trial, lost
        self._config, self._publisher = self._definition.config, worker.publisher
        self._folder = worker.folder / "trials" / f"{trial.number:04d}"
        self._attempts, self._limits = Attempts(trial), limits_of(self._config)
        self._attempts.close(before.seen if before is not None else 0.0)
        self._run_id = ""
        self._params: dict[str, Any] = {}
        self._trained, self._whole, self._began = 0.0, True, time.time()

    def run(self) -> None:
        """Suggests, trains and tells; a ``_StoppedError`` if it goes on another time, or is another worker's now."""
        settled = self._definition.space.settle(lambda parameter: parameter.suggested(self._trial))
        self._params = {path: label(value) for path, value in settled.items()}
        self._trial.set_user_attr(kept.VALUES, redact_values(self._params))
        reach("study.suggested")
        self._say(", ".join(f"{path.rpartition('.')[2]} {figure(value)}" for path, value in self._params.items()))
        self._run_id = self._publisher.trial(self._trial.number, self._params)
        try:
            recipe = self._definition.recipe_of(settled)
        except RecipeError as error:
            self._tell(_Result(Cause.INVALID, str(error)))
            return
        name = folder_name(self._publisher.name_of(self._trial.number))
        self._trial.set_user_attr(kept.RECIPE, {**recipe.values(), "name": name})
        try:
            result = self._judged(recipe) or self._train(settled)
            if self._lost.is_set():
                raise self._why_ended()
        except (_StoppedError, UsageError):
            if not self._lost.is_set():
                self._publisher.interrupt(self._run_id)
            raise
        reach("study.trained")
        self._tell(result)
        reach("study.told")

    def _judged(self, recipe: Recipe) -> _Result | None:
        """What the gate has against the configuration; asked once a study for stages with the same settings."""
        wanted = self._config.constraints.get(VERIFY)
        if wanted is None:
            return None
        key, study = verdict_key(recipe, self._params), self._trial.study
        verdict = study.user_attrs.get(key)
        if verdict is None:
            self._attempts.begin(_GATE)
            verdict = redact_values(judge(recipe, self._worker.files, self._limits, self._ended))
            self._attempts.end(_GATE)
            if self._ended():
                raise self._why_ended()
            study.set_user_attr(key, verdict)
        self._trial.set_user_attr(kept.VERDICT, verdict)
        if verdict["outcome"] in (("FAIL", "INCONCLUSIVE") if wanted == "pass" else ("FAIL",)):
            return _Result(_GATE, f"{verdict['outcome']}: {verdict['summary']}")
        return None

    def _train(self, settled: Mapping[str, Any]) -> _Result:
        """Trains with every seed; what counts is the mean."""
        found, excess = list[dict[str, float]](), list[dict[str, float]]()
        seeds = self._definition.seeds
        for number, seed in enumerate(seeds, start=1):
            prefix = f"seed_{seed}/" if len(seeds) > 1 else ""
            folder = self._folder / f"seed-{seed}"
            ended = self._train_one(self._definition.recipe_of(settled, seed), folder, prefix)
            if ended.cause != Cause.DONE:
                return _Result(ended.cause, ended.reason)
            logged = logged_by(folder / SPOOL, prefix)
            active = [(each["begin"], each["end"]) for each in self._attempts.of(seed) if "end" in each]
            values = dict[str, float]()
            for name, value in objectives(self._config, logged, active).items():
                if value is None:
                    return _Result(_NOT_REACHED, f"{name} did not reach {self._config.objectives[name].reach:g}")
                if not math.isfinite(value):
                    return _Result(Cause.DIVERGED, f"{name} is {value}")
                values[name] = value
            found.append(values)
            excess.append(bounds(self._config, logged))
            hopeless = self._config.pruner_kind == "wilcoxon" and not self._goes_on(next(iter(values.values())), number)
            if hopeless and number < len(seeds):  # the last one is trained already
                return _Result(PRUNED, f"after {number} of {len(seeds)} seeds")
        means = [{name: statistics.fmean(one[name] for one in each) for name in each[0]} for each in (found, excess)]
        return _Result(values=means[0], excess=means[1])

    def _train_one(self, recipe: Recipe, folder: Path, prefix: str) -> Ended:
        """One training, gone on with where it was interrupted by what need not come again."""
        goal, retries, seed = recipe.length[1], self._config.retries, recipe.seed
        metric = next(iter(self._config.objectives)) if self._config.pruner_kind in ("median", "hyperband") else ""
        self._whole, anew = self._whole and not self._attempts.of(seed), False
        while len(self._attempts.of(seed, kept.KILLED)) <= retries + _MOST_KILLED:
            prepare(folder, anew)
            self._attempts.begin(seed)
            psutil.cpu_percent(percpu=True)  # of others, from here on
            ended = Ended(Cause.STOPPED, "the worker ended by an error")
            try:
                with self._publisher.shipping(self._run_id, folder):
                    ended = train(
                        recipe, folder, self._worker.files, self._limits, lambda _step: self._ended(),
                        lambda value, step: self._goes_on(value, step) or step >= goal, metric, prefix,
                    )  # fmt: skip
            finally:
                if not self._lost.is_set():
                    self._attempts.end(ended.cause)
            if ended.cause == Cause.STOPPED:
                raise self._why_ended()
            anew = ended.anew
            if anew:
                self._say(f"{ended.reason}; it begins anew")
                continue
            self._whole = self._whole and ended.training_seconds is not None
            self._trained += ended.training_seconds or 0.0
            if self._config.timed:
                others = neighbours(ended.cpu_seconds, ended.seconds)
                most = max(others, self._trial.user_attrs.get(kept.NEIGHBOURS, 0.0))
                self._trial.set_user_attr(kept.NEIGHBOURS, round(most, 3))
                if others > kept.DISTURBED:
                    self._say(f"others took {others:.0%} of the processor, so it may be slow")
            if ended.cause not in _TRANSIENT or len(self._attempts.of(seed, *_TRANSIENT)) > retries:
                return ended
            self._say(f"{ended.cause}, {ended.reason}; it is tried again")
        return Ended(Cause.CRASHED, "its workers were killed with it, again and again")

    def _say(self, text: str) -> None:
        self._worker.say(f"trial {self._trial.number}: {text}")

    def _ended(self) -> bool:
        return bool(self._worker.stop) or self._lost.is_set()

    def _why_ended(self) -> RunnerError:
        why = "is another worker's now" if self._lost.is_set() else "goes on from its checkpoint another time"
        return _StoppedError(f"trial {self._trial.number} {why}")

    def _stored(self) -> FrozenTrial:
        return self._trial.study.get_trials(deepcopy=False)[self._trial.number]

    def _goes_on(self, value: float, step: int) -> bool:
        """Reports a value to Optuna, once, and asks whether the trial is worth going on with."""
        if step not in self._stored().intermediate_values:
            self._trial.report(value, step)
        return not self._trial.should_prune()

    def _tell(self, result: _Result) -> None:
        """Tells Optuna and MLflow what the trial has come to."""
        trial, reason = self._trial, redact(result.reason)
        done, infeasible = result.cause == Cause.DONE, result.cause in _INFEASIBLE
        trial.set_user_attr(kept.CAUSE, str(result.cause))
        trial.set_user_attr(kept.REASON, reason)
        for constraint, value in {FEASIBLE: float(infeasible), **result.excess}.items():
            if constraint not in self._stored().constraints:
                trial.set_constraint(constraint, value)
        state = TrialState.COMPLETE if done else TrialState.FAIL
        if infeasible or result.cause == PRUNED:
            state = TrialState.PRUNED
        tags = {"state": state.name, "cause": result.cause, "reason": reason, **result.excess}
        self._publisher.tell(self._folder, self._params, result.values, tags)
        if self._whole and done:
            trial.set_user_attr(kept.OVERHEAD, round(time.time() - self._began - self._trained, 3))
        values = [result.values[each] for each in self._config.objectives] if done else None
        trial.study.tell(trial, values, state=state)
        for path in self._folder.glob(f"seed-*/{CHECKPOINTS}"):
            shutil.rmtree(path, ignore_errors=True)
        came = ", ".join(f"{each} {value:.4g}" for each, value in result.values.items())
        self._say(came or f"{result.cause}, {reason}")
