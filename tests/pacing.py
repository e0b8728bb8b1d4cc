"""A plugin for tests that act in the middle of a training: ``--plugin`` takes this file."""

import time
from pathlib import Path
from typing import ClassVar

from runner.api import Exact, Pipeline, Setting, Stage, StageConfig
from runner.training import run


class PacedConfig(StageConfig):
    """Waits before every update until a file is there, so that there is time to act.

    When it helps: in tests.
    When it hurts: elsewhere.
    """

    kind: ClassVar[str] = "paced"
    implementation = "Paced"
    phase: ClassVar[int] = 1
    wraps: ClassVar[frozenset[str]] = frozenset({"update"})

    until: str
    """The file that ends the waiting."""
    seconds: float = 0.1
    """For each update."""
    patience: float = 30.0
    """Seconds for which the end of the training waits for MLflow."""

    def contract(self, setting: Setting) -> Exact:
        """It only waits."""
        return Exact()


class Paced(Stage):
    """An update with a pause before it."""

    def attach(self, pipeline: Pipeline) -> None:
        """Wraps the update with a pause."""
        run.PATIENCE_SECONDS = self.config.patience
        hurry, seconds = Path(self.config.until), self.config.seconds

        def paced(step):
            def update(*arguments):
                if not hurry.exists():
                    time.sleep(seconds)
                return step(*arguments)

            return update

        pipeline.slots.wrap("update", paced)
