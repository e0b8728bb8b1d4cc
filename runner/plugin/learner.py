"""What learns: the settings of a learner, and the free storey of learners, which write their own update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import methodcaller
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from runner.plugin.config import Config
from runner.plugin.context import PIPELINE, Context
from runner.plugin.contract import Objective
from runner.plugin.optimizer import restore
from runner.plugin.progress import Progress
from runner.system.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from runner.plugin.source import Batch, State


class Mean(NamedTuple):
    """A sum and of how many things it is: means over several batches are then true means."""

    sum: Any
    """A scalar tensor, or a number."""
    count: Any
    """Items, tokens, pixels; a tensor or a number."""


class LearnerConfig(Config, ABC):
    """The settings of a learner, and where its works are. The docstring is its card."""

    kind: ClassVar[str]
    """The name under which it is registered: ``model.kind``."""
    learns_from: ClassVar[str]
    """The form of data it needs; a source with the same ``provides`` fits."""
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = {"model": {"kind": "adamw"}}
    """What it optimizes, by name, each with the optimizer that a recipe need not write."""
    slots: ClassVar[frozenset[str]] = frozenset()
    """Its methods that stages may hold, beside the steps that every pipeline has."""
    headline: ClassVar[tuple[str, ...]] = ()
    """The evaluation metrics that a person looks at first, without ``eval/``, where the source names none."""
    objective: ClassVar[Objective | None] = None
    """By what a model is judged, where the source does not say."""

    @abstractmethod
    def implementation(self) -> type[Learner]:
        """Imports and returns the learner's class."""

    def lacks(self, slot: str) -> str | None:
        """Why these settings offer no slot of that name, for the message to the user; None if they do."""
        return None if slot in self.slots | PIPELINE else f"learner '{self.kind}' has no slot '{slot}'"

    def draws(self) -> bool:
        """Whether an update draws from torch's global generator (dropout), so that cutting a batch changes it."""
        return False


class GradientLearnerConfig(LearnerConfig, ABC):
    """The settings of a ``GradientLearner``."""

    slots: ClassVar[frozenset[str]] = frozenset({"forward", "loss", "forward_backward"})


class Role:
    """A module of a learner and its optimizer: the recipe's ``optimizer``, for all roles or for this one."""

    def __init__(self, name: str, module: nn.Module, context: Context, every: int = 1) -> None:
        self.name, self.module, self.slots = name, module, context.slots
        self.every = every
        """How many updates pass between two of its steps; what watches gradients waits as long."""
        self.settings = context.optimizers[name]
        self.optimizer: Optimizer

    def parameters(self) -> list[Tensor]:
        """What is trained."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def configure(self) -> None:
        """Makes the optimizer, when all stages are attached."""
        groups = self.settings.groups(self.module)
        self.optimizer = self.slots.make_optimizer(self.settings.optimizer(), groups, **self.settings.settings)

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        self.slots.zero_grad(self.optimizer)

    def step(self) -> None:
        """Clips the gradients if the recipe says so, and steps the optimizer."""
        if self.settings.max_grad_norm is not None:
            self.slots.unscale(self.optimizer)
            self.slots.clip(self.parameters(), self.settings.max_grad_norm)
        self.slots.optimizer_step(self.optimizer)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Lets gradients through to inputs inside the ``with``, but computes none for the parameters."""
        parameters = self.parameters()
        for parameter in parameters:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_(True)


class Learner(ABC):
    """Parameters, losses and one ``update``, written as a short story of slots.

    Beside the slots that its settings declare, every learner has ``make_optimizer``, ``precision`` (to enter around a
    forward), ``zero_grad``, ``backward``, ``unscale`` (before a look at gradients, to clip them), ``clip`` and
    ``optimizer_step``.
    """

    story: tuple[str, ...] = ()
    """The slots whose outputs the guards look through, in order, when a number stops being finite."""
    compilable: ClassVar[tuple[str, ...]] = ()
    """The slots that ``torch.compile`` can take: functions of tensors, without a host sync or other effects."""

    def __init__(self, config: Any, shapes: Mapping[str, tuple[int, ...]], context: Context) -> None:
        """Builds parameters on ``context.device``; shapes are of a batch's tensors, without the batch dimension."""
        from torch.nn.utils import clip_grad_norm_

        self.config, self.context, self.device, self.slots = config, context, context.device, context.slots
        self.roles: dict[str, Any] = {}
        self.slots.define(
            make_optimizer=_make_optimizer,
            precision=nullcontext,
            zero_grad=methodcaller("zero_grad"),
            backward=_backward,
            unscale=_unscale,
            clip=clip_grad_norm_,
            optimizer_step=methodcaller("step"),
            **{name: getattr(self, name) for name in sorted(config.slots)},
        )

    def role(self, name: str, module: nn.Module, every: int = 1) -> Role:
        """Declares that the optimizer of that role steps this module, once in so many updates."""
        role = self.roles[name] = Role(name, module.to(self.device), self.context, every)
        return role

    @abstractmethod
    def update(self, batch: Batch, noise: Batch, progress: Progress) -> dict[str, Any]:
        """One training step.

        Returns:
            Detached tensors and ``Mean``s by name. Scalars and means are logged as ``train/<name>``, each over the
            updates that returned it; others go to ``Source.feedback``.
        """

    @abstractmethod
    def predict(self, inputs: Any) -> Any:
        """The deterministic answer that is evaluated and served (a classifier's logits, not a draw from them)."""

    def inputs(self, batch: Batch) -> Any:
        """What of a batch ``predict`` answers to: the batch itself unless told."""
        return batch

    def metrics(self, batch: Batch) -> Mapping[str, Mean]:
        """What a held-out batch says about the model; sums and counts are added up over all of them."""
        raise TypeError(f"{type(self).__name__} has no metrics(batch), which evaluation on held-out batches needs")

    def evaluating(self) -> AbstractContextManager[None]:
        """Entered around evaluation: modules are in evaluation mode inside."""
        return nullcontext()

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """The random numbers of one update; drawn outside so that every variant can be given the same."""
        return {}

    def blocks(self) -> Sequence[nn.Module]:
        """The parts of the model whose activations may be forgotten and computed again, first to last."""
        return ()

    def modules(self) -> Mapping[str, nn.Module]:
        """Everything with parameters, by name."""
        return {name: role.module for name, role in self.roles.items()}

    def optimizers(self) -> Iterator[tuple[str, Optimizer]]:
        """Every optimizer with the name of its role."""
        return ((name, role.optimizer) for name, role in self.roles.items())

    def configure_optimizers(self) -> None:
        """Makes the optimizers; called once, after all stages are attached."""
        for role in self.roles.values():
            role.configure()

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Trainable parameters by name, the same names with every stage."""
        for name, role in self.roles.items():
            for own, parameter in role.module.named_parameters():
                if parameter.requires_grad:
                    yield f"{name}.{own}", parameter

    def gradients(self) -> dict[str, Tensor | None]:
        """The last gradient of every trainable parameter, None where none arrived."""
        return {name: parameter.grad for name, parameter in self.named_parameters()}

    def periods(self) -> dict[str, int]:
        """How many updates pass between two steps of a parameter, by name; those not named are stepped in every one."""
        rare = [(name, role) for name, role in self.roles.items() if role.every > 1]
        return {f"{name}.{own}": role.every for name, role in rare for own, _ in role.module.named_parameters()}

    def least_work(self, batch_size: int) -> tuple[int, int] | None:
        """FLOP and bytes that one update cannot do without, where a formula is known."""
        return None

    def state_dict(self) -> State:
        """Parameters, buffers and optimizers; the same structure with every stage, so that a state can move."""
        return {
            "modules": {name: dict(module.state_dict()) for name, module in self.modules().items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers()},
        }

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned, in place."""
        for name, module in self.modules().items():
            module.load_state_dict(state["modules"][name])
        for name, optimizer in self.optimizers():
            restore(optimizer, state["optimizers"][name])


def _make_optimizer(optimizer: type[Optimizer], parameters: Any, **settings: Any) -> Optimizer:
    try:
        return optimizer(parameters, **settings)
    except ValueError as error:  # what no signature says: betas below 1, matrices only
        raise UsageError(f"optimizer: torch.optim.{optimizer.__name__} refuses what it is given: {error}") from error


def _backward(loss: Tensor) -> None:  # a function of our own, because torch.compile would trace a ``methodcaller``
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _unscale(optimizer: Optimizer) -> None:
    """Gradients have their true scale unless a stage scales the loss."""
