"""How a training goes, while it goes: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

LINE_SECONDS = 5.0
BAR_SECONDS = 0.2


class _Bar(Progress):
    """A bar, and below it a line that is cut where the screen ends."""

    details = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        """The two lines."""
        yield self.make_tasks_table(self.tasks)
        yield Text(self.details, no_wrap=True, overflow="ellipsis")


class ProgressDisplay:
    """Shows steps per second, the headline metrics and the time left on stderr."""

    def __init__(self, console: Console, name: str, goal: int, unit: str, headline: Sequence[str]) -> None:
        self.console, self.name, self.goal, self.unit, self.headline = console, name, goal, unit, headline
        self.started = self.shown = 0.0
        self.bar: _Bar | None = None
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self.bar = _Bar(*columns, console=console, transient=True)
            self.task = self.bar.add_task(name, total=goal)

    def __enter__(self) -> Self:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()

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
        details = ", ".join([f"{speed:,.0f} {self.unit}/s", *self._newest(metrics)])
        if self.bar:
            self.bar.details = details
            self.bar.update(self.task, completed=min(step, self.goal))
            return
        left = (self.goal - step) / speed if speed else 0.0
        self.console.print(
            f"{self.name}: {step:,}/{self.goal:,} {self.unit} ({step / self.goal:.0%}), {details}, {left:.0f} s left",
            soft_wrap=True, highlight=False, markup=False,
        )  # fmt: skip

    def _newest(self, metrics: dict[str, float]) -> list[str]:
        shown = []
        for name in self.headline:
            value = metrics.get(f"train/{name}", metrics.get(f"eval/{name}"))
            if value is not None:
                shown.append(f"{name} {value:.3g}")
        return shown
