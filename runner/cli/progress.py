"""What is shown of a training: how it goes, a bar on a terminal and plain lines elsewhere, and what it has come to."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from runner.system.secrets import redact

if TYPE_CHECKING:
    from runner.train.run import RunResult

LINE_SECONDS, BAR_SECONDS = 5.0, 0.2


class _Bar(Progress):
    """A bar, and below it a line that is cut where the screen ends."""

    details = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        """The two lines."""
        yield self.make_tasks_table(self.tasks)
        yield Text(self.details, no_wrap=True, overflow="ellipsis")


class ProgressDisplay(ExitStack):
    """Shows steps per second, the headline metrics and the time left on stderr."""

    def __init__(self, console: Console, name: str, goal: int, unit: str, headline: Sequence[str]) -> None:
        super().__init__()
        self.console, self.name, self.goal, self.unit, self.headline = console, name, goal, unit, headline
        self.started = self.shown = 0.0
        self.bar: _Bar | None = None
        if console.is_terminal:
            columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
            self.bar = self.enter_context(_Bar(*columns, TimeRemainingColumn(), console=console, transient=True))
            self.task = self.bar.add_task(name, total=goal)

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Shows progress, at most a few times a second; a line every few seconds where there is no terminal."""
        now = time.monotonic()
        if not self.started:  # the clock starts with the training, not with its assembly
            self.started = self.shown = now
            self.first = step
        if now - self.shown < (BAR_SECONDS if self.bar else LINE_SECONDS):
            return
        self.shown = now
        speed = (step - self.first) / (now - self.started)
        details = f"{speed:,.0f} {self.unit}/s"
        for name in self.headline:
            value = metrics.get(f"train/{name}", metrics.get(f"eval/{name}"))
            if value is not None:
                details += f", {name} {value:.3g}"
        if self.bar:
            self.bar.details = details
            self.bar.update(self.task, completed=min(step, self.goal))
            return
        left = (self.goal - step) / speed if speed else 0.0
        self.console.print(
            f"{self.name}: {step:,}/{self.goal:,} {self.unit} ({step / self.goal:.0%}), {details}, {left:.0f} s left",
            soft_wrap=True, highlight=False, markup=False,
        )  # fmt: skip


def show(result: "RunResult", headline: Sequence[str], console: Console) -> None:
    """Prints what was learnt, how fast, with which stages, and where to find it."""
    table = Table(title=Text(f"{result.run_name}: {result.status}"), title_justify="left", show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    evaluated = {name[5:]: value for name, value in result.metrics.items() if name.startswith("eval/")}
    ordered = [name for name in headline if name in evaluated] + sorted(set(evaluated) - set(headline))
    learnt = [f"{name} {evaluated[name]:.4g}" for name in ordered]
    stages = []
    for report in result.stages:
        state = "active" if report.active else f"inactive: {report.reason}"
        stages.append("; ".join([f"{report.kind} {state}", *report.notes]))
    following = [result.resume, "runner ls"]
    if result.status == "FINISHED":
        following = [f"runner compare {result.run_name.rpartition('-')[2]} OTHER_RUN", "runner ui"]
    for label, lines in (
        ("learnt", learnt or ["nothing was evaluated"]),
        ("speed", _speed(result)),
        ("stages", stages or ["none: this is the baseline"]),
        ("run", [f"MLflow id {result.run_id}", result.run_dir]),
        ("next", following),
    ):
        table.add_row(label, Text(redact("\n".join(lines))))
    console.print(table)


def _speed(result: "RunResult") -> list[str]:
    metrics = result.metrics
    resumed = "" if result.resumed_at is None else f" since it was resumed at {result.resumed_at:,}"
    lines = [f"{result.seconds:.0f} s in all{resumed}"]
    if "perf/update_ms" in metrics:
        first = metrics.get("perf/first_update_seconds", 0.0)
        lines.append(f"{metrics['perf/update_ms']:.3g} ms per update; the first took {first:.1f} s")
    shares = {name: value for name, value in metrics.items() if name.startswith("perf/") and name.endswith("_share")}
    if shares:
        lines.append(", ".join(f"{name[5:-6]} {value:.0%}" for name, value in sorted(shares.items())))
    return lines
