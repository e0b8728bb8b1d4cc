"""Learners with two interfaces: a module and a loss, or a custom update."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import methodcaller
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from runner.plugin import default_slots
from runner.plugin.averages import AVERAGES, WeightAverages, saved_averages
from runner.plugin.contract import Mean
from runner.plugin.loss import Loss, check_loss
from runner.plugin.module_state import load_module
from runner.plugin.optimizer import restore
from runner.plugin.progress import Progress
from runner.plugin.role import Role
from runner.plugin.sharding import divided_state, whole_state
from runner.system.errors import RunnerError, UsageError
from runner.system.generators import seed_torch
from runner.system.suggestions import method_named, suggestion
from runner.system.tensor_trees import BatchLayout, map_tensors, tensors

if TYPE_CHECKING:
    from runner.plugin.configs import ServedResponse
    from runner.plugin.context import Context
    from runner.plugin.prunable import Prunable
    from runner.plugin.sharding import Sharding
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
    """Which entries of ``noise`` have one row per sample: all tensors with dimensions unless
    declared otherwise.
    """
    story: tuple[str, ...] = ()
    """The slots whose outputs the guards look through, in order, when a number stops being finite.
    """
    compilable: ClassVar[tuple[str, ...]] = ()
    """The slots that ``torch.compile`` can take: functions of tensors, without a host sync or other
    effects.
    """
    averages: WeightAverages | None = None
    """Averages of the parameters in ``modules``, if the recipe sets ``train.ema``."""
    sharding: Sharding | None = None
    """Set by a stage that divides parameters among processes."""
    _evaluating = False
    sensitive: ClassVar[tuple[str, ...]] = ()
    """Modules that need their digits when the others are rounded, as patterns of their names:
    ``head``, ``*.time``.
    """

    def __init__(
        self, config: Any, shapes: Mapping[str, tuple[int, ...]], context: Context
    ) -> None:
        """Builds parameters on ``context.device``; shapes are of a batch's tensors, without the
        batch dimension.
        """
        self.config = config
        self.context = context
        self.device = context.device
        self.slots = context.slots
        self.roles: dict[str, Any] = {}
        for name in sorted(config.slots):
            if not hasattr(self, name):
                raise RunnerError(self._unknown_slot(name))
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

    def _unknown_slot(self, name: str) -> str:
        """Returns the message about a slot without a method."""
        cls = type(self)
        public = [method for method in vars(cls) if not method.startswith("_")]
        declared = f"{type(self.config).__name__}.slots names '{name}'"
        hint = suggestion(name, public)
        return f"{declared}, and {cls.__name__} has no such method{hint}"

    def role(self, name: str, module: nn.Module, every: int = 1) -> Role:
        """Declares that the role's optimizer steps this module, once every ``every`` updates."""
        if "roles" not in vars(self):
            call = "super().__init__(config, shapes, context)"
            raise RunnerError(f"{method_named(self, '__init__')} should call {call}")
        if name not in self.context.optimizers:
            problem = f"{type(self).__name__} makes a role '{name}'"
            roles = f"{type(self.config).__name__}.roles"
            hint = suggestion(name, self.context.optimizers)
            raise RunnerError(f"{problem}, which {roles} does not have{hint}")
        if any(map(is_lazy, module.parameters())):
            raise RunnerError(
                f"{type(self).__name__} makes a role '{name}' of a module with lazy layers, whose "
                "parameters have no shapes yet: call it with zeros where it is built, or "
                "write the number of features"
            )
        role = Role(name, module.to(self.device), self.context, every)
        self.roles[name] = role
        return role

    @abstractmethod
    def update(self, batch: Batch, noise: Batch, progress: Progress) -> dict[str, Any]:
        """Performs one training step; returns detached tensors and ``Mean``s by name.

        Scalars and means are logged as ``train/<name>``, each over the updates that returned it;
        others go to ``Source.feedback``.
        """

    @abstractmethod
    def predict(self, inputs: Any) -> Any:
        """Returns the deterministic output that is evaluated and served (a classifier's logits, not
        a sample).
        """

    def scores(self, inputs: Any) -> Any:
        """Returns the numbers from which ``predict`` selects discrete answers; None if there are
        none.
        """
        return None

    def inputs(self, batch: Batch) -> Any:
        """Returns the input of ``predict`` in a batch: by default the batch."""
        return batch

    def refused(self, request: Any) -> str | None:
        """Returns why a request cannot be answered, as a key and the reason; None if it can."""
        return None

    def example_request(self) -> Mapping[str, Any] | None:
        """Returns a request that it can answer, as JSON; None makes the server build one from the
        schema.
        """
        return None

    def requested(self, requests: Sequence[Any]) -> Any:
        """Returns ``predict``'s input for requests of one group; answers must be independent."""
        problem = "has no requested(requests), which a server needs"
        raise TypeError(f"{type(self).__name__} {problem}")

    def answered(
        self, requests: Sequence[Any], outputs: Any
    ) -> Sequence[ServedResponse]:
        """Returns one ``response`` for each request, from the result of ``predict``."""
        problem = "has no answered(requests, outputs), which a server needs"
        raise TypeError(f"{type(self).__name__} {problem}")

    def metrics(self, batch: Batch) -> Mapping[str, Mean]:
        """Measures a held-out batch; sums and counts are added up over all batches.

        A loss that depends on progress takes ``self.context.progress``, one that needs noise
        ``self.held_out_noise(batch)``.
        """
        problem = "has no metrics(batch), which evaluation on held-out batches needs"
        raise TypeError(f"{type(self).__name__} {problem}")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Raises a TypeError: the slots of a copy would call the networks of the original."""
        raise TypeError(
            f"a learner ({type(self).__name__}) cannot be copied, because its slots call "
            "these networks: copy modules(), or load the run again"
        )

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Entered around evaluation: modules are in evaluation mode, with averaged parameters if
        ``train.ema`` is set.

        Afterwards each module has its previous mode and parameters.
        """
        # ``predict`` may be called inside of an evaluation.
        if self._evaluating:
            yield
            return
        modules = list(self.modules().values())
        modes = []
        for module in modules:
            modes += [(layer, layer.training) for layer in module.modules()]
        for module in modules:
            module.eval()
        self._evaluating = True
        try:
            with nullcontext() if self.averages is None else self.averages.applied():
                yield
        finally:
            self._evaluating = False
            for layer, is_training in modes:
                layer.training = is_training

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Returns the random numbers of one update, which are sampled outside of it, so that
        every variant gets the same.
        """
        return {}

    def held_out_noise(self, batch: Batch) -> Batch:
        """Returns ``noise`` for a held-out batch.

        It follows from torch's global generator, which an evaluation seeds with the recipe's seed
        and the number of the batch: other batches get other noise, and every evaluation the same.
        """
        seed = int(torch.randint(2**62, (), device="cpu"))
        return self.noise(batch, torch.Generator(self.device).manual_seed(seed))

    def blocks(self) -> Sequence[nn.Module]:
        """Returns the repeated layers of the model, first to last.

        Their activations may be discarded and computed again, and ``optimizer.layer_decay`` gives
        them different learning rates.
        """
        return ()

    def prunable(self) -> Iterable[Prunable]:
        """Returns the removable parts of the model, layer by layer."""
        return ()

    def modules(self) -> Mapping[str, nn.Module]:
        """Returns all modules with parameters, by name."""
        return {name: role.module for name, role in self.roles.items()}

    def optimizers(self) -> Iterator[tuple[str, Optimizer]]:
        """Yields every optimizer with the name of its role."""
        return ((name, role.optimizer) for name, role in self.roles.items())

    def configure_optimizers(self) -> None:
        """Makes the optimizers; called once, after all stages are attached."""
        for role in self.roles.values():
            settings = role.settings
            blocks = () if settings.layer_decay is None else self.blocks()
            groups = settings.parameter_groups(role.module, blocks)
            try:
                role.optimizer = settings.make(self.slots, groups)
            except UsageError:
                parameters = role.module.parameters()
                if all(parameter.requires_grad for parameter in parameters):
                    raise
                # Muon refuses vectors, also those that are frozen.
                groups = settings.parameter_groups(role.module, blocks, frozen=False)
                role.optimizer = settings.make(self.slots, groups)

    def start_averages(self) -> None:
        """Starts the averages of ``train.ema``; called once, when the parameters are where they
        stay.
        """
        if self.context.ema is None:
            return
        self.averages = WeightAverages(self.modules(), self.context.ema)
        if not self.averages.values:
            problem = "has no parameter that can be averaged"
            raise UsageError(f"train.ema: {type(self).__name__}.modules() {problem}")

    def averaged_update(
        self, batch: Batch, noise: Batch, progress: Progress
    ) -> dict[str, Any]:
        """Calls ``update``, then moves the averages."""
        output = self.update(batch, noise, progress)
        if self.averages is not None:
            self.averages.update()
        return output

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Yields trainable parameters by name, the same names with every stage."""
        for role_name, role in self.roles.items():
            for name, parameter in role.module.named_parameters():
                if parameter.requires_grad:
                    yield f"{role_name}.{name}", parameter

    def gradients(self) -> dict[str, Tensor | None]:
        """Returns the last gradient of every trainable parameter, None where none arrived."""
        return {name: parameter.grad for name, parameter in self.named_parameters()}

    def whole(self, tensor: Tensor) -> Tensor:
        """Returns a parameter, a gradient or a result of these, as a single process has it.

        Where processes have parts of parameters, all have to call it, and the value of such a
        tensor is only that of a part.
        """
        return tensor if self.sharding is None else self.sharding.whole(tensor)

    def periods(self) -> dict[str, int]:
        """Returns the updates between two steps of a parameter by name; the default is one."""
        periods = {}
        for role_name, role in self.roles.items():
            if role.every > 1:
                for name, _ in role.module.named_parameters():
                    periods[f"{role_name}.{name}"] = role.every
        return periods

    def idle(self, progress: Progress) -> Collection[str]:
        """Returns the names of trainable parameters that no loss uses yet.

        Other parameters are a mistake if no gradient reaches them.
        """
        return ()

    def least_work(self, batch_size: int) -> tuple[int, int] | None:
        """Returns the least FLOP and bytes of one update; None without a formula."""
        return None

    def state_dict(self) -> State:
        """Returns parameters, buffers and optimizers.

        The structure is the same with every stage, so that a state can be loaded with others.
        """
        modules = {}
        for name, module in self.modules().items():
            modules[name] = module.state_dict()
        optimizers = {}
        for name, optimizer in self.optimizers():
            optimizers[name] = optimizer.state_dict()
        return {"modules": modules, "optimizers": optimizers}

    def weights(self, state: State) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns a state's parameters and buffers for another training, by name in ``modules``."""
        modules: Mapping[str, Mapping[str, Tensor]] = state["modules"]
        return modules

    def complete_state(self) -> State:
        """Returns ``state_dict`` and the common state: averages, and names of frozen parameters.

        Its tensors are whole, also where processes have parts of them; then all have to call it.
        """
        frozen: dict[str, list[str]] = {}
        for module_name, module in self.modules().items():
            parameters = module.named_parameters()
            frozen[module_name] = [
                name for name, parameter in parameters if not parameter.requires_grad
            ]
        state = {**self.state_dict(), FROZEN: frozen}
        if self.averages is not None:
            if self._evaluating:
                problem = "a learner has no state during an evaluation"
                raise RuntimeError(f"{problem}, which swaps its parameters")
            state[AVERAGES] = self.averages.state_dict()
        return state if self.sharding is None else whole_state(state, self.sharding)

    def load_complete_state(self, state: State) -> None:
        """Restores what ``complete_state`` returned, in place."""
        if self.sharding is not None:
            state = divided_state(state, self, self.sharding)
        common = (FROZEN, AVERAGES)
        remaining = {key: value for key, value in state.items() if key not in common}
        self.load_state_dict(remaining)
        modules = self.modules()
        for module_name, frozen in state.get(FROZEN, {}).items():
            for name, parameter in modules[module_name].named_parameters():
                is_trained = name not in frozen
                if parameter.requires_grad != is_trained:
                    parameter.requires_grad_(is_trained)
        if self.averages is not None:
            self.averages.load_state_dict(saved_averages(state) or {})

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned, in place."""
        for name, module in self.modules().items():
            load_module(module, state["modules"][name])
        for name, optimizer in self.optimizers():
            restore(optimizer, state["optimizers"][name])


def _divisor(loss: Loss) -> Any:
    """Returns the divisor of a loss: its count, or 1 if its count and its sum are zero, so that the
    gradient is zero and not 0 / 0.
    """
    count = loss.count
    # A branch on the value of a tensor would wait for the device.
    if isinstance(count, Tensor):
        return count.masked_fill((count == 0) & (loss.sum.detach() == 0), 1)
    if count or loss.sum.detach().any():
        return count
    return 1


class GradientLearner(Learner):
    """A module that is trained by the gradient of a loss, with the recipe's optimizer.

    Write ``build`` and ``loss``; call the module as ``self.slots.forward(...)``, so that stages
    reach it. What else a training needs is here: optimizer, clipping, averaged parameters
    (``train.ema``), evaluation and state.
    """

    story = ("forward", "loss")
    compilable: ClassVar[tuple[str, ...]] = ("forward",)

    def __init__(
        self, config: Any, shapes: Mapping[str, tuple[int, ...]], context: Context
    ) -> None:
        super().__init__(config, shapes, context)
        # Initial weights follow from the recipe's seed, whatever was sampled before.
        with torch.random.fork_rng(devices=[]):
            seed_torch(context.generator("parameters", "cpu").initial_seed())
            self.module = self.build(config, shapes, context)
        parameters = []
        if isinstance(self.module, nn.Module):
            parameters = list(self.module.parameters())
        if not any(parameter.requires_grad for parameter in parameters):
            method = method_named(self, "build")
            expected = "a module with parameters to train"
            actual = type(self.module).__name__
            raise RunnerError(f"{method} should return {expected}, got {actual}")
        self.model = self.role("model", self.module)
        # The role may have moved the module to a device, with new parameters.
        parameters = list(self.module.parameters())
        floats = [
            parameter for parameter in parameters if parameter.is_floating_point()
        ]
        # Outputs of a module with several types must not lose digits.
        self._parameter = max(floats or parameters, key=Tensor.element_size)
        self._has_loss = False

    def refuse_closures(self) -> None:
        """Raises a RunnerError for an optimizer that ``update`` cannot step without a closure."""
        if type(self).update is not GradientLearner.update:
            return
        step = type(self.model.optimizer).step
        closure = inspect.signature(step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            name = type(self).__name__
            raise RunnerError(
                f"{name}.configure_optimizers makes a {type(self.model.optimizer).__name__}, whose "
                f"step computes gradients by a closure, and GradientLearner.update passes none: "
                f"write {name}.update, or take another optimizer"
            )

    @abstractmethod
    def build(
        self, config: Any, shapes: Mapping[str, tuple[int, ...]], context: Context
    ) -> nn.Module:
        """Makes the module; torch's global generator is seeded for it."""

    @abstractmethod
    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Returns the loss of a batch as a sum and a count."""

    def update(self, batch: Batch, noise: Batch, progress: Progress) -> dict[str, Any]:
        """Computes one gradient and performs one step of the optimizer."""
        self.slots.zero_grad(self.model.optimizer)
        loss: Loss = self.slots.forward_backward(batch, noise, progress)
        self.model.step()
        return loss.outputs()

    def sample_losses(self, compute: Callable[[], Tensor]) -> Tensor | None:
        """Returns the result of a function, the loss of every sample [B], for ``Loss.samples``;
        None if the source does not select samples by their losses.
        """
        if not self.context.sample_losses:
            return None
        with torch.no_grad():
            return compute()

    def forward_backward(
        self,
        batch: Batch,
        noise: Batch,
        progress: Progress,
        denominator: Callable[[Any], Any] | None = None,
    ) -> Loss:
        """Adds the gradient of the loss to that of the parameters; returns the loss, detached.

        If the batch is part of a larger one, ``denominator`` converts its count to the
        divisor of its sum.
        """
        loss: Loss = self.slots.loss(batch, noise, progress)
        # Only the first loss is checked, because updates are short.
        if not self._has_loss:
            check_loss(loss, method_named(self, "loss"))
            self._has_loss = True
        divisor = _divisor(loss) if denominator is None else denominator(loss.count)
        self.slots.backward(loss.sum / divisor)
        return loss._replace(sum=loss.sum.detach())

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Returns the module's output in the widest type of its parameters, whatever the precision
        inside.
        """
        precision = self.slots.precision
        # Without a stage: entering an empty context takes longer than a small layer.
        if precision is nullcontext:
            output = self.module(*inputs, **options)
        else:
            with precision():
                output = self.module(*inputs, **options)
        dtype = self._parameter.dtype
        # The general case takes longer than the forward of a small model.
        if isinstance(output, Tensor) and output.dtype == dtype:
            return output
        # torch.compile cannot trace ``to_real``, which only complex parameters need.
        if dtype.is_complex:
            dtype = dtype.to_real()

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return map_tensors(convert, output)

    def inputs(self, batch: Batch) -> Any:
        """Returns the first tensor of a batch by default."""
        if type(self).predict is GradientLearner.predict:
            self._check_inputs()
        return next(tensors(batch))

    def _check_inputs(self) -> None:
        """Raises a RunnerError if the module needs more than the one tensor that ``inputs`` would
        return.
        """
        try:
            signature = inspect.signature(self.module.forward)
        # A compiled function, for example, has no signature.
        except (TypeError, ValueError):
            return
        positional = []
        named = []
        for parameter in signature.parameters.values():
            if parameter.default is not parameter.empty:
                continue
            if parameter.kind is parameter.KEYWORD_ONLY:
                named.append(parameter.name)
            elif parameter.kind in (
                parameter.POSITIONAL_ONLY,
                parameter.POSITIONAL_OR_KEYWORD,
            ):
                positional.append(parameter.name)
        if len(positional) < 2 and not named:
            return
        learner = type(self).__name__
        arguments = ", ".join([*positional, *(f"{name}=" for name in named)])
        inputs = [f"inputs[{number}]" for number in range(len(positional))]
        call = ", ".join([*inputs, *(f"{name}=..." for name in named)])
        raise RunnerError(
            f"{method_named(self, 'build')} returns a module whose forward takes ({arguments}), "
            "and a model is called with the first tensor of a batch alone: "
            f"write {learner}.inputs(batch), which returns all of them, "
            f"and {learner}.predict(inputs), which calls self.slots.forward({call})"
        )

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """Returns the module's output in evaluation mode."""
        with self.evaluating():
            return self.slots.forward(inputs)

    @torch.no_grad()
    def metrics(self, batch: Batch) -> Mapping[str, Mean]:
        """Returns the loss, and what else it logs, on a held-out batch."""
        noise = self.held_out_noise(batch)
        loss: Loss = self.slots.loss(batch, noise, self.context.progress)
        return loss.means()

    def blocks(self) -> Sequence[nn.Module]:
        """Returns the members of the module's ``blocks``, if it has a list of that name."""
        blocks = getattr(self.module, "blocks", ())
        return list(blocks) if isinstance(blocks, nn.ModuleList | nn.Sequential) else ()

    def modules(self) -> Mapping[str, nn.Module]:
        """Returns the module, and those of further roles that are not inside of it."""
        modules = {"model": self.module}
        # Evaluations call this for every batch, and few learners have several roles.
        if len(self.roles) == 1:
            return modules
        inner = set(map(id, self.module.modules()))
        further = {
            name: module
            for name, module in super().modules().items()
            if name != "model" and id(module) not in inner
        }
        return modules | further
