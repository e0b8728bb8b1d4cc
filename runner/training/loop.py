"""The training loop: steps, reports, evaluations and checkpoints, counted in the recipe's unit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

from runner.plugin.metric_names import check_metric_name, refuse_names
from runner.system import generators
from runner.system.errors import DivergedError, RunnerError, SentinelError
from runner.system.secrets import redact_values
from runner.training.checkpoint import CHECKPOINTS, Writer
from runner.training.evaluation import checked, evaluated
from runner.training.guards import FiniteGuard, GradientGuard
from runner.training.metrics import (
    OWN_ACTIVITIES,
    RESERVED,
    Activities,
    Means,
    peak_memory,
    speeds,
    split_time,
)
from runner.training.outputs import Display, MetricLog
from runner.training.rehearsal import OF_STAGES, check_loaded, rehearse
from runner.training.roofline import measure_fraction
from runner.training.state_schema import fitting
from runner.training.step import Step

if TYPE_CHECKING:
    from runner.plugin.source import State
    from runner.recipe.safeguards import SentinelConfig
    from runner.training.pipeline import Assembly
    from runner.training.sentinel import Sentinel
    from runner.training.signals import Stop

LOOK_EVERY = 50
"""Updates between two looks at the losses of a GPU."""
LEAST_TIMED_S = 10.0
"""Seconds of updates below which the fraction of the roofline is not measured: it would take a good part of them."""


class Loop:
    """The loop of one training; ``step`` in its log is ``progress.done``, in the recipe's unit."""

    def __init__(
        self, pipeline: Assembly, run_dir: Path, metric_log: MetricLog, display: Display, stop: Stop,
        again: str = "runner resume",
    ) -> None:  # fmt: skip
        """Prepares a training in ``run_dir``; messages contain ``again``, the command that
        continues this run.
        """
        self.pipeline, self.metric_log, self.display, self.stop = (
            pipeline,
            metric_log,
            display,
            stop,
        )
        self.again, self.progress = again, pipeline.progress
        self.folder = run_dir
        self.writer = Writer(run_dir / CHECKPOINTS, metric_log.sync)
        train = pipeline.recipe.train
        scale = self.progress.whole // self.progress.length
        every = {
            "log": train.log_interval,
            "evaluate": train.evaluate_every,
            "checkpoint": train.checkpoint_every,
        }
        self.every = {name: count * scale for name, count in every.items() if count}
        """Intervals, counted as ``progress.position`` is."""
        self.next_due = 0
        """Before that position, nothing is due."""
        self.metrics: dict[str, float] = {}
        self.means = Means(
            type(pipeline.learner).__name__, pipeline.device.type == "cpu"
        )
        self.activities = Activities(pipeline.device)
        who = f"{type(pipeline.source).__name__}.activities"
        refuse_names(
            who, pipeline.source.activities, OWN_ACTIVITIES, "the runner times itself"
        )
        for name in ("draw", "next_batch"):
            self.activities.time(pipeline.slots, name)
        for name, said in pipeline.source.activities.items():
            self.activities.time(pipeline.slots, name)
            pipeline.slots.wrap(name, partial(self._shown, said))
        self.spent: defaultdict[str, float] = defaultdict(float)
        """Seconds by activity since the first update of this process was over."""
        self.steady_since: float | None = None
        """When the first update of this process was over, on the clock of ``perf_counter``."""
        self.untimed: dict[str, int] = {}
        """The counts of the first update in this process, whose time is not representative."""
        self.timed_updates, self.update_s = 0, 0.0
        """Updates whose time was taken in this process, and their seconds."""
        self.timed_from = self.progress.state_dict()
        """The counts when the clock was last read, without those of earlier processes."""
        self.complete = False
        self.best = -math.inf
        self.score: float | None = None
        self.saved: int | None = None
        self.finite = FiniteGuard(pipeline.slots, pipeline.learner, run_dir)
        self.gradients = GradientGuard(pipeline.learner)
        self.step = Step(pipeline)
        self.sentinel = (
            None if train.sentinel is None else self._make_sentinel(train.sentinel)
        )
        self.begun = False  # whether there was an update in this process
        self.warm_up = ExitStack()
        self.output: dict[str, Any] = {}
        """The result of the last update."""

    def run(self) -> None:
        """Trains to the end or to a signal, evaluates, and writes a checkpoint; a RunnerError
        reports an error.

        A signal changes neither weights nor metrics, so that the resumed run equals one without
        interruption.
        """
        with self.display.phase("training"), self.warm_up:
            self.warm_up.enter_context(self.display.phase("warm-up"))
            progress = self.progress
            step = self.sentinel or self.step
            position, end = progress.position, progress.whole
            try:
                if not position:
                    self._rehearse_checkpoint()
                while position < end and self.stop.asked is None:
                    before, began = position, perf_counter()
                    # The steps of one stretch of work, inside of which no training ends.
                    while position == before:
                        if self.begun:
                            if (output := step()) is not None:
                                self.follow(output)
                        elif (drawn := self.step.draw()) is not None:
                            with self._beginning():
                                self.output = self.step(drawn) or {}
                        position = progress.position
                    self.display.advance(progress.done, self.metrics)
                    self.stop.pace = perf_counter() - began
                    if (
                        not self.next_due <= position < end
                    ):  # at the end, all of this is done anyway
                        continue
                    if self.sentinel is not None:
                        self.sentinel.keep_checksum()
                    due = {
                        name
                        for name, every in self.every.items()
                        if before // every != position // every
                    }
                    self.next_due = min(
                        (position // every + 1) * every for every in self.every.values()
                    )
                    if "log" in due:
                        self.report()
                    if "evaluate" in due:
                        self.evaluate()
                    improved = self.score is not None and self.score == self.best
                    # The best model gets a checkpoint even if none is due.
                    if "checkpoint" in due or improved:
                        self.save()
                    self.score = None
                if self.stop.asked is None and not self.complete:
                    self._end()
                self.stop.acknowledged = True
                self.save()
            except SentinelError as error:
                self._stop_at_checkpoint(error)
            finally:
                self.writer.wait()
            if self.writer.failure is not None:
                said = f"{self.writer.failure.strerror}; the newest is {self.writer.newest() or 'none'}"
                raise RunnerError(
                    f"the checkpoint at {progress.done} {progress.unit} could not be written: {said}; "
                    f"free some space and continue with: {self.again}"
                )

    @contextmanager
    def _beginning(self) -> Iterator[None]:
        """Entered around the first update of this process, for which the source may have warmed up: stages compile."""
        self.begun = True
        self.warm_up.close()
        compiling = any(
            self.pipeline.recipe.stages[kind].traces for kind in self.pipeline.stages
        )
        self.warm_up.enter_context(
            self.display.phase("compiling" if compiling else "first update")
        )
        before = self.progress.state_dict()
        with self.activities.measure("startup"):
            started = perf_counter()
            yield
            self.activities.wait()
            seconds = perf_counter() - started
            self.warm_up.close()
            self.follow(self.output)
            if self.progress.updates == 1:
                self._publish({"perf/first_update_seconds": seconds})
                self._rehearse()
        self.untimed = {
            unit: count - before[unit]
            for unit, count in self.progress.state_dict().items()
        }
        # The next report also counts what came before; that is start-up.
        for activity, seconds in self.activities.so_far(
            self.pipeline.source.activities
        ).items():
            self.spent[activity] -= seconds
        self.steady_since = perf_counter()

    def _make_sentinel(self, config: SentinelConfig) -> Sentinel:
        # Few trainings need what compares updates.
        from runner.training.sentinel import Sentinel

        return Sentinel(self.step, self.pipeline, config)

    def _shown(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """A slot that is shown as a phase of that name."""

        def shown(*args: Any, **kwargs: Any) -> Any:
            with self.display.phase(name):
                return step(*args, **kwargs)

        return shown

    def follow(self, output: dict[str, Any]) -> None:
        """Performs the work that is due after each update."""
        # Before anything is logged: a killed run makes the same choices again.
        self.pipeline.tuning.commit()
        self.output = output
        self.means.add(output)
        updates = self.progress.updates
        if not self.means.finite or (
            not self.means.on_host and updates % LOOK_EVERY == 0
        ):
            self.check()
        if not self.gradients.done:
            self.gradients.check(
                self.progress, self.pipeline.learner.idle(self.progress)
            )

    def _rehearse(self) -> None:
        """Rehearses the evaluation and the learner's methods, so that a mistake
        is reported immediately.
        """
        self.pipeline.refuse_unread()
        with self.display.phase("rehearsing the evaluation"):
            metrics = self.pipeline.source.rehearse(
                self.pipeline.learner, self.step.batch
            )
        if metrics is not None:
            checked(metrics, self.pipeline)
        self._rehearse_learner()

    def _end(self) -> None:
        """Checks and evaluates a training that has reached its length; the last report has that evaluation in it."""
        if not self.progress.updates:
            raise RunnerError(
                "the training ended before its first update: the warm-up is too long, or too little data"
            )
        if not self.gradients.done:
            self.gradients.end(
                self.progress.updates, self.pipeline.learner.idle(self.progress)
            )
        self.check()
        try:
            self.evaluate()
        finally:
            self.report()
        self.complete = True

    def measure_roofline_fraction(self) -> None:
        """Logs which fraction of its roofline an update reaches; for the end, because it makes one more update."""
        if not self.timed_updates or self.update_s < LEAST_TIMED_S:
            return
        with self.display.phase("measuring what this machine can do at best"):
            fraction = measure_fraction(self.step, self.update_s / self.timed_updates)
        if fraction is not None:
            self._publish({"perf/roofline_fraction": fraction})

    def _rehearse_checkpoint(self) -> None:
        """Raises a RunnerError if the state before the first update does not survive a checkpoint."""

        def load(state: State) -> State:
            self.load_state_dict(state)
            # The tracker reads the cursor, no loading restores it, and other threads log meanwhile.
            return {**self.state_dict(), "cursor": state["cursor"]}

        rehearse(self.writer.folder, self.state_dict(), load)

    def _rehearse_learner(self) -> None:
        """Raises a RunnerError if what the first update has added to the state does not survive a checkpoint.

        The state goes into another learner, because stages may hold tensors of the one that trains (a CUDA graph), and
        batches are drawn ahead. A model so large that a second one may not fit is not built again.
        """
        read = rehearse(self.writer.folder, self.state_dict())
        if read is None or not read.is_complete:
            return

        def load(state: State) -> State:
            learner = self.pipeline.build_another_learner()
            learner.load_complete_state(state["pipeline"]["learner"])
            return {"pipeline": {"learner": learner.complete_state()}}

        before = generators.state_dict()
        try:
            check_loaded(read.part("pipeline", "learner"), load, OF_STAGES)
        finally:
            generators.load_state_dict(before)

    def check(self) -> None:
        """Stops the training if a loss since the last report was not finite."""
        if self.means.look():
            return
        try:
            self.finite.check(self.progress, self.step.batch, self.output)
        except DivergedError as error:
            self._diverge(str(error))

    def _stop_at_checkpoint(self, alarm: SentinelError) -> NoReturn:
        """Raises an alarm again, with what is known to be good."""
        assert self.sentinel is not None
        self.writer.wait()
        newest = self.writer.newest()
        checkpoint = (
            "no checkpoint has been written yet"
            if newest is None
            else f"the newest checkpoint is {newest}"
        )
        raise SentinelError(
            f"{alarm}; {self.sentinel.last_good}; {checkpoint}"
        ) from None

    def _diverge(self, what: str) -> NoReturn:
        """Stops a training that has diverged; the message names the last good checkpoint."""
        self.writer.wait()
        good = self.writer.newest()
        left = (
            "no checkpoint has been written yet"
            if good is None
            else f"the last good checkpoint is {good}"
        )
        raise DivergedError(f"{what}; {left}") from None

    def report(self) -> None:
        """Logs the means of the losses, what happened while drawing, and the speed since the last report."""
        self.check()
        self.gradients.watch_unfrozen()
        elapsed, seconds = self.activities.read()
        metrics = {
            f"train/{name}": mean
            for name, mean in {**self.means.take(), **self._statistics()}.items()
        }
        metrics["train/updates"] = float(self.progress.updates)
        counts = self.progress.state_dict()
        if elapsed > 0:
            parts = split_time(elapsed, seconds, self.pipeline.source.activities)
            for activity, part in parts.items():
                self.spent[activity] += part
            added = {
                unit: count - self.timed_from[unit] - self.untimed.get(unit, 0)
                for unit, count in counts.items()
            }
            always = (
                "updates",
                "samples" if self.progress.unit == "epochs" else self.progress.unit,
            )
            metrics |= speeds(elapsed, parts, added, always)
            self.timed_updates += added["updates"]
            self.update_s += parts["update"]
            metrics |= self.sentinel.metrics() if self.sentinel is not None else {}
            metrics["perf/peak_memory_mib"] = peak_memory(self.pipeline.device) / 2**20
            self.untimed = {}
        self.timed_from = counts
        self._publish(metrics)

    def _statistics(self) -> dict[str, float]:
        """Returns the source's statistics; raises a RunnerError if a name is used by the update or
        reserved for the runner.
        """
        statistics = self.pipeline.source.statistics()
        who = f"{type(self.pipeline.source).__name__}.statistics"
        for name in statistics:
            check_metric_name(name, who)
        refuse_names(who, statistics, RESERVED, "is reserved for the runner")
        refuse_names(
            who,
            statistics,
            self.means.names,
            f"is one of {type(self.pipeline.learner).__name__}.update",
        )
        return statistics

    def evaluate(self) -> None:
        """Evaluates the model on held-out data; raises a DivergedError if the
        declared objective is not finite.

        Other metrics may honestly be none: a mean over what did not happen.
        """
        with self.display.phase("evaluating"), self.activities.measure("evaluate"):
            metrics = evaluated(self.pipeline)
        self.pipeline.tuning.commit()
        self._publish({f"eval/{name}": value for name, value in metrics.items()})
        recipe = self.pipeline.recipe
        objective = recipe.objective
        if objective is None:
            return
        value = metrics.get(objective.name, math.nan)
        if not math.isfinite(value):
            if recipe.declared_objective is None:
                return
            place = f"{self.progress.unit} {self.progress.done}, update {self.progress.updates}"
            self._diverge(
                f"{place}: the objective, eval/{objective.name}, is {value}; the run was stopped"
            )
        self.score = value * objective.sign
        self.best = max(self.best, self.score)
        self.display.improved(self.best * objective.sign)

    def save(self) -> None:
        """Hands a checkpoint to its writer, never one with numbers that are not finite."""
        self.check()
        started, position = perf_counter(), self.progress.position
        with (
            self.display.phase("saving a checkpoint"),
            self.activities.measure("checkpoint"),
        ):
            self.writer.save(
                position, self.state_dict(), self.score, self.progress.done
            )
        if (
            self.saved != position
        ):  # a signal may request another one at the same position
            self._publish(
                {"perf/checkpoint_ms": 1e3 * (perf_counter() - started)}
            )  # that the training waits for it
        self.saved = position

    def state_dict(self) -> State:
        """Returns everything that a resumed training needs."""
        return {
            "pipeline": self.pipeline.state_dict(),
            "step": self.progress.done,
            "means": self.means.state_dict(),
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
            self.gradients.load_state_dict(state["gradients"])
            self.metrics, self.complete, self.best = (
                state["metrics"],
                state["complete"],
                float(state["best"]),
            )
            if (objective := self.pipeline.recipe.objective) and math.isfinite(
                self.best
            ):
                self.display.improved(self.best * objective.sign)
            self.timed_from = self.progress.state_dict()
            # Last, because restoring may draw from them.
            generators.load_state_dict(state["generators"])

    def _publish(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics
        self.metric_log.log(metrics, self.progress.done)
