"""A bar and what is being done now, drawn beside the work, so that a long step of it is never silent."""

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
from runner.system.lines import wrapped
from runner.tracking.periodic import Periodic

LINE_SECONDS, DRAWINGS_A_SECOND = 5.0, 4.0
LINE_SHARE, LONGEST_SECONDS = 0.05, 60.0
"""Lines are so much of the time apart that has passed, and no more than a minute: hours should not fill a log."""
BRIEF_SECONDS = 0.5
"""A phase that lasts no longer is not shown: the one that it interrupts is."""
SILENT_SECONDS = 1.0
"""After so many seconds without progress it is said for how long there was none."""


class Phase(NamedTuple):
    """What is being done, since when, and inside of what."""

    name: str
    since: float
    outer: "Phase | None" = None


class LiveBar(ExitStack):
    """Says on stderr what is being done, and how much of it: seconds, of so many in all if that is known.

    On a terminal it is a bar with lines below it, which are gone at the end; elsewhere a line every
    few seconds, later every minute, the first at once. It is drawn by a thread.
    """

    shown = 0
    """Number of bars that are shown in this process."""

    def __init__(self, console: Console, name: str, total: float | None = None, doing: str = "starting") -> None:
        """Begins to count; it is shown inside the ``with``."""
        super().__init__()
        self.console, self.name, self.total = console, name, total
        self.started = self.printed = time.monotonic()
        self.innermost = Phase(doing, self.started)

    def __enter__(self) -> Self:
        LiveBar.shown += 1
        self.callback(self._leave)
        if self.console.is_terminal and not self.console.quiet:
            drawn = Live(
                console=self.console, get_renderable=self.drawn, refresh_per_second=DRAWINGS_A_SECOND, transient=True,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self.enter_context(drawn).refresh()
            self._print_above(drawn)
        elif not self.console.quiet:
            self.print_line()  # here, for the thread may have to wait for what is imported next
            self.callback(Periodic("progress", LINE_SECONDS, self._print_next).stop)
        return self

    def _leave(self) -> None:
        LiveBar.shown -= 1

    def _print_above(self, drawn: Live) -> None:
        """Prints above the bar what the rest of the process writes to stdout and stderr."""
        output = PrintedLines(drawn.console, sys.stdout)
        errors = PrintedLines(drawn.console, sys.stderr)
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
        finally:  # what was said at the beginning is not true for ever
            self.innermost = outer if outer.outer else Phase("preparing", time.monotonic())

    def say(self, text: str) -> None:
        """Prints a line that stays; on a terminal no word of it is torn."""
        for part in wrapped(text, self.console.width) if self.console.is_terminal else [text]:
            self.console.print(part, soft_wrap=True, highlight=False)

    def doing(self, progressed: float = 0.0) -> str:
        """The phase that is going on, with its seconds unless there was progress at that time, lately and since."""
        now, phase = time.monotonic(), self.innermost
        while phase.outer is not None and now - phase.since < BRIEF_SECONDS:
            phase = phase.outer
        silent = now - max(phase.since, progressed)
        return f"{phase.name} ({silent:.0f} s)" if silent >= SILENT_SECONDS else phase.name

    def completed(self) -> float:
        """How much of the total is done: seconds."""
        return time.monotonic() - self.started

    def counted(self) -> str:
        """The same in words."""
        return f"{self.completed():.0f}{f'/{self.total:.0f}' if self.total else ''} s"

    def lines(self) -> list[str]:
        """What stands below the bar."""
        return [self.doing()]

    def print_line(self) -> None:
        """Prints all of it as one line."""
        self.printed = time.monotonic()
        self.say(f"{self.name}: {self.counted()}, {'; '.join(self.lines())}")

    def _print_next(self) -> None:
        now = time.monotonic()
        apart = min(LINE_SHARE * (now - self.started), LONGEST_SECONDS)
        if now - self.printed > max(apart, LINE_SECONDS) - LINE_SECONDS / 2:  # it is asked every LINE_SECONDS
            self.print_line()

    def drawn(self) -> RenderableType:
        """The bar and its lines, which are wrapped where the screen ends."""
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True, overflow="ellipsis")
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        done = self.completed()
        total = None if self.total is None else max(self.total, done)
        bar.add_row(CleanText(self.name), ProgressBar(total, done, pulse=total is None), CleanText(self.counted()))
        parts = (part for line in self.lines() for part in wrapped(line, self.console.width))
        return Group(bar, *(CleanText(part, no_wrap=True, overflow="ellipsis") for part in parts))
