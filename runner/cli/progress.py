"""Progress display and closing table of a training."""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.live import LiveBar
from runner.system.console import Console
from runner.system.suggestions import shown_path
from runner.system.synthetic import SMOKE_REMARK, SYNTHETIC_REMARK
from runner.system.text_lines import amount, duration, figure

if TYPE_CHECKING:
    from runner.recipe.recipe import Recipe
    from runner.training.result import RunResult

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
        self.first: tuple[float, int] | None = None
        """The clock starts with the first update, for a warm-up has another speed."""
        self.progressed = 0.0

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Takes note of progress; the thread shows it."""
        current_time = time.monotonic()
        if self.first is None or self.innermost.name == WARM_UP:
            self.first = (current_time, step)
            self.samples.clear()
        self.progressed = current_time
        self.step = step
        self.metrics = metrics
        # Fast trainings report thousands of steps per second.
        if not self.samples or current_time - self.samples[-1][0] >= SAMPLE_SECONDS:
            self.samples.append((current_time, step))

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
        speeds = self.speeds()
        if speeds:
            recent, mean = speeds
            remaining_steps = (self.total or 0) - self.step
            parts.append(f"{figure(recent, 2)} {self.unit}/s (mean {figure(mean, 2)})")
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


def show(result: "RunResult", headline: Sequence[str], console: Console) -> None:
    """Prints the result, the time, the stages and the location of a run."""
    from runner.tracking.run_summary import print_sections

    print_sections(result.run_name, result.status, _sections(result, headline), console)


def _sections(result: "RunResult", headline: Sequence[str]) -> dict[str, list[str]]:
    """Returns the lines of the closing table by label."""
    sections = {
        "result": _evaluation(result, headline) or ["nothing was evaluated"],
        "best": _best(result),
        "newest": _newest_checkpoint(result),
        "data": [SYNTHETIC_REMARK] if result.synthetic else [],
        "smoke": [SMOKE_REMARK] if result.smoke else [],
        "time": _time(result),
        "stages": _stages(result) or ["none (baseline)"],
    }
    if result.ended_early:
        sections["ended"] = [f"early: {result.ended_early}"]
    if result.sentinel:
        sections["sentinel"] = [result.sentinel]
    sections["run"] = [f"MLflow id {result.run_id}", shown_path(Path(result.run_dir))]
    sections["next"] = _next_commands(result)
    return sections


def _evaluation(result: "RunResult", headline: Sequence[str]) -> list[str]:
    evaluated = {name[5:]: value for name, value in result.metrics.items() if name.startswith("eval/")}
    names = [name for name in headline if name in evaluated]
    names += sorted(set(evaluated) - set(headline))
    return [f"{name} {figure(evaluated[name])}" for name in names]


def _best(result: "RunResult") -> list[str]:
    best = result.best
    if best is None:
        return []
    progress = amount(best.step, best.unit)
    return [f"{best.metric[5:]} {figure(best.value)} after {progress}: {_checkpoint(best.checkpoint)}"]


def _newest_checkpoint(result: "RunResult") -> list[str]:
    """Returns from where the run would be resumed; nothing if it is finished."""
    if result.status == "FINISHED":
        return []
    path = result.newest_checkpoint
    return [_checkpoint(path) if path else "no checkpoint has been written"]


def _stages(result: "RunResult") -> list[str]:
    lines = []
    for report in result.stages:
        state = "active" if report.active else f"inactive: {report.reason}"
        lines.append("; ".join([f"{report.kind} {state}", *report.notes]))
    return lines


def _next_commands(result: "RunResult") -> list[str]:
    if result.status != "FINISHED":
        return [result.resume, "runner ls"]
    digits = result.run_name.rpartition("-")[2]
    evaluate = result.resume.replace(f"resume {result.run_name}", f"evaluate {digits}")
    return [evaluate, f"runner compare {digits} OTHER_RUN", "runner ui"]


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
        first_seconds = metrics.get("perf/first_update_seconds", 0.0)
        first_update = f"{first_seconds:.1f} s" if first_seconds >= 1 else f"{1000 * first_seconds:.3g} ms"
        lines.append(f"{figure(metrics['perf/update_ms'], 3)} ms per update; the first took {first_update}")
    if "perf/roofline_fraction" in metrics:
        lines.append(f"{metrics['perf/roofline_fraction']:.0%} of this machine's limit (its roofline)")
    shares = sorted(result.shares.items(), key=lambda item: -item[1])
    share_texts = [f"{name} {share:.0%}" for name, share in shares if share >= 0.005]
    lines.append(f"shares of all: {', '.join(share_texts)}")
    return lines
