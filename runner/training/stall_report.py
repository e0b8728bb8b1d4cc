"""Reports code that does not return, and ends it after a limit."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from runner.plugin.plugin_errors import place_of
from runner.system.errors import RunnerError
from runner.training.signals import Stop, main_frames

if TYPE_CHECKING:
    from runner.training.outputs import Display

# Time without progress until the first report; it doubles with each further report.
REPORT_SECONDS = 60.0
_LOOK_SECONDS = 0.5
_log = logging.getLogger(__name__)


class StallReport:
    """A display that forwards everything, and reports missing progress in a separate thread.

    Progress is an update, or the start or end of another activity: an evaluation, a checkpoint, the
    sampling of a batch.

    Args:
        display: Receives everything.
        limit: Seconds without progress that end the training; None for no limit.

    Attributes:
        stop: Ends code that exceeds the limit.
    """

    def __init__(self, display: Display, limit: float | None) -> None:
        self._display = display
        self._limit = limit
        self._phases: list[str] = []
        self._since = time.monotonic()
        self._next_report = REPORT_SECONDS
        self._over = threading.Event()
        self.stop: Stop | None = None

    def __enter__(self) -> StallReport:
        # A daemon does not keep the process alive.
        threading.Thread(target=self._watch, name="runner-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Counts as progress, and is displayed."""
        self._progressed()
        self._display.advance(step, metrics)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Remembers the current activity, and displays it."""
        self._phases.append(name)
        self._progressed()
        try:
            with self._display.phase(name):
                yield
        finally:
            self._phases.pop()
            self._progressed()

    def improved(self, best: float) -> None:
        """Displays the best value."""
        self._display.improved(best)

    def _progressed(self) -> None:
        self._since = time.monotonic()
        self._next_report = REPORT_SECONDS

    def _watch(self) -> None:
        limit = self._limit
        while not self._over.wait(_LOOK_SECONDS):
            seconds = time.monotonic() - self._since
            # The limit is for the training itself, not for a slow tracking store.
            if limit is not None and self.stop is not None and seconds > limit:
                message = (
                    f"{self.where()} has not returned for more than "
                    f"train.stall_s ({limit:g} s); raise the limit"
                )
                self.stop.interrupt(RunnerError(message))
                return
            if seconds > self._next_report:
                self._next_report *= 2
                hint = "train.stall_s=SECONDS sets a limit"
                if limit is not None:
                    hint = f"the limit is train.stall_s={limit:g}"
                _log.warning(
                    "%s has not returned for %.0f s; %s", self.where(), seconds, hint
                )

    def where(self) -> str:
        """Returns the phase and the function that does not return."""
        phase = self._phases[-1] if self._phases else "the training"
        return f"{phase}: {place_of(main_frames())}"
