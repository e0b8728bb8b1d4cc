"""The training loop: steps, reports, evaluations and checkpoints, counted in the recipe's unit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

from runner.plugin.end_training import EndTraining
from runner.plugin.metric_names import refuse_names
from runner.system import generators
from runner.system.errors import DivergedError, RunnerError, SentinelError
from runner.system.secrets import redact_values
from runner.training.device_memory import peak_memory
from runner.training.evaluation import (
    draw_evaluation,
    evaluated,
    rehearse_evaluation,
)
from runner.training.group_writer import make_writer
from runner.training.guards import FiniteGuard, GradientGuard
from runner.training.loop_parts import (
    count_skipped,
    existing,
    intervals_of,
    make_adaptive_rates,
    make_best_values,
    make_callbacks,
    make_early_stop,
    make_means,
    make_sentinel,
    make_skipping,
    observe_evaluation,
)
from runner.training.metrics import (
    CALLBACKS,
    LOOP_ACTIVITIES,
    Activities,
    speeds,
    split_time,
    statistics_of,
)
from runner.training.outputs import Display, MetricLog
from runner.training.rehearsal import rehearse, rehearse_learner
from runner.training.roofline import measure_fraction
from runner.training.skipped_updates import Skipped
from runner.training.state_schema import fitting
from runner.training.step import Step
from runner.training.unsaved_state import UnsavedState
from runner.training.update_metrics import UpdateMetrics

if TYPE_CHECKING:
    from runner.plugin.source import State
    from runner.training.pipeline import Assembly
    from runner.training.signals import Stop

# A check of the losses waits for a GPU, so it is made only after this number of updates.
LOOK_EVERY = 50
# A display shows a few values per second; a call in every update would delay small models.
SHOW_SECONDS = 0.05
# The fraction of the roofline would take a good part of a training with fewer seconds of updates.
LEAST_TIMED_S = 10.0


class Loop:
    """Runs one training; ``step`` in its log is ``progress.done``, in the recipe's unit.

    Args:
        pipeline: The assembled source, learner and stages.
        run_dir: Folder of the run, for checkpoints and diagnoses.
        metric_log: Receives all metrics.
        display: Shows the progress.
        stop: Set by signals; the loop saves a checkpoint and returns.
        resume_command: The command that continues this run, for messages.
    """

    def __init__(
        self,
        pipeline: Assembly,
        run_dir: Path,
        metric_log: MetricLog,
        display: Display,
        stop: Stop,
        resume_command: str = "runner resume",
    ) -> None:
        self.pipeline = pipeline
        self.metric_log = metric_log
        self.display = display
        self.stop = stop
        self.resume_command = resume_command
        self.folder = run_dir
        self.progress = pipeline.progress
        self.writer = make_writer(pipeline, run_dir, metric_log.sync)

        # Intervals are counted as ``progress.position`` is; nothing is due before ``next_due``.
        self.intervals = intervals_of(pipeline.recipe.train, self.progress)
        self.next_due = 0

        # The most recent value of every metric, the last update's result, and the best objective.
        self.metrics: dict[str, float] = {}
        self.output: dict[str, Any] = {}
        self.best = -math.inf
        self.score: float | None = None
        self.saved_position: int | None = None
        self.evaluated_position: int | None = None
        self.complete = False
        self.early_stop = make_early_stop(pipeline.recipe)
        self.best_values = make_best_values(pipeline.recipe)
        # Of the last evaluation, by metric, and whether one of them is among the best.
        self.scores: dict[str, float] = {}
        self.is_among_best = False
        # Why the training ended before its length.
        self.ended_early = ""

        # Seconds by activity, since the first update of this process was over.
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.steady_since: float | None = None
        # The time of the first update in a process is not representative, so it is not counted.
        self.untimed: dict[str, int] = {}
        self.timed_updates = 0
        self.update_s = 0.0
        # The counts when the clock was last read, without those of earlier processes.
        self.timed_from = self.progress.state_dict()
        self.has_updated = False
        self.warm_up = ExitStack()

        log_interval = self.intervals["log"]
        self.update_metrics = UpdateMetrics(pipeline, log_interval)
        self.means = make_means(pipeline)
        self.activities = Activities(pipeline.device)
        self._time_activities()
        self.finite = FiniteGuard(
            pipeline.slots, pipeline.learner, run_dir, pipeline.is_compiled
        )
        self.gradients = GradientGuard(pipeline.learner)
        self.unsaved = UnsavedState(pipeline)
        self.step = Step(pipeline)
        self.sentinel = make_sentinel(self.step, pipeline)
        self.callbacks = make_callbacks(pipeline)
        self.skipped = make_skipping(pipeline, self.finite)
        # Their states are in a checkpoint only where the recipe has them.
        self.parts = existing(
            early_stop=self.early_stop,
            best_values=self.best_values,
            adaptive_rates=make_adaptive_rates(self.step),
            callbacks=self.callbacks,
            skipped_updates=self.skipped,
        )

    def run(self) -> None:
        """Trains to the end or to a signal, evaluates, and writes a checkpoint.

        A signal changes neither weights nor metrics, so that the resumed run equals one without
        interruption.

        Raises:
            RunnerError: The training failed.
        """
        with self.display.phase("training"), self.warm_up:
            self.warm_up.enter_context(self.display.phase("warm-up"))
            progress = self.progress
            step = self.sentinel or self.step
            measured = self.update_metrics
            # A property would be called in every update.
            read_position = attrgetter(progress.counted)
            position = read_position(progress)
            end = progress.whole
            show_from = 0.0
            try:
                if self.callbacks is not None:
                    self._observe(self.callbacks.start, self.metrics)
                if not position:
                    self._rehearse_checkpoint()
                with self._may_end_early():
                    while position < end and not self._is_stopped():
                        previous = position
                        started = perf_counter()
                        may_be_due = position >= measured.due_from
                        is_measured = may_be_due and measured.is_due(position)
                        if is_measured:
                            measured.start()
                        # A training never ends inside a stretch of steps at the same position.
                        while position == previous:
                            if self.has_updated:
                                if (output := step()) is not None:
                                    self.follow(output)
                            elif (inputs := self.step.draw()) is not None:
                                with self._first_update():
                                    self.output = self.step(inputs) or {}
                            position = read_position(progress)
                        if is_measured:
                            measured.finish()
                        finished = perf_counter()
                        self.stop.pace = finished - started
                        if finished >= show_from:
                            show_from = finished + SHOW_SECONDS
                            self.display.advance(progress.done, self.metrics)
                        # At the end, everything is done in any case.
                        if self.next_due <= position < end:
                            self._perform_due(previous, position)
                self.display.advance(progress.done, self.metrics)
                if self.stop.received is None and not self.complete:
                    self._end()
                self.stop.acknowledged = True
                self.save(is_due=self.complete)
            except SentinelError as error:
                self._stop_at_checkpoint(error)
            finally:
                self.writer.wait()
            self._refuse_failed_write()

    def _is_stopped(self) -> bool:
        """Returns whether a signal or the recipe's condition stops the training here."""
        if self.stop.received is not None:
            return True
        if self.callbacks is not None and self.callbacks.reason:
            self.ended_early = self.callbacks.reason
            return True
        if self.early_stop is None or not self.early_stop.ends(self.progress):
            return False
        self.ended_early = self.early_stop.reason
        return True

    @contextmanager
    def _may_end_early(self) -> Iterator[None]:
        """Makes an EndTraining inside the ``with`` the end of the training."""
        try:
            yield
        except EndTraining as ended:
            self.ended_early = str(ended) or "a plugin ended it"

    def follow(self, output: dict[str, Any]) -> None:
        """Performs the work that is due after each update."""
        # Before anything is logged: a killed run makes the same choices again.
        tuning = self.pipeline.tuning
        if tuning.is_changed:
            tuning.commit()
        self.output = output
        if self.skipped is not None and isinstance(output, Skipped):
            self._diverge_if(self.skipped.follow, output)
            return
        means = self.means
        means.add(output)
        is_look_due = not means.on_host and self.progress.updates % LOOK_EVERY == 0
        if not means.finite or is_look_due:
            self.check()
        if not self.gradients.done:
            idle = self.pipeline.learner.idle(self.progress)
            self.gradients.check(self.progress, idle)
        if self.callbacks is not None:
            self._observe(self.callbacks.follow_update, output)

    def _perform_due(self, previous: int, position: int) -> None:
        """Reports, evaluates and saves what has become due since the previous position."""
        if self.sentinel is not None:
            self.sentinel.keep_checksum()
        due = {
            name
            for name, interval in self.intervals.items()
            if previous // interval != position // interval
        }
        intervals = self.intervals.values()
        self.next_due = min(
            (position // interval + 1) * interval for interval in intervals
        )
        if "log" in due:
            self.report()
        if "evaluate" in due:
            self.evaluate()
        is_improved = self.score is not None and self.score == self.best
        # The best model gets a checkpoint even if none is due.
        if "checkpoint" in due or is_improved or self.is_among_best:
            self.save(is_due=True)
        self.score = None
        self.scores = {}
        self.is_among_best = False

    @contextmanager
    def _first_update(self) -> Iterator[None]:
        """Surrounds the first update of this process, in which stages compile."""
        self.has_updated = True
        self.warm_up.close()
        phase = "compiling" if self.pipeline.is_compiled else "first update"
        self.warm_up.enter_context(self.display.phase(phase))
        earlier = self.progress.state_dict()
        with self.activities.measure("startup"):
            started = perf_counter()
            yield
            self.activities.wait()
            seconds = perf_counter() - started
            self.warm_up.close()
            self.follow(self.output)
            is_first = self.progress.updates == 1
            # An evaluation would replace results that still have a graph.
            self.unsaved.check(is_first=is_first)
            if is_first:
                self._publish({"perf/first_update_seconds": seconds})
                self._rehearse()
        counts = self.progress.state_dict()
        self.untimed = {unit: count - earlier[unit] for unit, count in counts.items()}
        # The next report also counts the time until here, which is start-up.
        spent = self.activities.so_far(self.pipeline.source.activities)
        for activity, seconds in spent.items():
            self.spent[activity] -= seconds
        self.steady_since = perf_counter()

    def _end(self) -> None:
        """Checks and evaluates a training that has reached its length.

        The last report has the final evaluation in it.
        """
        if not self.progress.updates:
            raise RunnerError(
                "the training ended before its first update: "
                "the warm-up is too long, or too little data"
            )
        if not self.gradients.done:
            idle = self.pipeline.learner.idle(self.progress)
            self.gradients.end(self.progress.updates, idle)
        self.check()
        try:
            # A training that ends early may have been evaluated here.
            if self.evaluated_position != self.progress.position:
                self.evaluate()
        finally:
            self.report()
        if self.callbacks is not None:
            self._observe(self.callbacks.end, self.metrics)
        self.complete = True

    def report(self) -> None:
        """Logs metrics since the last report: means of losses, statistics of the source, speed."""
        self.check()
        self.gradients.watch_unfrozen()
        elapsed, seconds = self.activities.read()
        values = {
            **self.means.take(),
            **statistics_of(
                self.pipeline.source, self.pipeline.learner, self.means.names
            ),
        }
        metrics = {f"train/{name}": value for name, value in values.items()}
        metrics["train/updates"] = float(self.progress.updates)
        metrics |= count_skipped(self.skipped) | self.update_metrics.take()
        counts = self.progress.state_dict()
        if elapsed > 0:
            metrics |= self._performance(elapsed, seconds, counts)
        self.timed_from = counts
        self._publish(metrics)

    def evaluate(self) -> None:
        """Evaluates the model on held-out data.

        Metrics other than the objective may have no value, such as a mean over no events.

        Raises:
            DivergedError: The declared objective is not finite.
        """
        with self.display.phase("evaluating"), self.activities.measure("evaluate"):
            metrics = evaluated(self.pipeline)
        self.pipeline.tuning.commit()
        self._publish({f"eval/{name}": value for name, value in metrics.items()})
        self.evaluated_position = self.progress.position
        interval = self.intervals.get("evaluate", self.progress.whole)
        with self.display.phase("drawing"), self.activities.time("evaluate"):
            draw_evaluation(self.pipeline, interval)
        observe_evaluation(self.parts, metrics, self.progress)
        if self.best_values is not None:
            self.scores = self.best_values.scores(metrics)
            self.is_among_best = self.best_values.add(self.scores)
        self._judge_objective(metrics)
        if self.callbacks is not None:
            self._observe(self.callbacks.follow_evaluation, metrics)

    def _judge_objective(self, metrics: Mapping[str, float]) -> None:
        """Compares the objective of an evaluation with the best so far."""
        recipe = self.pipeline.recipe
        objective = recipe.objective
        if objective is None:
            return
        value = metrics.get(objective.name, math.nan)
        if not math.isfinite(value):
            if recipe.declared_objective is None:
                return
            progress = self.progress
            self._diverge(
                f"{progress.unit} {progress.done}, update {progress.updates}: "
                f"the objective, eval/{objective.name}, is {value}; the run was stopped"
            )
        self.score = value * objective.sign
        self.best = max(self.best, self.score)
        self.display.improved(self.best * objective.sign)

    def save(self, is_due: bool = False) -> None:
        """Hands a checkpoint to its writer, never one with numbers that are not finite.

        Args:
            is_due: Whether the recipe requires it; a signal requests others.
        """
        self.check()
        if self.callbacks is not None:
            self.callbacks.is_checkpoint_new = is_due
        started = perf_counter()
        position = self.progress.position
        with (
            self.display.phase("saving a checkpoint"),
            self.activities.measure("checkpoint"),
        ):
            self.unsaved.check()
            state = self.state_dict()
            self.writer.save(
                position, state, self.score, self.progress.done, self.scores
            )
        # A signal may request another checkpoint at the same position.
        if self.saved_position != position:
            milliseconds = 1e3 * (perf_counter() - started)
            self._publish({"perf/checkpoint_ms": milliseconds})
        self.saved_position = position
        if self.callbacks is not None:
            self._observe(self.callbacks.follow_checkpoint, self.metrics)

    def check(self) -> None:
        """Stops the training if a loss since the last report was not finite."""
        if self.means.look():
            return
        self._diverge_if(self.finite.check, self.output)

    def _diverge_if(self, check: Callable[..., None], output: dict[str, Any]) -> None:
        """Stops the training if a check of the last update raises a DivergedError."""
        try:
            check(self.progress, self.step.batch, output)
        except DivergedError as error:
            self._diverge(str(error))

    def measure_roofline_fraction(self) -> None:
        """Logs which fraction of its roofline an update reaches.

        This makes one more update, so it is called after the training.
        """
        mean_update_s = self.mean_update_s()
        if mean_update_s is None or self.update_s < LEAST_TIMED_S:
            return
        with self.display.phase("measuring what this machine can do at best"):
            fraction = measure_fraction(self.step, mean_update_s)
        if fraction is not None:
            self._publish({"perf/roofline_fraction": fraction})

    def mean_update_s(self) -> float | None:
        """Returns the mean seconds of an update, without the first; None if there was no other."""
        return self.update_s / self.timed_updates if self.timed_updates else None

    def state_dict(self) -> State:
        """Returns everything that a resumed training needs."""
        return {
            **{name: part.state_dict() for name, part in self.parts.items()},
            "pipeline": self.pipeline.state_dict(),
            "step": self.progress.done,
            "means": self.means.state_dict(),
            "update_metrics": self.update_metrics.state_dict(),
            "generators": generators.state_dict(),
            "gradients": self.gradients.state_dict(),
            "cursor": self.metric_log.mark(),
            "metrics": redact_values(self.metrics),
            "complete": self.complete,
            "best": self.best,
        }

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""
        self.pipeline.load_state_dict(state["pipeline"])
        self.step.reset()
        with fitting():
            self.means.load_state_dict(state["means"], self.pipeline.device)
            if "update_metrics" in state:
                self.update_metrics.load_state_dict(state["update_metrics"])
            self.gradients.load_state_dict(state["gradients"])
            self.metrics = state["metrics"]
            self.complete = state["complete"]
            self.best = float(state["best"])
            for name in self.parts.keys() & state.keys():
                self.parts[name].load_state_dict(state[name])
            objective = self.pipeline.recipe.objective
            if objective and math.isfinite(self.best):
                self.display.improved(self.best * objective.sign)
            self.timed_from = self.progress.state_dict()
            # Last, because restoring may draw from them.
            generators.load_state_dict(state["generators"])

    def _time_activities(self) -> None:
        """Times sampling and the source's activities, and shows the latter as phases."""
        slots = self.pipeline.slots
        source = self.pipeline.source
        subject = f"{type(source).__name__}.activities"
        refuse_names(
            subject, source.activities, LOOP_ACTIVITIES, "the runner times itself"
        )
        slots.wrap("draw", self.activities.clock("draw"))
        # On a CPU, batches are where they are drawn: nothing is left to call, or to time.
        if self.pipeline.draws_in_place():
            slots.replace("next_batch", slots.draw)
        else:
            slots.wrap("next_batch", self.activities.clock("next_batch"))
        for name, description in source.activities.items():
            slots.surround(name, partial(self.activities.time, name))
            slots.surround(name, partial(self.display.phase, description))

    def _observe(
        self, call: Callable[[Any], dict[str, float]], metrics: Mapping[str, Any]
    ) -> None:
        """Calls callbacks, and logs what they return."""
        # The first update is start-up with everything in it.
        is_first = self.steady_since is None and self.progress.updates
        with nullcontext() if is_first else self.activities.time(CALLBACKS):
            logged = call(metrics)
        if logged:
            self._publish(logged)

    def _rehearse_checkpoint(self) -> None:
        """Raises a RunnerError if the initial state does not survive a checkpoint."""

        def load(state: State) -> State:
            self.load_state_dict(state)
            # Loading does not restore the cursor of the metric log, which other threads advance.
            return {**self.state_dict(), "cursor": state["cursor"]}

        rehearse(self.writer.folder, self.state_dict(), load)

    def _rehearse(self) -> None:
        """Rehearses the evaluation and the learner's methods to report mistakes immediately."""
        with self.display.phase("rehearsing the evaluation"):
            rehearse_evaluation(self.pipeline, self.step.batch)
        rehearse_learner(self.writer.folder, self.state_dict(), self.pipeline)

    def _performance(
        self, elapsed: float, seconds: Mapping[str, float], counts: Mapping[str, int]
    ) -> dict[str, float]:
        """Returns speeds and memory since the last report, and adds up the time spent.

        Args:
            elapsed: Wall-clock seconds since the last report, above 0.
            seconds: Seconds by activity.
            counts: The progress in every unit.
        """
        durations = split_time(elapsed, seconds, self.pipeline.source.activities)
        for activity, duration in durations.items():
            self.spent[activity] += duration
        progress = {
            unit: count - self.timed_from[unit] - self.untimed.get(unit, 0)
            for unit, count in counts.items()
        }
        unit = self.progress.unit
        reported_units = ("updates", "samples" if unit == "epochs" else unit)
        metrics = speeds(elapsed, durations, progress, reported_units)
        self.timed_updates += progress["updates"]
        self.update_s += durations["update"]
        self.untimed = {}
        if self.sentinel is not None:
            metrics |= self.sentinel.metrics()
        metrics["perf/peak_memory_mib"] = peak_memory(self.pipeline.device) / 2**20
        return metrics

    def _stop_at_checkpoint(self, alarm: SentinelError) -> NoReturn:
        """Raises an alarm again, with the last update and checkpoint that are good."""
        assert self.sentinel is not None
        checkpoint = self._newest_checkpoint("newest")
        message = f"{alarm}; {self.sentinel.last_good}; {checkpoint}"
        raise SentinelError(message) from None

    def _diverge(self, reason: str) -> NoReturn:
        """Stops a training that has diverged; the message names the last good checkpoint."""
        checkpoint = self._newest_checkpoint("last good")
        raise DivergedError(f"{reason}; {checkpoint}") from None

    def _newest_checkpoint(self, quality: str) -> str:
        self.writer.wait()
        newest = self.writer.newest()
        if newest is None:
            return "no checkpoint has been written yet"
        return f"the {quality} checkpoint is {newest}"

    def _refuse_failed_write(self) -> None:
        """Raises a RunnerError if the last checkpoint could not be written."""
        failure = self.writer.failure
        if failure is not None:
            newest = self.writer.newest() or "none"
            raise RunnerError(
                f"the checkpoint at {self.progress.done} {self.progress.unit} could not be "
                f"written: {failure.strerror}; the newest is {newest}; "
                f"free some space and continue with: {self.resume_command}"
            )

    def _publish(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics
        self.metric_log.log(metrics, self.progress.done)
