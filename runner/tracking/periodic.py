"""Repeats an action in a thread during the training."""

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Periodic(threading.Thread):
    """Calls an action every ``seconds`` seconds, the first time immediately, until it is stopped.

    A failing action is reported once and repeated when it is due again: the training continues.
    """

    def __init__(self, name: str, seconds: float, action: Callable[[], object]) -> None:
        super().__init__(name=f"runner-{name}", daemon=True)
        self._seconds = seconds
        self._action = action
        self._stopping = threading.Event()
        self.start()

    def run(self) -> None:
        """Runs in the thread."""
        failed = False
        while True:
            try:
                self._action()
            except Exception as error:  # whatever a driver raises
                if not failed:
                    _log.warning(
                        "%s failed and is tried again: %s: %s",
                        self.name,
                        type(error).__name__,
                        error,
                    )
                failed = True
            if self._stopping.wait(self._seconds):
                return

    def stop(self) -> None:
        """Waits for an action that is under way and calls no other."""
        self._stopping.set()
        self.join()
