"""Something done again and again beside the training."""

import threading
from collections.abc import Callable


class Periodic(threading.Thread):
    """Calls an action every so many seconds, the first time at once, until it is stopped."""

    def __init__(self, name: str, seconds: float, action: Callable[[], object]) -> None:
        super().__init__(name=f"runner-{name}", daemon=True)
        self._seconds = seconds
        self._action = action
        self._stopping = threading.Event()
        self.start()

    def run(self) -> None:
        """Runs in the thread."""
        self._action()
        while not self._stopping.wait(self._seconds):
            self._action()

    def stop(self) -> None:
        """Waits for an action that is under way and calls no other."""
        self._stopping.set()
        self.join()
