"""A progress bar that a thread draws, so that a long step of the work never
leaves the terminal silent.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import NamedTuple, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from runner.system.console import CleanText, Console, PrintedLines
from runner.system.text_lines import wrapped
from runner.tracking.periodic import Periodic

LINE_SECONDS = 5.0
DRAWINGS_A_SECOND = 4.0
LINE_SHARE = 0.05
"""The pause between two lines, as a share of the time that has passed."""
LONGEST_SECONDS = 60.0
"""Upper limit of that pause, which would else become hours."""
BRIEF_SECONDS = 0.5
"""A phase that lasts no longer is not shown: the one that it interrupts is."""
SILENT_SECONDS = 1.0
"""Seconds without progress after which the time since the last progress is displayed."""


class Phase(NamedTuple):
    """A phase of the work, when it started, and the phase that contains it."""

    name: str
    start: float
    outer: "Phase | None" = None


class LiveBar(ExitStack):
    """Reports on stderr the current phase and the progress: the seconds that have passed, of a
    total if it is known.

    On a terminal it is a bar with lines below it, which are removed at the end; elsewhere a line
    every few seconds, later every minute, the first one immediately. A thread draws it.
    """

    shown = 0
    """Number of bars that are shown in this process."""

    def __init__(self, console: Console, name: str, total: float | None = None, doing: str = "starting") -> None:
        """Starts the clock; the bar is displayed inside the ``with``."""
        super().__init__()
        self.console = console
        self.name = name
        self.total = total
        self.started = time.monotonic()
        self.printed = self.started
        self.innermost = Phase(doing, self.started)

    def __enter__(self) -> Self:
        LiveBar.shown += 1
        self.callback(self._leave)
        if self.console.is_terminal and not self.console.quiet:
            live = Live(
                console=self.console,
                get_renderable=self.drawn,
                refresh_per_second=DRAWINGS_A_SECOND,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self.enter_context(live).refresh()
            self._print_above(live)
        elif not self.console.quiet:
            # Not in the thread, which may have to wait for the next import.
            self.print_line()
            self.callback(Periodic("progress", LINE_SECONDS, self._print_next).stop)
        return self

    def _leave(self) -> None:
        LiveBar.shown -= 1

    def _print_above(self, live: Live) -> None:
        """Prints above the bar what the rest of the process writes to stdout and stderr."""
        output = PrintedLines(live.console, sys.stdout)
        errors = PrintedLines(live.console, sys.stderr)
        self.enter_context(redirect_stdout(output))
        self.enter_context(redirect_stderr(errors))
        self.callback(output.flush)
        self.callback(errors.flush)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Entered around what takes a while; inside another phase, it is shown in its place."""
        outer = self.innermost
        self.innermost = Phase(name, time.monotonic(), outer)
        try:
            yield
        finally:  # the name of a phase is valid only inside of it
            self.innermost = outer if outer.outer else Phase("preparing", time.monotonic())

    def say(self, text: str) -> None:
        """Prints a line that stays; on a terminal no word of it is torn."""
        lines = wrapped(text, self.console.width) if self.console.is_terminal else [text]
        for line in lines:
            self.console.print(line, soft_wrap=True, highlight=False)

    def doing(self, progressed: float = 0.0) -> str:
        """Returns the current phase, with the seconds since the last progress if these are many."""
        current_time = time.monotonic()
        phase = self.innermost
        while phase.outer is not None and current_time - phase.start < BRIEF_SECONDS:
            phase = phase.outer
        silent = current_time - max(phase.start, progressed)
        return f"{phase.name} ({silent:.0f} s)" if silent >= SILENT_SECONDS else phase.name

    def completed(self) -> float:
        """Returns the part of the total that is finished, in seconds."""
        return time.monotonic() - self.started

    def counted(self) -> str:
        """Returns the finished part and the total as text."""
        total = f"/{self.total:.0f}" if self.total else ""
        return f"{self.completed():.0f}{total} s"

    def lines(self) -> list[str]:
        """Returns the lines below the bar."""
        return [self.doing()]

    def print_line(self) -> None:
        """Prints all of it as one line."""
        self.printed = time.monotonic()
        self.say(f"{self.name}: {self.counted()}, {'; '.join(self.lines())}")

    def _print_next(self) -> None:
        current_time = time.monotonic()
        pause = min(LINE_SHARE * (current_time - self.started), LONGEST_SECONDS)
        # This method is called every LINE_SECONDS, a little early or late.
        if current_time - self.printed > max(pause, LINE_SECONDS) - LINE_SECONDS / 2:
            self.print_line()

    def drawn(self) -> RenderableType:
        """The bar and its lines, which are wrapped where the screen ends."""
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True, overflow="ellipsis")
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        done = self.completed()
        total = None if self.total is None else max(self.total, done)
        progress_bar = ProgressBar(total, done, pulse=total is None)
        bar.add_row(CleanText(self.name), progress_bar, CleanText(self.counted()))
        lines = [piece for line in self.lines() for piece in wrapped(line, self.console.width)]
        return Group(bar, *(CleanText(line, no_wrap=True, overflow="ellipsis") for line in lines))
