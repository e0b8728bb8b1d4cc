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
    from runner.plugin.progress import Progress
    from runner.training.loop import Loop
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
        advance: The display's own method, because a call more would delay every update.
    """

    def __init__(self, display: Display, limit: float | None) -> None:
        self._display = display
        self._limit = limit
        self._phases: list[str] = []
        self._since = time.monotonic()
        self._next_report = REPORT_SECONDS
        self._over = threading.Event()
        self.advance = display.advance
        self._progress: Progress | None = None
        self._stop: Stop | None = None

    def __enter__(self) -> StallReport:
        # A daemon does not keep the process alive.
        threading.Thread(target=self._watch, name="runner-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def start_training(self, loop: Loop) -> None:
        """Watches the progress of a training, and ends it when it exceeds the limit.

        The limit is for the training itself, not for a slow tracking store.
        """
        self._progress = loop.progress
        self._stop = loop.stop

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
        position = 0
        while not self._over.wait(_LOOK_SECONDS):
            progress = self._progress
            if progress is not None and progress.position != position:
                position = progress.position
                self._progressed()
            seconds = time.monotonic() - self._since
            if limit is not None and self._stop is not None and seconds > limit:
                message = (
                    f"{self.where()}: no progress for more than "
                    f"train.stall_s ({limit:g} s); raise the limit"
                )
                self._stop.interrupt(RunnerError(message))
                return
            if seconds > self._next_report:
                self._next_report *= 2
                hint = "train.stall_s=SECONDS sets a limit"
                if limit is not None:
                    hint = f"the limit is train.stall_s={limit:g}"
                # The function may have begun a moment ago: only the lack of progress is known.
                _log.warning(
                    "%s: no progress for %.0f s; %s", self.where(), seconds, hint
                )

    def where(self) -> str:
        """Returns the phase, and the function that is executed at this moment."""
        phase = self._phases[-1] if self._phases else "the training"
        return f"{phase}, at {place_of(main_frames())}"
