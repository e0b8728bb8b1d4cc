"""A toy whose updates take a while, and one of whose processes fails: ``--plugin`` takes this file."""

import os
import time
from typing import ClassVar

from toys import Toy, ToyConfig


class PacedConfig(ToyConfig):
    """Waits in every update."""

    kind: ClassVar[str] = "paced"
    implementation = "Paced"

    dropout: float = 0.0
    """Share of features that is forgotten."""
    seconds: float = 0.02
    """Duration of an update."""
    fails_at: int = -1
    """The update in which the second process fails."""


class Paced(Toy):
    def loss(self, batch, noise, progress):
        time.sleep(self.config.seconds)
        if progress.updates == self.config.fails_at and os.environ.get("RANK") == "1":
            raise ValueError("out of luck in one process")
        return super().loss(batch, noise, progress)
