"""The training loop: collect, update, report, evaluate, checkpoint."""

import math
import time
from pathlib import Path
from typing import Protocol

import torch

from runner import generators
from runner.api import Batch, RunnerError, State
from runner.engine.clock import Clock
from runner.engine.guards import FiniteGuard, GradientGuard
from runner.engine.signals import Stop
from runner.engine.writer import Writer
from runner.errors import DivergedError
from runner.pipeline import Pipeline

ACTIVITIES = ("collect", "update", "evaluate", "checkpoint")
BURST = 16
"""Updates of a dataset that are done in a row."""
CHECKPOINTS = "checkpoints"
COUNTERS = ("step", "updates", "credit", "totals", "names", "since_log", "metrics", "complete", "best")
"""What a checkpoint holds of the loop itself."""


class Journal(Protocol):
    """Who keeps what the training logs."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Logs metrics of one step."""

    def mark(self) -> int:
        """Where a run that resumes here goes on."""

    def sync(self) -> None:
        """Makes durable what was logged so far."""


class Display(Protocol):
    """Who shows a person how the training goes."""

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Shows progress and the newest value of every metric."""


class Loop:
    """One training.

    Progress is counted in environment steps for a simulator and in updates for a dataset; ``step`` below is that count.
    """

    def __init__(self, pipeline: Pipeline, run_dir: Path, journal: Journal, display: Display, stop: Stop) -> None:
        train = pipeline.recipe.train
        self.pipeline, self.journal, self.display, self.stop = pipeline, journal, display, stop
        self.writer = Writer(run_dir / CHECKPOINTS, journal.sync)
        self.simulates = pipeline.recipe.data.simulates
        self.goal, _ = pipeline.recipe.goal
        self.warmup_steps = train.warmup_steps if self.simulates else 0
        self.every = {"log": train.log_every, "evaluate": train.evaluate_every, "checkpoint": train.checkpoint_every}
        self.step = 0
        self.updates = 0
        self.credit = 0.0
        self.metrics: dict[str, float] = {}
        self.totals: torch.Tensor | None = None
        self.batch: Batch = {}
        self.names: list[str] = []
        self.since_log = 0
        self.timed_from = (0, 0)
        """Step and updates when the clock was last read; it knows nothing of what came before this process."""
        self.clock = Clock(pipeline.device)
        self.complete = False
        self.best = -math.inf
        self.score: float | None = None
        self.saved: int | None = None
        self.finite = FiniteGuard(pipeline.slots, pipeline.learner, run_dir)
        self.gradients = GradientGuard(pipeline.learner)
        self.noise = pipeline.context.generator("noise")
        self.exploration = pipeline.context.generator("policy")

    def run(self) -> None:
        """Trains until the goal or a signal, evaluates, and leaves a checkpoint.

        A signal leaves no trace in what is learnt or logged, so that the resumed run is the one never interrupted.

        Raises:
            DivergedError: a number stopped being finite.
            RunnerError: a part of the model receives no gradient, or the last checkpoint could not be written.
        """
        try:
            if self.pipeline.prepared and not self.step:
                self.save()  # what was measured to choose it would come out differently another time
            while self.step < self.goal and not self.stop:
                before = self.step
                updates = self.collect() if self.simulates else self.burst()
                with self.clock.measure("update"):
                    for remaining in reversed(range(updates)):
                        self.update(remaining)
                if not self.simulates:
                    self.step += updates
                self.act_on_schedule(before)
            if not self.stop and not self.complete:
                self.conclude()
            self.save()
        finally:
            self.writer.wait()
        if self.writer.failure is not None:
            raise RunnerError(
                f"the checkpoint at step {self.step} could not be written: {self.writer.failure.strerror}; the newest "
                f"is {self.writer.newest() or 'none'}; free some space and continue with: runner resume"
            )

    def conclude(self) -> None:
        """Reports and evaluates what was learnt in the end."""
        if not self.updates:
            raise RunnerError("the training ended before its first update: the warm-up is too long, or too little data")
        self.report()
        self.evaluate()
        self.complete = True

    def collect(self) -> int:
        """Advances the simulators once; returns how many updates are due."""
        source, learner = self.pipeline.source, self.pipeline.learner
        with self.clock.measure("collect"):
            warming_up = self.step < self.warmup_steps
            steps = source.collect(None if warming_up else lambda seen: learner.act(seen, self.exploration))
        self.step += steps
        if warming_up or not source.ready(self.pipeline.batch_size):
            return 0
        self.credit += steps * self.pipeline.updates_per_step
        due = int(self.credit)
        self.credit -= due
        return due

    def burst(self) -> int:
        """How many updates of a dataset to do before anything else is due; stages may look that far ahead."""
        distances = [every - self.step % every for every in self.every.values() if every]
        return min(BURST, self.goal - self.step, *distances)

    def update(self, remaining: int) -> None:
        """One update; ``remaining`` more follow before the source changes."""
        started = time.perf_counter()
        pipeline = self.pipeline
        batch = pipeline.slots.next_batch(pipeline.batch_size, min(1.0, self.step / self.goal), remaining)
        output = pipeline.slots.update(batch, pipeline.learner.noise(pipeline.batch_size, self.noise))
        pipeline.source.feedback(batch, output)
        self.updates += 1
        self.since_log += 1
        self.batch = batch
        self.add(output)
        self.gradients.check(self.updates)
        if self.updates == 1:
            self._publish({"perf/first_update_seconds": time.perf_counter() - started})

    def add(self, output: Batch) -> None:
        """Adds the scalars of an update to their sums, which stay on the device until they are reported."""
        scalars = {name: value for name, value in output.items() if value.dim() == 0}
        if not scalars:
            raise RunnerError(
                f"{type(self.pipeline.learner).__name__}.update returns no scalar: there is no loss to watch"
            )
        self.names = list(scalars)
        losses = torch.stack([value.double() for value in scalars.values()])
        self.totals = losses if self.totals is None else self.totals + losses
        # A NaN stays in the sum, so that a GPU need not be waited for after every update.
        if self.pipeline.device.type == "cpu" or self.updates % 50 == 0:
            self.check()

    def check(self) -> None:
        """Stops the training if a loss since the last report was not finite."""
        if self.totals is None:
            return
        try:
            self.finite.check(self.step, self.updates, self.totals, self.batch)
        except DivergedError as error:
            self.writer.wait()
            good = self.writer.newest() or "none"
            raise DivergedError(f"{error}; the last good checkpoint is {good}") from None

    def act_on_schedule(self, before: int) -> None:
        """Reports, evaluates and saves where the count has passed a multiple of their interval."""
        due = {name for name, every in self.every.items() if every and before // every != self.step // every}
        self.display.advance(self.step, self.metrics)
        if self.step >= self.goal:
            return  # the end does all three
        if "log" in due:
            self.report()
        if "evaluate" in due:
            self.evaluate()
        # The best model is worth a checkpoint of its own where there are any on the way.
        if "checkpoint" in due or (self.score is not None and self.score == self.best and self.every["checkpoint"]):
            self.save()
        self.score = None

    def report(self) -> None:
        """Logs the means of the losses, what happened while collecting, and the speed since the last report."""
        self.check()
        elapsed, seconds = self.clock.read()
        metrics: dict[str, float] = {}
        if self.totals is not None:
            means = (self.totals / self.since_log).tolist()
            metrics |= {f"train/{name}": mean for name, mean in zip(self.names, means, strict=True)}
        metrics |= {f"train/{name}": value for name, value in self.pipeline.source.statistics().items()}
        metrics["train/updates"] = float(self.updates)
        if elapsed > 0:
            steps, updates = self.step - self.timed_from[0], self.updates - self.timed_from[1]
            metrics["perf/updates_per_second"] = updates / elapsed
            if self.simulates:
                metrics["perf/env_steps_per_second"] = steps / elapsed
            if updates:
                metrics["perf/update_ms"] = 1e3 * seconds.get("update", 0.0) / updates
            metrics |= {f"perf/{name}_share": seconds.get(name, 0.0) / elapsed for name in ACTIVITIES}
        self.totals, self.since_log, self.timed_from = None, 0, (self.step, self.updates)
        self._publish(metrics)

    def evaluate(self) -> None:
        """Measures the deterministic policy (or the model) on held-out data."""
        with self.clock.measure("evaluate"):
            metrics = self.pipeline.source.evaluate(self.pipeline.learner)
        self._publish({f"eval/{name}": value for name, value in metrics.items()})
        objective = self.pipeline.recipe.data.objective
        if objective and math.isfinite(metrics.get(objective[0], math.nan)):
            self.score = metrics[objective[0]] * (1 if objective[1] == "maximize" else -1)
            self.best = max(self.best, self.score)

    def save(self) -> None:
        """Hands a checkpoint to its writer, never one with numbers that are not finite.

        ``perf/checkpoint_ms`` is the time that the training waits for it.
        """
        self.check()
        started = time.perf_counter()
        with self.clock.measure("checkpoint"):
            self.writer.save(self.step, self.state_dict(), self.score)
        if self.saved != self.step:  # a signal may ask for another at the same step
            self._publish({"perf/checkpoint_ms": 1e3 * (time.perf_counter() - started)})
        self.saved = self.step

    def state_dict(self) -> State:
        """Everything that a resumed training needs."""
        return {
            "pipeline": self.pipeline.state_dict(),
            "generators": generators.state_dict(),
            "gradients": self.gradients.state_dict(),
            "cursor": self.journal.mark(),
            **{name: getattr(self, name) for name in COUNTERS},
        }

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""
        self.pipeline.load_state_dict(state["pipeline"])
        self.gradients.load_state_dict(state["gradients"])
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.timed_from = (self.step, self.updates)
        if self.totals is not None:
            self.totals = self.totals.to(self.pipeline.device)
        generators.load_state_dict(state["generators"])  # last, because restoring may draw from them

    def _publish(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics
        self.journal.log(metrics, self.step)
