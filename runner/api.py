"""All that a plugin may import from the runner.

A plugin has a *face* and *works*. The face (a ``LearnerConfig``, a ``SourceConfig`` or a ``Stage``) is what validation
and editors need: it imports nothing slower than pydantic. The works (a ``Learner``, a ``Source``, the body of
``Stage.attach``) import torch and are loaded when a pipeline is assembled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from runner.config import Config
from runner.errors import RunnerError, UsageError
from runner.hardware import available_memory
from runner.ring import Ring
from runner.slots import Slots

if TYPE_CHECKING:
    import torch

__all__ = [
    "Batch",
    "Close",
    "Config",
    "Context",
    "Contract",
    "Exact",
    "Learner",
    "LearnerConfig",
    "Pipeline",
    "Plan",
    "Probe",
    "Ring",
    "RunnerError",
    "Setting",
    "Slots",
    "Source",
    "SourceConfig",
    "Stage",
    "State",
    "Statistical",
    "UsageError",
    "available_memory",
]

Batch = dict[str, Any]
"""Tensors by name; the first dimension is the batch."""

State = dict[str, Any]
"""Nested dictionaries and lists of tensors, rings, numbers, strings and None: what a checkpoint can hold."""


# --- what a stage promises about results ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exact:
    """The same bits as the baseline."""


@dataclass(frozen=True)
class Close:
    """The same algebra with other rounding."""


@dataclass(frozen=True)
class Statistical:
    """Of what the baseline learns, in its source's ``objective``, no more than the share ``margin`` is lost."""

    margin: float


Contract = Exact | Close | Statistical


# --- faces: light, read by validation ---------------------------------------------------------------------------------


class LearnerConfig(Config, ABC):
    """The face of a learner: its settings and where its works are. The docstring is its card."""

    kind: ClassVar[str]
    """The name under which it is registered: ``model.kind``."""
    learns_from: ClassVar[str]
    """The form of data it needs; a source with the same ``provides`` fits."""

    @abstractmethod
    def implementation(self) -> type[Learner]:
        """Imports and returns the learner's class."""

    @abstractmethod
    def slots(self) -> frozenset[str]:
        """The slots that stages may hold with these settings, beside those that every pipeline has."""

    def lacks(self, slot: str) -> str:
        """Why these settings offer no slot of that name, for the message to the user."""
        return f"learner '{self.kind}' has no slot '{slot}'"


class SourceConfig(Config, ABC):
    """The face of a source: its settings and where its works are. The docstring is its card."""

    kind: ClassVar[str]
    """The name under which it is registered: ``data.kind``."""
    provides: ClassVar[str]
    """The form of its batches, matched with ``LearnerConfig.learns_from``."""
    simulates: ClassVar[bool] = False
    """Whether training is counted in environment steps (a simulator) or in updates (a dataset)."""
    headline: ClassVar[tuple[str, ...]] = ()
    """The evaluation metrics that a person looks at first, without ``eval/``."""
    objective: ClassVar[tuple[str, Literal["maximize", "minimize"]] | None] = None
    """The evaluation metric by which one model is better than another, without ``eval/``, and its direction."""

    @abstractmethod
    def implementation(self) -> type[Source]:
        """Imports and returns the source's class."""

    def largest_batch(self) -> int | None:
        """The largest batch that can be drawn, None if there is no limit."""
        return None


@dataclass(frozen=True)
class Setting:
    """What a stage may look at to say whether it can work here."""

    model: LearnerConfig
    data: SourceConfig
    device: torch.device
    stages: Mapping[str, Stage]
    """All stages that the recipe switches on, by kind."""


class Stage(ABC):
    """One switchable speed-up or memory saving. The docstring is its card.

    Card: what it does, when it helps, when it hurts. A stage holds no torch at import; it imports it in its methods.
    """

    kind: ClassVar[str]
    """The key under ``optimization``."""
    phase: ClassVar[int]
    """1 removes repeated work, 2 precision and data movement, 3 tunes to the machine; stages attach in this order."""
    contract: Contract
    claims: ClassVar[frozenset[str]] = frozenset()
    """Slots that the stage replaces; two active stages may not claim the same one."""
    wraps: ClassVar[frozenset[str]] = frozenset()
    """Slots that the stage wraps; any number of stages may wrap a slot."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Kinds of the stages that must be on with this one."""

    class Config(Config):
        """A stage without settings."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def inactive(self, setting: Setting) -> str | None:
        """The reason why the stage has nothing to do in this setting, or None if it works.

        Raises:
            UsageError: the stage must not run here at all.
        """
        return None

    def prepare(self, plan: Plan) -> None:  # noqa: B027 (most stages have nothing to prepare)
        """Changes what is built (batch size, update ratio) before anything is."""

    @abstractmethod
    def attach(self, pipeline: Pipeline) -> None:
        """Takes hold of its slots; learner and source exist, optimizers do not yet."""

    def state_dict(self) -> State:
        """What a resumed run needs to continue bit for bit."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""
        if state:
            raise ValueError(f"stage '{self.kind}' has no state, but the checkpoint has {sorted(state)}")


# --- works: heavy, built when a pipeline is assembled -----------------------------------------------------------------


@dataclass
class Context:
    """What learner and source are built with."""

    device: torch.device
    slots: Slots
    seed: int
    generators: dict[str, torch.Generator] = field(default_factory=dict)

    def generator(self, name: str, device: torch.device | str | None = None) -> torch.Generator:
        """The random generator of that name; the same seed, name and device give the same numbers.

        Args:
            name: who draws from it ("environment", "replay", ...); asked for again, the same generator comes back.
            device: where it draws; the context's device unless told.
        """
        import hashlib

        import torch

        if name not in self.generators:
            digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
            generator = torch.Generator(self.device if device is None else device)
            generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            self.generators[name] = generator
        return self.generators[name]


class Learner(ABC):
    """Parameters, losses and one ``update``, written as a short story of slots.

    The base class defines the slots that generic stages hold: ``make_optimizer``, ``precision``, ``backward``,
    ``unscale`` (before a look at gradients, to clip them) and ``optimizer_step``. A learner defines its own in
    ``__init__`` with ``self.slots.define(name=method)``.
    """

    story: tuple[str, ...] = ()
    """The slots whose outputs the guards look through, in order, when a number stops being finite."""
    compilable: ClassVar[tuple[str, ...]] = ()
    """The slots that ``torch.compile`` can take: functions of tensors, without a host sync or other effects."""

    def __init__(self, config: Any, shapes: Mapping[str, tuple[int, ...]], context: Context) -> None:
        """Builds parameters on ``context.device``.

        Args:
            config: the learner's settings.
            shapes: shape of every tensor in the source's batches, without the batch dimension.
            context: device, slots and random generators.
        """
        self.context = context
        self.device = context.device
        self.slots = context.slots
        self.slots.define(
            make_optimizer=_adam,
            precision=nullcontext,
            backward=_backward,
            unscale=_unscale,
            optimizer_step=_optimizer_step,
        )

    @abstractmethod
    def configure_optimizers(self) -> None:
        """Makes the optimizers through ``slots.make_optimizer``; called once, after all stages are attached."""

    @abstractmethod
    def update(self, batch: Batch, noise: Batch) -> Batch:
        """One training step.

        Returns:
            Detached tensors: scalars are logged as ``train/<name>``; others go to ``Source.feedback``.
        """

    @abstractmethod
    def predict(self, observation: torch.Tensor) -> torch.Tensor:
        """The deterministic answer that evaluation uses (a policy's mean action, a classifier's logits)."""

    def act(self, observation: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The action taken while collecting; ``predict`` unless the learner explores."""
        return self.predict(observation)

    def noise(self, batch_size: int, generator: torch.Generator) -> Batch:
        """The random numbers of one update; drawn outside so that every variant can be given the same."""
        return {}

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Trainable parameters by name, the same names with every stage."""

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The last gradient of every trainable parameter, None where none arrived."""
        return {name: parameter.grad for name, parameter in self.named_parameters()}

    def least_work(self, batch_size: int) -> tuple[int, int] | None:
        """FLOP and bytes that one update cannot do without, where a formula is known."""
        return None

    @abstractmethod
    def state_dict(self) -> State:
        """Parameters, target networks and optimizers; the same structure with every stage, so that a state can move."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned, in place."""


class Source(ABC):
    """Where batches come from: a simulator with its replay buffer, or a dataset."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every tensor in a batch, without the batch dimension."""

    @abstractmethod
    def __init__(self, config: Any, context: Context) -> None: ...

    def collect(self, act: Callable[[torch.Tensor], torch.Tensor] | None) -> int:
        """Advances the simulation and stores what happened.

        Args:
            act: from observations to actions; None asks for uniformly random actions.

        Returns:
            The number of environment steps taken (0 for a dataset).
        """
        return 0

    def ready(self, batch_size: int) -> bool:
        """Whether a batch of that size can be drawn yet."""
        return True

    @abstractmethod
    def sample(self, batch_size: int, progress: float) -> Batch:
        """Draws a batch; ``progress`` runs from 0 to 1 over the training."""

    def feedback(self, batch: Batch, output: Batch) -> None:  # noqa: B027 (a dataset does not need it)
        """Receives what an update returned for a batch (priorities)."""

    @abstractmethod
    def evaluate(self, learner: Learner) -> dict[str, float]:
        """Measures ``learner.predict`` on held-out data or seeds; metrics are logged as ``eval/<name>``."""

    def statistics(self) -> dict[str, float]:
        """What happened while collecting since the last call; logged as ``train/<name>``."""
        return {}

    @abstractmethod
    def state_dict(self) -> State:
        """Environments, replay buffer, position in the dataset."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""


# --- what a stage is attached to --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """One real training step measured in a child process."""

    samples_per_second: float
    peak_bytes: int
    limit_bytes: int


class Plan(Protocol):
    """What ``Stage.prepare`` may change before anything is built."""

    batch_size: int
    updates_per_step: float

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

    def note(self, text: str) -> None:
        """Says something about the stage in the closing table."""


# --- default steps ----------------------------------------------------------------------------------------------------


def _adam(parameters: list[torch.Tensor], **settings: Any) -> torch.optim.Optimizer:
    from torch.optim import Adam

    return Adam(parameters, **settings)


def _backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _unscale(optimizer: torch.optim.Optimizer) -> None:
    """Gradients have their true scale unless a stage scales the loss."""


def _optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
