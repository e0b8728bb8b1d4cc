"""Progress display and closing table of a training."""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.live import LiveBar
from runner.system.console import CleanText, Console
from runner.system.lines import amount, duration, figure, labelled
from runner.system.names import shown_path
from runner.system.synthetic import SYNTHETIC_REMARK

if TYPE_CHECKING:
    from runner.recipe.recipe import Recipe
    from runner.train.result import RunResult

WARM_UP = "warm-up"
RECENT_SECONDS, SAMPLE_SECONDS = 10.0, 0.5
_LABEL = 9
"""Columns of the closing table's labels."""


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
        self.first: tuple[float, int] | None = None
        """The clock starts with the first update, for a warm-up has another speed."""
        self.progressed = 0.0

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Takes note of progress; the thread shows it."""
        now = time.monotonic()
        if self.first is None or self.innermost.name == WARM_UP:
            self.first = now, step
            self.samples.clear()
        self.progressed, self.step, self.metrics = now, step, metrics
        if not self.samples or now - self.samples[-1][0] >= SAMPLE_SECONDS:
            self.samples.append((now, step))

    def improved(self, best: float) -> None:
        """Takes note of the objective's best value so far."""
        self.best = best

    def completed(self) -> float:
        """Steps."""
        return self.step

    def counted(self) -> str:
        """Returns the finished and the total number of steps as text."""
        return f"{self.step:,}/{self.total:,} {self.unit} ({self.step / (self.total or 1):.0%})"

    def lines(self) -> list[str]:
        """Phase, speed and time left; then metrics, those of the evaluation first."""
        parts = [self.doing(self.progressed)]
        if speeds := self.speeds():
            recent, mean = speeds
            parts.append(f"{figure(recent, 2)} {self.unit}/s (mean {figure(mean, 2)})")
            parts.append(f"{duration(((self.total or 0) - self.step) / mean)} left")
        return [", ".join(parts), *filter(None, (self.shown_metrics(label) for label in ("eval", "train")))]

    def speeds(self) -> tuple[float, float] | None:
        """Returns the recent and the mean steps per second; None before the first progress."""
        now, samples = time.monotonic(), tuple(self.samples)
        if self.first is None or self.step == self.first[1]:
            return None
        mean = (self.step - self.first[1]) / (now - self.first[0])
        began, step = next((each for each in reversed(samples) if now - each[0] >= RECENT_SECONDS), samples[0])
        return (self.step - step) / min(now - began, RECENT_SECONDS), mean

    def shown_metrics(self, label: str) -> str:
        """``eval return -3, success_rate 0.5``, with the best value of the objective; empty where there is none."""
        found = {name: self.metrics[key] for name in self.headline if (key := f"{label}/{name}") in self.metrics}
        values = {name: figure(value, 3) for name, value in found.items()}
        if label == "eval" and self.best is not None:
            values[self.objective] = f"{values.get(self.objective, '-')} (best {figure(self.best, 3)})"
        return f"{label} " + ", ".join(f"{name} {value}" for name, value in values.items()) if values else ""


def show(result: "RunResult", headline: Sequence[str], console: Console) -> None:
    """Prints the result, the time, the stages and the location of a run."""
    from runner.tracking.listing import headed

    evaluated = {name[5:]: value for name, value in result.metrics.items() if name.startswith("eval/")}
    ordered = [name for name in headline if name in evaluated] + sorted(set(evaluated) - set(headline))
    learnt = [f"{name} {figure(evaluated[name])}" for name in ordered]
    stages = []
    for report in result.stages:
        state = "active" if report.active else f"inactive: {report.reason}"
        stages.append("; ".join([f"{report.kind} {state}", *report.notes]))
    following = [result.resume, "runner ls"]
    if result.status == "FINISHED":
        digits = result.run_name.rpartition("-")[2]
        again = result.resume.replace(f"resume {result.run_name}", f"evaluate {digits}")
        following = [again, f"runner compare {digits} OTHER_RUN", "runner ui"]
    kept = []
    if best := result.best:
        kept = [
            f"{best.metric[5:]} {figure(best.value)} after {amount(best.step, best.unit)}: "
            f"{_checkpoint(best.checkpoint)}"
        ]
    newest = []
    if result.status != "FINISHED":
        path = result.newest_checkpoint
        newest = [_checkpoint(path) if path else "no checkpoint has been written"]
    console.print(headed(result.run_name, result.status), soft_wrap=True)
    for label, lines in (
        ("result", learnt or ["nothing was evaluated"]),
        ("best", kept),
        ("newest", newest),
        ("data", [SYNTHETIC_REMARK] if result.synthetic else []),
        ("time", _time(result)),
        ("stages", stages or ["none (baseline)"]),
        *([("sentinel", [result.sentinel])] if result.sentinel else []),
        ("run", [f"MLflow id {result.run_id}", shown_path(Path(result.run_dir))]),
        ("next", following),
    ):
        for beginning, part in labelled(f"{label:{_LABEL}}", lines, console.width):
            console.print(CleanText.assemble((beginning, "bold"), part), soft_wrap=True)


def _checkpoint(path: str) -> str:
    return f"checkpoints/{Path(path).name}"


def _time(result: "RunResult") -> list[str]:
    """Returns lines about the time of the command, of an update, and of every activity."""
    metrics = result.metrics
    resumed = ""
    if result.resumed_at is not None:
        unit = "" if result.best is None else f"{result.best.unit.removesuffix('s').replace('_', ' ')} "
        resumed = f" since resuming at {unit}{result.resumed_at:,}"
    startup = result.startup_seconds
    training = duration(result.seconds - startup)
    lines = [f"{duration(result.seconds)}{resumed}: start-up {duration(startup)}, training {training}"]
    if "perf/update_ms" in metrics:
        first = metrics.get("perf/first_update_seconds", 0.0)
        took = f"{first:.1f} s" if first >= 1 else f"{1000 * first:.3g} ms"
        lines.append(f"{figure(metrics['perf/update_ms'], 3)} ms per update; the first took {took}")
    if "perf/roofline_fraction" in metrics:
        lines.append(f"{metrics['perf/roofline_fraction']:.0%} of this machine's limit (its roofline)")
    shares = sorted(result.shares.items(), key=lambda item: -item[1])
    lines.append("shares of all: " + ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005))
    return lines
