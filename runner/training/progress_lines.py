"""Progress of a training as lines of text, for the output of a notebook's cell."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Self

from runner.recipe.recipe import Recipe
from runner.system.terminal import write
from runner.system.text_lines import amount, duration, figure
from runner.training.outputs import Display, NoOutput

LINE_SECONDS = 5.0
"""Shortest pause between two lines."""
LINE_SHARE = 0.05
"""The pause between two lines, as a share of the time that has passed."""
LONGEST_SECONDS = 60.0
"""Longest pause between two lines while a training makes progress."""


def is_notebook() -> bool:
    """Returns whether this process runs the cells of a notebook, or is a session of IPython."""
    # Only a process that has imported IPython can be one.
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_shell is not None and get_shell() is not None


@contextmanager
def displayed(recipe: Recipe, progress: bool | None) -> Iterator[Display]:
    """Returns the display of a training that a program starts.

    Args:
        recipe: The recipe that is trained.
        progress: Whether progress is printed; None prints it in a notebook only.
    """
    if is_notebook() if progress is None else progress:
        with ProgressLines(recipe) as display:
            yield display
    else:
        yield NoOutput()


class ProgressLines(AbstractContextManager["ProgressLines"]):
    """Prints a line at the start, every few seconds, later every minute, and at the end.

    Args:
        recipe: The recipe that is trained.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._name = recipe.name
        self._unit, self._length = recipe.length
        self._objective = recipe.objective.name if recipe.objective else ""
        self._headline = dict.fromkeys(
            filter(None, [*recipe.headline, self._objective])
        )
        self._best: float | None = None
        self._step = 0
        self._metrics: dict[str, float] = {}
        self._phase = "starting"
        self._start = time.monotonic()
        self._next_line = self._start

    def __enter__(self) -> Self:
        self._print_if_due()
        return self

    def __exit__(
        self,
        error: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Prints the last line; the error of a training that failed is enough."""
        if error is None:
            seconds = duration(time.monotonic() - self._start)
            self._print(f"ended after {seconds}")

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Prints a line if enough time has passed."""
        self._step = step
        self._metrics = metrics
        self._print_if_due()

    def improved(self, best: float) -> None:
        """Receives the best objective so far, which the next line contains."""
        self._best = best

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Prints a line about an activity if enough time has passed."""
        outer = self._phase
        self._phase = name
        self._print_if_due()
        try:
            yield
        finally:
            self._phase = outer

    def _print_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._next_line:
            pause = min(LINE_SHARE * (now - self._start), LONGEST_SECONDS)
            self._next_line = now + max(pause, LINE_SECONDS)
            self._print(self._phase)

    def _print(self, state: str) -> None:
        done = f"{self._step:,}/{amount(self._length, self._unit)}"
        metrics = filter(None, [self._describe("eval"), self._describe("train")])
        # Not stderr, which a notebook displays like an error.
        write(sys.stdout, f"{self._name}: {done}, {'; '.join([state, *metrics])}\n")

    def _describe(self, label: str) -> str:
        """Returns the primary metrics of the evaluation or the training; empty without one."""
        values = []
        for name in self._headline:
            value = self._metrics.get(f"{label}/{name}")
            if value is None:
                continue
            text = f"{name} {figure(value, 3)}"
            if label == "eval" and name == self._objective and self._best is not None:
                text += f" (best {figure(self._best, 3)})"
            values.append(text)
        return f"{label} {', '.join(values)}" if values else ""
