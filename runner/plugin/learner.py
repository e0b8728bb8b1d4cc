"""What learns, in two storeys: a module and a loss, or an update of one's own."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import methodcaller
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.plugin.contract import Mean
from runner.plugin.loss import Loss, check_loss
from runner.plugin.module_state import load_module
from runner.plugin.optimizer import restore
from runner.plugin.progress import Progress
from runner.system.errors import RunnerError, UsageError
from runner.system.names import method_named, suggestion
from runner.system.tree import map_tensors, tensors

if TYPE_CHECKING:
    from runner.plugin.context import Context
    from runner.plugin.faces import ServedResponse
    from runner.plugin.prunable import Prunable
    from runner.plugin.source import Batch, State


class Role:
    """A module of a learner and its optimizer: the recipe's ``optimizer``, for all roles or for this one."""

    optimizer: Optimizer
    """There when all stages are attached."""

    def __init__(self, name: str, module: nn.Module, context: Context, every: int = 1) -> None:
        self.module, self.slots, self.settings = module, context.slots, context.optimizers[name]
        self.every = every
        """How many updates pass between two of its steps; what watches gradients waits as long."""
        self.max_grad_norm = self.settings.max_grad_norm  # asking settings takes microseconds

    def parameters(self) -> list[Tensor]:
        """What is trained."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        self.slots.zero_grad(self.optimizer)

    def step(self) -> None:
        """Clips the gradients if the recipe says so, and steps the optimizer."""
        if self.max_grad_norm is not None:
            self.slots.unscale(self.optimizer)
            self.slots.clip(self.parameters(), self.max_grad_norm)
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

    Beside the slots that its settings declare, every learner has those of ``PIPELINE``: ``precision`` to enter around
    a forward, ``unscale`` before a look at gradients, and what the others say.
    """

    story: tuple[str, ...] = ()
    """The slots whose outputs the guards look through, in order, when a number stops being finite."""
    compilable: ClassVar[tuple[str, ...]] = ()
    """The slots that ``torch.compile`` can take: functions of tensors, without a host sync or other effects."""
    sensitive: ClassVar[tuple[str, ...]] = ()
    """Modules that need their digits when the others are rounded, as patterns of their names: ``head``, ``*.time``."""

    def __init__(self, config: Any, shapes: Mapping[str, tuple[int, ...]], context: Context) -> None:
        """Builds parameters on ``context.device``; shapes are of a batch's tensors, without the batch dimension."""
        self.config, self.context, self.device, self.slots = config, context, context.device, context.slots
        self.roles: dict[str, Any] = {}
        for name in sorted(config.slots):
            if not hasattr(self, name):
                raise RunnerError(
                    f"{type(config).__name__}.slots names '{name}', and {type(self).__name__} has no such method"
                    f"{suggestion(name, (each for each in vars(type(self)) if not each.startswith('_')))}"
                )
        self.slots.define(
            make_optimizer=_make_optimizer,
            precision=nullcontext,
            zero_grad=_zero_grad,
            backward=_backward,
            unscale=_unscale,
            clip=nn.utils.clip_grad_norm_,
            optimizer_step=methodcaller("step"),
            **{name: getattr(self, name) for name in sorted(config.slots)},
        )

    def role(self, name: str, module: nn.Module, every: int = 1) -> Role:
        """Declares that the optimizer of that role steps this module, once in so many updates."""
        if "roles" not in vars(self):
            raise RunnerError(f"{method_named(self, '__init__')} should call super().__init__(config, shapes, context)")
        if name not in self.context.optimizers:
            roles, known = f"{type(self.config).__name__}.roles", suggestion(name, self.context.optimizers)
            raise RunnerError(f"{type(self).__name__} makes a role '{name}', which {roles} does not have{known}")
        role = self.roles[name] = Role(name, module.to(self.device), self.context, every)
        return role

    @abstractmethod
    def update(self, batch: Batch, noise: Batch, progress: Progress) -> dict[str, Any]:
        """One training step; returns detached tensors and ``Mean``s by name.

        Scalars and means are logged as ``train/<name>``, each over the updates that returned it; others go to
        ``Source.feedback``.
        """

    @abstractmethod
    def predict(self, inputs: Any) -> Any:
        """The deterministic answer that is evaluated and served (a classifier's logits, not a draw from them)."""

    def inputs(self, batch: Batch) -> Any:
        """What of a batch ``predict`` answers to: the batch itself unless told."""
        return batch

    def refused(self, request: Any) -> str | None:
        """Why a request of the config's ``request`` cannot be answered: a key and the reason; None if it can."""
        return None

    def requested(self, requests: Sequence[Any]) -> Any:
        """What ``predict`` answers to for requests of one group; the answer to one may not depend on others."""
        raise TypeError(f"{type(self).__name__} has no requested(requests), which a server needs")

    def answered(self, requests: Sequence[Any], outputs: Any) -> Sequence[ServedResponse]:
        """One ``response`` of the config for each request, from what ``predict`` said."""
        raise TypeError(f"{type(self).__name__} has no answered(requests, outputs), which a server needs")

    def metrics(self, batch: Batch) -> Mapping[str, Mean]:
        """Measures a held-out batch; sums and counts are added up over all batches.

        A loss that depends on progress takes ``self.context.progress``, one that needs noise
        ``self.held_out_noise(batch)``.
        """
        raise TypeError(f"{type(self).__name__} has no metrics(batch), which evaluation on held-out batches needs")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Entered around evaluation: modules are in evaluation mode inside, and afterwards each as it was before."""
        modules = [*self.modules().values()]
        before = [(part, part.training) for module in modules for part in module.modules()]
        for module in modules:
            module.eval()
        try:
            yield
        finally:
            for part, training in before:
                part.training = training

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """The random numbers of one update; drawn outside so that every variant can be given the same."""
        return {}

    def held_out_noise(self, batch: Batch) -> Batch:
        """Returns ``noise`` for a held-out batch.

        It follows from torch's global generator, which an evaluation seeds with the recipe's seed and the number of
        the batch: other batches get other noise, and every evaluation the same.
        """
        seed = int(torch.randint(2**62, (), device="cpu"))
        return self.noise(batch, torch.Generator(self.device).manual_seed(seed))

    def blocks(self) -> Sequence[nn.Module]:
        """The parts of the model whose activations may be forgotten and computed again, first to last."""
        return ()

    def prunable(self) -> Iterable[Prunable]:
        """What can be taken out of the model, layer by layer."""
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
            settings, groups = role.settings, role.settings.groups(role.module)
            role.optimizer = self.slots.make_optimizer(settings.optimizer(), groups, **settings.settings)

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Trainable parameters by name, the same names with every stage."""
        for name, role in self.roles.items():
            named = role.module.named_parameters()
            yield from ((f"{name}.{own}", parameter) for own, parameter in named if parameter.requires_grad)

    def gradients(self) -> dict[str, Tensor | None]:
        """The last gradient of every trainable parameter, None where none arrived."""
        return {name: parameter.grad for name, parameter in self.named_parameters()}

    def periods(self) -> dict[str, int]:
        """How many updates pass between two steps of a parameter, by name; those not named are stepped in every one."""
        rare = [(name, role) for name, role in self.roles.items() if role.every > 1]
        return {f"{name}.{own}": role.every for name, role in rare for own, _ in role.module.named_parameters()}

    def idle(self, progress: Progress) -> Collection[str]:
        """Trainable parameters that no loss uses yet, by name; others are a mistake if no gradient reaches them."""
        return ()

    def least_work(self, batch_size: int) -> tuple[int, int] | None:
        """FLOP and bytes that one update cannot do without, where a formula is known."""
        return None

    def state_dict(self) -> State:
        """Parameters, buffers and optimizers; the same structure with every stage, so that a state can move."""
        return {
            "modules": {name: dict(module.state_dict()) for name, module in self.modules().items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers()},
        }

    def weights(self, state: State) -> Mapping[str, Mapping[str, Tensor]]:
        """Of a state, by the names of ``modules``: the parameters and buffers that another training may begin with."""
        found: Mapping[str, Mapping[str, Tensor]] = state["modules"]
        return found

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned, in place."""
        for name, module in self.modules().items():
            load_module(module, state["modules"][name])
        for name, optimizer in self.optimizers():
            restore(optimizer, state["optimizers"][name])


def _make_optimizer(optimizer: type[Optimizer], parameters: Any, **settings: Any) -> Optimizer:
    try:
        return optimizer(parameters, **settings)
    except ValueError as error:  # what no signature says: betas below 1, matrices only
        raise UsageError(f"optimizer: torch.optim.{optimizer.__name__} refuses what it is given: {error}") from error


def _zero_grad(optimizer: Optimizer) -> None:
    """What ``Optimizer.zero_grad`` does, without its wrappers, which take twenty times as long."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _backward(loss: Tensor) -> None:  # a function of our own, because torch.compile would trace a ``methodcaller``
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _unscale(optimizer: Optimizer) -> None:
    """Gradients have their true scale unless a stage scales the loss."""


class GradientLearner(Learner):
    """A module that is trained by the gradient of a loss, with the recipe's optimizer.

    Write ``build`` and ``loss``; call the module as ``self.slots.forward(...)``, so that stages reach it. What else a
    training needs is here: optimizer, clipping, averaged parameters (``train.ema``), evaluation and state.
    """

    story = ("forward", "loss")
    compilable: ClassVar[tuple[str, ...]] = ("forward",)

    def __init__(self, config: Any, shapes: Mapping[str, tuple[int, ...]], context: Context) -> None:
        super().__init__(config, shapes, context)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(context.generator("parameters", "cpu").initial_seed())
            self.module = self.build(config, shapes, context)
        if not isinstance(self.module, nn.Module) or not any(each.requires_grad for each in self.module.parameters()):
            found = f"got {type(self.module).__name__}"
            raise RunnerError(f"{method_named(self, 'build')} should return a module with parameters to train, {found}")
        self.model = self.role("model", self.module)
        parameters = [*self.module.parameters()]
        self._parameter = next((each for each in parameters if each.is_floating_point()), parameters[0])
        self.average = None if context.ema is None else copy.deepcopy(self.module).requires_grad_(False)
        self._evaluating, self._has_loss = False, False

    @abstractmethod
    def build(self, config: Any, shapes: Mapping[str, tuple[int, ...]], context: Context) -> nn.Module:
        """Makes the module; torch's global generator is seeded for it."""

    @abstractmethod
    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """The loss of a batch as a sum and a count."""

    # --- the update ---------------------------------------------------------------------------------------------------

    def update(self, batch: Batch, noise: Batch, progress: Progress) -> dict[str, Any]:
        """One gradient and one step of the optimizer; averages then move a share 1 - decay towards the parameters."""
        self.model.zero_grad()
        loss: Loss = self.slots.forward_backward(batch, noise, progress)
        self.model.step()
        if self.average is not None and self.context.ema is not None:
            with torch.no_grad():
                torch._foreach_lerp_([*self.average.parameters()], [*self.module.parameters()], 1 - self.context.ema)
                for buffer, source in zip(self.average.buffers(), self.module.buffers(), strict=True):
                    buffer.copy_(source)
        return loss.means()

    def forward_backward(
        self, batch: Batch, noise: Batch, progress: Progress, denominator: Callable[[Any], Any] | None = None
    ) -> Loss:
        """Adds the gradient of the loss to that of the parameters; returns the loss, detached.

        Where the batch is part of a larger one, ``denominator`` says from its count what to divide its sum by.
        """
        loss: Loss = self.slots.loss(batch, noise, progress)
        if not self._has_loss:  # the first time alone, because an update is short
            check_loss(loss, method_named(self, "loss"))
            self._has_loss = True
        self.slots.backward(loss.sum / (loss.count if denominator is None else denominator(loss.count)))
        return Loss(loss.sum.detach(), loss.count, loss.also)

    def forward(self, *inputs: Any) -> Any:
        """The module's output, in the parameters' own type whatever the precision inside."""
        with self.slots.precision():
            output = self.module(*inputs)
        dtype = self._parameter.dtype
        if isinstance(output, Tensor) and output.dtype == dtype:
            return output  # at once, for small models
        dtype = dtype.to_real()  # where all parameters are complex
        return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, output)

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def inputs(self, batch: Batch) -> Any:
        """The first tensor of a batch unless told."""
        return next(tensors(batch))

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """The module's output in evaluation mode."""
        with self.evaluating():
            return self.slots.forward(inputs)

    @torch.no_grad()
    def metrics(self, batch: Batch) -> Mapping[str, Mean]:
        """The loss and what else it logs, on a held-out batch."""
        loss: Loss = self.slots.loss(batch, self.held_out_noise(batch), self.context.progress)
        return loss.means()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The module in evaluation mode, with the averaged parameters if there are any."""
        if self._evaluating:  # predict inside an evaluation
            yield
            return
        self._evaluating = True
        self._swap()
        try:
            with super().evaluating():
                yield
        finally:
            self._swap()
            self._evaluating = False

    def blocks(self) -> Sequence[nn.Module]:
        """The members of the module's ``blocks``, if it has a list of that name."""
        found = getattr(self.module, "blocks", ())
        return list(found) if isinstance(found, nn.ModuleList | nn.Sequential) else ()

    def modules(self) -> Mapping[str, nn.Module]:
        """The module, and its average if there is one."""
        return {"model": self.module} | ({} if self.average is None else {"average": self.average})

    def weights(self, state: State) -> Mapping[str, Mapping[str, Tensor]]:
        """Those that were evaluated, the averages if there are any: module and average begin with the same."""
        found = super().weights(state)
        return dict.fromkeys(self.modules(), found.get("average", found["model"]))

    def state_dict(self) -> State:
        """Parameters, buffers, averages and the optimizer."""
        if self._evaluating:
            raise RuntimeError("the state was asked for during an evaluation")
        return super().state_dict()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchanges what is in the parameters and in their averages, in place, so that captured addresses stay."""
        if self.average is None:
            return
        own = itertools.chain(self.module.parameters(), self.module.buffers())
        for one, other in zip(own, itertools.chain(self.average.parameters(), self.average.buffers()), strict=True):
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
