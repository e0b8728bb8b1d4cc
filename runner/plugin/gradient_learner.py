"""The first storey of learners: a module and a loss; the rest is here."""

from __future__ import annotations

import copy
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from runner.plugin.context import Context
from runner.plugin.learner import Learner, Mean
from runner.plugin.progress import Progress
from runner.system.tree import map_tensors, tensors

if TYPE_CHECKING:
    from runner.plugin.source import Batch, State


class Loss(NamedTuple):
    """What a batch costs: the gradient is that of ``sum / count``, however the batch is cut."""

    sum: Tensor
    """Of all items, a scalar."""
    count: Any
    """How many they are (samples, tokens): a number or a tensor."""
    also: Mapping[str, Mean] = {}
    """What else to log, detached."""


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
        self.model = self.role("model", self.module)
        self._parameter = next(self.module.parameters())
        self.average = None if context.ema is None else copy.deepcopy(self.module).requires_grad_(False)
        self._evaluating = False

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
        loss = self.slots.forward_backward(batch, noise, progress)
        self.model.step()
        if self.average is not None and self.context.ema is not None:
            own: list[Tensor] = list(self.module.parameters())
            average: list[Tensor] = list(self.average.parameters())
            with torch.no_grad():
                torch._foreach_lerp_(average, own, 1 - self.context.ema)
                for buffer, source in zip(self.average.buffers(), self.module.buffers(), strict=True):
                    buffer.copy_(source)
        return {"loss": Mean(loss.sum, loss.count), **loss.also}

    def forward_backward(
        self, batch: Batch, noise: Batch, progress: Progress, denominator: Callable[[Any], Any] | None = None
    ) -> Loss:
        """Adds the gradient of the loss to that of the parameters; returns the loss, detached.

        Where the batch is part of a larger one, ``denominator`` says from its count what to divide its sum by.
        """
        loss: Loss = self.slots.loss(batch, noise, progress)
        self.slots.backward(loss.sum / (loss.count if denominator is None else denominator(loss.count)))
        return Loss(loss.sum.detach(), loss.count, loss.also)

    def forward(self, *inputs: Any) -> Any:
        """The module's output, in the parameters' own type whatever the precision inside."""
        with self.slots.precision():
            output = self.module(*inputs)
        dtype = self._parameter.dtype
        if isinstance(output, Tensor) and output.dtype == dtype:
            return output  # at once, for small models
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
        noise = self.noise(batch, torch.Generator(self.device).manual_seed(0))
        loss: Loss = self.slots.loss(batch, noise, Progress("updates", 1))
        return {"loss": Mean(loss.sum, loss.count), **loss.also}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The module in evaluation mode, with the averaged parameters if there are any."""
        if self._evaluating:  # predict inside an evaluation
            yield
            return
        self._evaluating = True
        self.module.eval()
        self._swap()
        try:
            yield
        finally:
            self._swap()
            self.module.train()
            self._evaluating = False

    def blocks(self) -> Sequence[nn.Module]:
        """The members of the module's ``blocks``, if it has a list of that name."""
        found = getattr(self.module, "blocks", ())
        return list(found) if isinstance(found, nn.ModuleList | nn.Sequential) else ()

    def modules(self) -> Mapping[str, nn.Module]:
        """The module, and its average if there is one."""
        return {"model": self.module} | ({} if self.average is None else {"average": self.average})

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
