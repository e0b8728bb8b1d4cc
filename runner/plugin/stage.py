"""Base class for the implementation of a speed-up or memory saving, and the interfaces
that it uses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from runner.plugin.configs import SourceConfig
    from runner.plugin.context import Slots
    from runner.plugin.learner import Learner
    from runner.plugin.source import Batch, Source, State
    from runner.plugin.tuning import Choices


class Stage(ABC):
    """The implementation of a stage; one object for one pipeline.

    Torch is imported in its methods or by its module.
    """

    bytes: int | None = None
    """Size of the files that are needed if a program replaces a trained model's network."""
    checks_gradients: bool = False
    """Whether it skips steps of optimizers with gradients that are not finite (loss scaling)."""
    program_bytes: int = 0
    """Bytes of that program, which is in memory in addition to the network."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def program_calls(self) -> int:
        """Returns the calls that a program answered in place of a trained model's network."""
        return 0

    @property
    def network_calls(self) -> int:
        """Returns the calls that the network answered, although there is a program."""
        return 0

    def prepare(self, plan: Plan) -> None:  # noqa: B027 (most stages have nothing to prepare)
        """Changes what is built (the batch size) before anything is."""

    def adapt_source(self, data: SourceConfig) -> SourceConfig:
        """Returns the settings with which the source is built.

        They may change how batches are made, never what is in them. Also called when a run is
        resumed.
        """
        return data

    @abstractmethod
    def attach(self, pipeline: Pipeline) -> None:
        """Replaces or wraps its slots; learner and source exist, optimizers do not yet.

        As a stage for ``inference``, with optimizers and the weights of a finished run: modules may
        be replaced.
        """

    def closing_notes(self) -> Sequence[str]:
        """Returns remarks at the end of the training, for the closing table."""
        return ()

    def state_dict(self) -> State:
        """Returns the state that a resumed run needs to continue bit for bit."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""
        if state:
            stored = f"the checkpoint has {sorted(state)}"
            raise ValueError(f"stage '{self.config.kind}' has no state, but {stored}")


@dataclass(frozen=True)
class Probe:
    """The measurement of real training steps in a child process."""

    samples_per_second: float
    peak_bytes: int
    limit_bytes: int


class Plan(Protocol):
    """The values that ``Stage.prepare`` may change before anything is built."""

    batch_size: int

    def probe(self, batch_size: int) -> Probe | None:
        """Trains a few steps with that batch size in a child process; None if memory does not
        suffice.
        """

    def note(self, text: str) -> None:
        """Adds a remark on the stage to the closing table."""

    @property
    def choices(self) -> Choices:
        """Returns the selections that the stage makes by measuring, which the run records."""


class Pipeline(Protocol):
    """The pipeline for ``Stage.attach``."""

    slots: Slots
    learner: Learner
    source: Source
    device: torch.device
    batch_size: int
    shapes_vary: bool
    """Whether batches of one size may have tensors of different shapes."""
    folder: Path | None
    """Folder for files that stages make of a finished run; None if there is none."""

    @property
    def generators(self) -> Mapping[str, torch.Generator]:
        """Returns the random generators of the source and of the training, by name.

        Those of a learner are created when they are first used.
        """

    @property
    def choices(self) -> Choices:
        """Returns the selections that the stage makes by measuring, which the run records."""

    def batches(self) -> Iterator[tuple[Batch, Batch]]:
        """Yields batches without end, each with its noise, as updates sample them.

        Optimizers exist by then.
        """

    def deactivate(self, reason: str) -> None:
        """Reports that the stage that is being attached has no effect with these data."""

    def note(self, text: str) -> None:
        """Adds a remark on the stage to the closing table."""
