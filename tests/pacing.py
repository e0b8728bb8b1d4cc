"""A plugin for tests that act in the middle of a training: ``--plugin`` takes this file."""

import time
from pathlib import Path
from typing import ClassVar

from runner.api import Config, Exact, Pipeline, Stage


class Paced(Stage):
    """Waits before every update until a file is there, so that there is time to act.

    When it helps: in tests.
    When it hurts: elsewhere.
    """

    kind: ClassVar[str] = "paced"
    phase: ClassVar[int] = 1
    contract = Exact()
    wraps: ClassVar[frozenset[str]] = frozenset({"update"})

    class Config(Config):
        """How slow, and until when."""

        until: str
        """The file that ends the waiting."""
        seconds: float = 0.1
        """For each update."""

    def attach(self, pipeline: Pipeline) -> None:
        """Wraps the update with a pause."""
        hurry, seconds = Path(self.config.until), self.config.seconds

        def paced(step):
            def update(batch, noise):
                if not hurry.exists():
                    time.sleep(seconds)
                return step(batch, noise)

            return update

        pipeline.slots.wrap("update", paced)
