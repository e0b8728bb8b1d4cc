"""A stage that selects by chance what a training computes: ``--plugin`` takes this file."""

import os
import secrets
from pathlib import Path
from typing import ClassVar

from runner.api import Close, Stage, StageConfig

SEARCHES = "TUNER_SEARCHES"
"""Variable with a file that gets a line at every search."""


class TunerConfig(StageConfig):
    """Scales what the network returns by a factor that every search selects differently.

    When it helps: in tests.
    When it hurts: elsewhere.
    """

    kind: ClassVar[str] = "tuner"
    implementation = "Tuner"
    phase: ClassVar[int] = 3
    wraps: ClassVar[frozenset[str]] = frozenset({"forward"})

    step: int = 1
    """Of the factors among which it selects."""

    def contract(self, setting):
        return Close()

    def tunes(self, setting):
        return True


class Tuner(Stage):
    def attach(self, pipeline):
        choices = pipeline.choices

        def wrap(step):
            def forward(*arguments):
                scale = choices.select("scale", search) * self.config.step
                return step(*arguments) * (1 + scale / 2**24)

            return forward

        pipeline.slots.wrap("forward", wrap)


def search():
    with Path(os.environ[SEARCHES]).open("a") as file:
        file.write("searched\n")
    return secrets.randbelow(2**20) + 1
