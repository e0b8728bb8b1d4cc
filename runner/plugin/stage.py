"""One switchable speed-up or memory saving: its settings, what it promises, and its works."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from runner.plugin.config import Config
from runner.plugin.contract import Contract
from runner.plugin.progress import Unit

if TYPE_CHECKING:
    import torch

    from runner.plugin.context import Slots
    from runner.plugin.learner import Learner, LearnerConfig
    from runner.plugin.source import Source, SourceConfig, State


@dataclass(frozen=True)
class Setting:
    """What a stage may look at to say what it promises, and whether it can work here."""

    model: LearnerConfig
    data: SourceConfig
    device: torch.device
    stages: Mapping[str, StageConfig]
    """All stages that the recipe switches on, by kind."""
    unit: Unit
    """What the training is counted in."""


class StageConfig(Config, ABC):
    """The settings of a stage. The docstring is its card: what it does, when it helps, when it hurts.

    Asking it changes nothing; ``contract`` and ``inactive`` depend on its fields and the setting alone.
    """

    kind: ClassVar[str]
    """The key under ``optimization``."""
    phase: ClassVar[int]
    """1 removes repeated work, 2 precision and data movement, 3 tunes to the machine; stages attach in this order."""
    claims: ClassVar[frozenset[str]] = frozenset()
    """Slots that the stage replaces; two active stages may not claim the same one."""
    wraps: ClassVar[frozenset[str]] = frozenset()
    """Slots that the stage wraps; any number of stages may wrap a slot."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Kinds of the stages that must be on with this one."""
    works_through: ClassVar[frozenset[str] | None] = None
    """Slots of which the learner must call one for the stage to do anything; unless told, all that it takes hold of."""
    traces: ClassVar[bool] = False
    """Whether it traces what its slots call, so that nothing in there may be looked at or change later."""
    prepares: ClassVar[bool] = False
    """Whether it changes what is built (``Stage.prepare``)."""

    @abstractmethod
    def contract(self, setting: Setting) -> Contract:
        """What the stage promises about results here."""

    def inactive(self, setting: Setting) -> str | None:
        """The reason why the stage has nothing to do here, or None; a UsageError where it must not run at all."""
        return None

    @abstractmethod
    def implementation(self) -> type[Stage]:
        """The stage's works."""


class Stage(ABC):
    """The works of a stage; one object for one pipeline. Torch is imported in its methods or by its module."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def prepare(self, plan: Plan) -> None:  # noqa: B027 (most stages have nothing to prepare)
        """Changes what is built (the batch size) before anything is."""

    @abstractmethod
    def attach(self, pipeline: Pipeline) -> None:
        """Takes hold of its slots; learner and source exist, optimizers do not yet."""

    def closing_notes(self) -> Sequence[str]:
        """What it has found out by the end of the training, for the closing table."""
        return ()

    def state_dict(self) -> State:
        """What a resumed run needs to continue bit for bit."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""
        if state:
            raise ValueError(f"stage '{self.config.kind}' has no state, but the checkpoint has {sorted(state)}")


@dataclass(frozen=True)
class Probe:
    """One real training step measured in a child process."""

    samples_per_second: float
    peak_bytes: int
    limit_bytes: int


class Plan(Protocol):
    """What ``Stage.prepare`` may change before anything is built."""

    batch_size: int

    def probe(self, batch_size: int) -> Probe | None:
        """Trains a few steps with that batch size in a child process; None if memory does not suffice."""

    def note(self, text: str) -> None:
        """Says something about the stage in the closing table."""


class Pipeline(Protocol):
    """What ``Stage.attach`` takes hold of."""

    slots: Slots
    learner: Learner
    source: Source
    device: torch.device
    batch_size: int
    shapes_vary: bool
    """Whether batches of one size may have tensors of different shapes."""

    def note(self, text: str) -> None:
        """Says something about the stage in the closing table."""
