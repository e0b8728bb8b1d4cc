"""Learners with two interfaces: a module and a loss, or a custom update."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import methodcaller
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.plugin import default_slots
from runner.plugin.averages import AVERAGES, WeightAverages, saved_averages
from runner.plugin.contract import Mean
from runner.plugin.loss import Loss, check_loss
from runner.plugin.module_state import load_module
from runner.plugin.optimizer import restore
from runner.plugin.progress import Progress
from runner.plugin.role import Role
from runner.system.errors import RunnerError, UsageError
from runner.system.generators import seed_torch
from runner.system.suggestions import method_named, suggestion
from runner.system.tensor_trees import BatchLayout, map_tensors, tensors

if TYPE_CHECKING:
    from runner.plugin.configs import ServedResponse
    from runner.plugin.context import Context
    from runner.plugin.prunable import Prunable
    from runner.plugin.source import Batch, State


FROZEN = "frozen_parameters"
"""Key of the names of frozen parameters in a learner's state."""


class Learner(ABC):
    """Parameters, losses and one ``update``, written as a short story of slots.

    In addition to the slots in its settings, every learner has those of ``PIPELINE``:
    ``precision`` to enter around a forward, ``unscale`` before gradients are read, and
    others as their names indicate.
    """

    noise_layout: ClassVar[BatchLayout] = BatchLayout()
    """Which entries of ``noise`` have one row per sample: all tensors with dimensions unless declared otherwise."""
    story: tuple[str, ...] = ()
    """The slots whose outputs the guards look through, in order, when a number stops being finite."""
    compilable: ClassVar[tuple[str, ...]] = ()
    """The slots that ``torch.compile`` can take: functions of tensors, without a host sync or other effects."""
    averages: WeightAverages | None = None
    """Averages of the parameters in ``modules``, if the recipe sets ``train.ema``."""
    _evaluating = False
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
            make_optimizer=default_slots.make_optimizer,
            precision=nullcontext,
            zero_grad=default_slots.zero_grad,
            backward=default_slots.backward,
            unscale=default_slots.unscale,
            clip=nn.utils.clip_grad_norm_,
            optimizer_step=methodcaller("step"),
            **{name: getattr(self, name) for name in sorted(config.slots)},
        )

    def role(self, name: str, module: nn.Module, every: int = 1) -> Role:
        """Declares that the role's optimizer steps this module, once every ``every`` updates."""
        if "roles" not in vars(self):
            raise RunnerError(f"{method_named(self, '__init__')} should call super().__init__(config, shapes, context)")
        if name not in self.context.optimizers:
            roles, known = f"{type(self.config).__name__}.roles", suggestion(name, self.context.optimizers)
            raise RunnerError(f"{type(self).__name__} makes a role '{name}', which {roles} does not have{known}")
        role = self.roles[name] = Role(name, module.to(self.device), self.context, every)
        return role

    @abstractmethod
    def update(self, batch: Batch, noise: Batch, progress: Progress) -> dict[str, Any]:
        """Performs one training step; returns detached tensors and ``Mean``s by name.

        Scalars and means are logged as ``train/<name>``, each over the updates that returned it; others go to
        ``Source.feedback``.
        """

    @abstractmethod
    def predict(self, inputs: Any) -> Any:
        """The deterministic answer that is evaluated and served (a classifier's logits, not a draw from them)."""

    def scores(self, inputs: Any) -> Any:
        """Returns the numbers from which ``predict`` selects discrete answers; None if there are none."""
        return None

    def inputs(self, batch: Batch) -> Any:
        """Returns the input of ``predict`` in a batch: by default the batch."""
        return batch

    def refused(self, request: Any) -> str | None:
        """Why a request of the config's ``request`` cannot be answered: a key and the reason; None if it can."""
        return None

    def example_request(self) -> Mapping[str, Any] | None:
        """Returns a request that it can answer, as JSON; None makes the server build one from the schema."""
        return None

    def requested(self, requests: Sequence[Any]) -> Any:
        """Returns ``predict``'s input for requests of one group; answers must be independent."""
        raise TypeError(f"{type(self).__name__} has no requested(requests), which a server needs")

    def answered(self, requests: Sequence[Any], outputs: Any) -> Sequence[ServedResponse]:
        """Returns one ``response`` for each request, from the result of ``predict``."""
        raise TypeError(f"{type(self).__name__} has no answered(requests, outputs), which a server needs")

    def metrics(self, batch: Batch) -> Mapping[str, Mean]:
        """Measures a held-out batch; sums and counts are added up over all batches.

        A loss that depends on progress takes ``self.context.progress``, one that needs noise
        ``self.held_out_noise(batch)``.
        """
        raise TypeError(f"{type(self).__name__} has no metrics(batch), which evaluation on held-out batches needs")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Entered around evaluation: modules are in evaluation mode, with averaged parameters if ``train.ema`` is set.

        Afterwards each module has its previous mode and parameters.
        """
        if self._evaluating:  # predict inside an evaluation
            yield
            return
        modules = [*self.modules().values()]
        before = [(part, part.training) for module in modules for part in module.modules()]
        for module in modules:
            module.eval()
        self._evaluating = True
        try:
            with nullcontext() if self.averages is None else self.averages.applied():
                yield
        finally:
            self._evaluating = False
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
        """Returns the removable parts of the model, layer by layer."""
        return ()

    def modules(self) -> Mapping[str, nn.Module]:
        """Returns all modules with parameters, by name."""
        return {name: role.module for name, role in self.roles.items()}

    def optimizers(self) -> Iterator[tuple[str, Optimizer]]:
        """Every optimizer with the name of its role."""
        return ((name, role.optimizer) for name, role in self.roles.items())

    def configure_optimizers(self) -> None:
        """Makes the optimizers; called once, after all stages are attached."""
        for role in self.roles.values():
            settings = role.settings
            try:
                role.optimizer = settings.make(self.slots, settings.groups(role.module))
            except UsageError:
                if all(parameter.requires_grad for parameter in role.module.parameters()):
                    raise
                # Muon refuses vectors, also those that are frozen.
                role.optimizer = settings.make(self.slots, settings.groups(role.module, frozen=False))

    def start_averages(self) -> None:
        """Starts the averages of ``train.ema``; called once, when the parameters are where they stay."""
        if self.context.ema is None:
            return
        self.averages = WeightAverages(self.modules(), self.context.ema)
        if not self.averages.values:
            raise UsageError(f"train.ema: {type(self).__name__}.modules() has no parameter that can be averaged")

    def averaged_update(self, batch: Batch, noise: Batch, progress: Progress) -> dict[str, Any]:
        """Calls ``update``, then moves the averages."""
        output = self.update(batch, noise, progress)
        if self.averages is not None:
            self.averages.update()
        return output

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Trainable parameters by name, the same names with every stage."""
        for name, role in self.roles.items():
            named = role.module.named_parameters()
            yield from ((f"{name}.{own}", parameter) for own, parameter in named if parameter.requires_grad)

    def gradients(self) -> dict[str, Tensor | None]:
        """The last gradient of every trainable parameter, None where none arrived."""
        return {name: parameter.grad for name, parameter in self.named_parameters()}

    def periods(self) -> dict[str, int]:
        """Returns the updates between two steps of a parameter by name; the default is one."""
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
        """Returns a state's parameters and buffers for another training, by name in ``modules``."""
        found: Mapping[str, Mapping[str, Tensor]] = state["modules"]
        return found

    def complete_state(self) -> State:
        """Returns ``state_dict`` and the common state: averages, and names of frozen parameters."""
        frozen: dict[str, list[str]] = {}
        for name, module in self.modules().items():
            frozen[name] = [own for own, parameter in module.named_parameters() if not parameter.requires_grad]
        state = {**self.state_dict(), FROZEN: frozen}
        if self.averages is None:
            return state
        if self._evaluating:
            raise RuntimeError("a learner has no state during an evaluation, which swaps its parameters")
        return {**state, AVERAGES: self.averages.state_dict()}

    def load_complete_state(self, state: State) -> None:
        """Restores what ``complete_state`` returned, in place."""
        self.load_state_dict({name: part for name, part in state.items() if name not in (FROZEN, AVERAGES)})
        modules = self.modules()
        for name, frozen in state.get(FROZEN, {}).items():
            for own, parameter in modules[name].named_parameters():
                if parameter.requires_grad == (own in frozen):
                    parameter.requires_grad_(own not in frozen)
        if self.averages is not None:
            self.averages.load_state_dict(saved_averages(state) or {})

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned, in place."""
        for name, module in self.modules().items():
            load_module(module, state["modules"][name])
        for name, optimizer in self.optimizers():
            restore(optimizer, state["optimizers"][name])


def _counted(loss: Loss) -> Any:
    """The count of a loss; 1 where nothing is counted and the sum is zero, whose gradient is zero and not 0 / 0."""
    if isinstance(loss.count, Tensor):
        return loss.count.masked_fill((loss.count == 0) & (loss.sum.detach() == 0), 1)
    return loss.count or (loss.count if loss.sum.detach().any() else 1)


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
            seed_torch(context.generator("parameters", "cpu").initial_seed())
            self.module = self.build(config, shapes, context)
        if not isinstance(self.module, nn.Module) or not any(each.requires_grad for each in self.module.parameters()):
            found = f"got {type(self.module).__name__}"
            raise RunnerError(f"{method_named(self, 'build')} should return a module with parameters to train, {found}")
        self.model = self.role("model", self.module)
        parameters = [*self.module.parameters()]
        self._parameter = next((each for each in parameters if each.is_floating_point()), parameters[0])
        self._has_loss = False

    @abstractmethod
    def build(self, config: Any, shapes: Mapping[str, tuple[int, ...]], context: Context) -> nn.Module:
        """Makes the module; torch's global generator is seeded for it."""

    @abstractmethod
    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """The loss of a batch as a sum and a count."""

    # --- the update ---------------------------------------------------------------------------------------------------

    def update(self, batch: Batch, noise: Batch, progress: Progress) -> dict[str, Any]:
        """Computes one gradient and performs one step of the optimizer."""
        self.model.zero_grad()
        loss: Loss = self.slots.forward_backward(batch, noise, progress)
        self.model.step()
        return loss.means()

    def forward_backward(
        self, batch: Batch, noise: Batch, progress: Progress, denominator: Callable[[Any], Any] | None = None
    ) -> Loss:
        """Adds the gradient of the loss to that of the parameters; returns the loss, detached.

        If the batch is part of a larger one, ``denominator`` converts its count to the
        divisor of its sum.
        """
        loss: Loss = self.slots.loss(batch, noise, progress)
        if not self._has_loss:  # the first time alone, because an update is short
            check_loss(loss, method_named(self, "loss"))
            self._has_loss = True
        self.slots.backward(loss.sum / (_counted(loss) if denominator is None else denominator(loss.count)))
        return Loss(loss.sum.detach(), loss.count, loss.also)

    def forward(self, *inputs: Any) -> Any:
        """Returns the module's output in the parameters' type, whatever the precision inside."""
        with self.slots.precision():
            output = self.module(*inputs)
        dtype = self._parameter.dtype
        if isinstance(output, Tensor) and output.dtype == dtype:
            return output  # early, for small models
        # Where all parameters are complex. Asked first, because torch.compile cannot trace ``to_real``.
        dtype = dtype.to_real() if dtype.is_complex else dtype
        return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, output)

    def inputs(self, batch: Batch) -> Any:
        """Returns the first tensor of a batch by default."""
        if type(self).predict is GradientLearner.predict:
            self._check_inputs()
        return next(tensors(batch))

    def _check_inputs(self) -> None:
        """Raises a RunnerError if the module needs more than the one tensor that ``inputs`` would return."""
        try:
            parameters = inspect.signature(self.module.forward).parameters.values()
        except (TypeError, ValueError):  # of a compiled function, for example
            return
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needed = [each.name for each in parameters if each.default is each.empty and each.kind in positional]
        named = [each.name for each in parameters if each.default is each.empty and each.kind is each.KEYWORD_ONLY]
        if len(needed) < 2 and not named:
            return
        learner = type(self).__name__
        arguments = ", ".join([*needed, *(f"{name}=" for name in named)])
        call = ", ".join([*(f"inputs[{number}]" for number in range(len(needed))), *(f"{name}=..." for name in named)])
        raise RunnerError(
            f"{method_named(self, 'build')} returns a module whose forward takes ({arguments}), and a model is called "
            f"with the first tensor of a batch alone: write {learner}.inputs(batch), which returns all of them, and "
            f"{learner}.predict(inputs), which calls self.slots.forward({call})"
        )

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

    def blocks(self) -> Sequence[nn.Module]:
        """The members of the module's ``blocks``, if it has a list of that name."""
        found = getattr(self.module, "blocks", ())
        return list(found) if isinstance(found, nn.ModuleList | nn.Sequential) else ()

    def modules(self) -> Mapping[str, nn.Module]:
        """The module."""
        return {"model": self.module}
