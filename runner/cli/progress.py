"""Progress display of a training."""

import time
from collections import deque
from typing import TYPE_CHECKING

from runner.cli.live import LiveBar
from runner.system.console import Console
from runner.system.text_lines import duration, figure

if TYPE_CHECKING:
    from runner.recipe.recipe import Recipe

WARM_UP = "warm-up"
RECENT_SECONDS = 10.0
SAMPLE_SECONDS = 0.5


class ProgressDisplay(LiveBar):
    """Shows the phase, recent and mean speed, the time left, and the metrics that a person looks at first.

    Args:
        console: Where it is shown.
        recipe: What is trained.
        step: The length of the training up to now; of a run that is resumed, up to its checkpoint.
    """

    def __init__(self, console: Console, recipe: "Recipe", step: int = 0) -> None:
        self.unit, length = recipe.length
        super().__init__(console, recipe.name, length)
        self.objective = recipe.objective.name if recipe.objective else ""
        self.headline = dict.fromkeys((*recipe.headline, *filter(None, [self.objective])))
        self.best: float | None = None
        self.step = step
        self.metrics = dict[str, float]()
        self.samples = deque[tuple[float, int]](maxlen=round(RECENT_SECONDS / SAMPLE_SECONDS) + 1)
        """When how far the training was, lately."""
        self.sample_at = 0.0
        """The time of the next sample."""
        self.first: tuple[float, int] | None = None
        """The clock starts with the first update, for a warm-up has another speed."""
        self.progressed = 0.0

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Takes note of progress; the thread shows it."""
        self.step = step
        self.metrics = metrics
        self.progressed = current_time = time.monotonic()
        # Fast trainings report thousands of steps per second.
        if current_time < self.sample_at:
            return
        is_warm = self.innermost.name != WARM_UP
        if self.first is None or not is_warm:
            self.first = (current_time, step)
            self.samples.clear()
        self.samples.append((current_time, step))
        if is_warm:
            self.sample_at = current_time + SAMPLE_SECONDS

    def improved(self, best: float) -> None:
        """Takes note of the objective's best value so far."""
        self.best = best

    def completed(self) -> float:
        """Steps."""
        return self.step

    def counted(self) -> str:
        """Returns the finished and the total number of steps as text."""
        # The last batch may exceed a length that is counted in samples or tokens.
        share = min(1.0, self.step / (self.total or 1))
        return f"{self.step:,}/{self.total:,} {self.unit} ({share:.0%})"

    def lines(self) -> list[str]:
        """Phase, speed and time left; then metrics, those of the evaluation first."""
        parts = [self.doing(self.progressed)]
        speeds = self.speeds()
        if speeds:
            recent, mean = speeds
            remaining_steps = (self.total or 0) - self.step
            parts.append(f"{figure(recent, 2)} {self.unit}/s (mean {figure(mean, 2)})")
            # The duration of the last evaluation is not known.
            if remaining_steps > 0:
                parts.append(f"{duration(remaining_steps / mean)} left")
        metrics = [self.shown_metrics(label) for label in ("eval", "train")]
        return [", ".join(parts), *filter(None, metrics)]

    def speeds(self) -> tuple[float, float] | None:
        """Returns the recent and the mean steps per second; None before the first progress."""
        current_time = time.monotonic()
        # A copy, because the training adds samples meanwhile.
        samples = tuple(self.samples)
        if self.first is None or self.step == self.first[1]:
            return None
        first_time, first_step = self.first
        mean = (self.step - first_step) / (current_time - first_time)
        old_enough = (sample for sample in reversed(samples) if current_time - sample[0] >= RECENT_SECONDS)
        start_time, start_step = next(old_enough, samples[0])
        recent = (self.step - start_step) / min(current_time - start_time, RECENT_SECONDS)
        return recent, mean

    def shown_metrics(self, label: str) -> str:
        """``eval return -3, success_rate 0.5``, with the best value of the objective; empty where there is none."""
        values = {}
        for name in self.headline:
            key = f"{label}/{name}"
            if key in self.metrics:
                values[name] = figure(self.metrics[key], 3)
        if label == "eval" and self.best is not None:
            values[self.objective] = f"{values.get(self.objective, '-')} (best {figure(self.best, 3)})"
        if not values:
            return ""
        text = ", ".join(f"{name} {value}" for name, value in values.items())
        return f"{label} {text}"
