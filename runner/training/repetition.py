"""Repeats updates of a training with the baseline: the same learner without any stage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.plugin.progress import Progress
from runner.proof.trees import clones, leaves
from runner.system import generators
from runner.system.tensor_trees import map_tensors
from runner.training.resuming import set_group_value
from runner.training.step import Drawn, Step

if TYPE_CHECKING:
    from runner.plugin.source import State
    from runner.training.adaptive_rates import RateSource
    from runner.training.pipeline import Assembly

NOTHING = nullcontext()
Values = dict[str, Any]
"""Tensors and numbers by dotted path: the result of an update, and the state after it."""


@dataclass(frozen=True)
class Snapshot:
    """The values that determine the result of an update.

    Attributes:
        state: The learner's complete state before it.
        inputs: Its batch and noise.
        counts: The progress before it.
    """

    state: State
    inputs: Drawn
    counts: dict[str, int]

    @classmethod
    def of(cls, step: Step, inputs: Drawn) -> Snapshot:
        """Copies the state of a training before an update on this batch."""
        state = clones(step.learner.complete_state())
        return cls(state, clones(inputs), step.progress.state_dict())


def values_of(output: Any, state: State) -> Values:
    """Returns copies of the result of an update and of the learner's state after it."""
    tree = {"output": output, "learner": state}
    return {path: clones(value) for path, value in leaves(tree)}


class GradientNoise:
    """Changes numbers by a unit of their last digit; gradients by one of the largest gradient.

    A gradient that is zero except for rounding errors has a random sign, and Adam turns it into
    full steps. That is why gradients get separate noise.

    Args:
        seed: Seed of the noise.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def perturb(self, tensor: Tensor) -> Tensor:
        """Returns the tensor with numbers that are changed relative to their size."""
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            return tensor
        return tensor * (1 + self._random(tensor) * torch.finfo(tensor.dtype).eps)

    def add_to_gradients(self, optimizer: Optimizer) -> None:
        """Adds noise to the gradients of an optimizer's parameters, in place."""
        gradients = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None and _has_numbers(gradient):
                    gradients.append(gradient)
        largest = max(
            (float(gradient.abs().max()) for gradient in gradients), default=0.0
        )
        for gradient in gradients:
            size = largest * torch.finfo(gradient.dtype).eps
            gradient.add_(self._random(gradient), alpha=size)

    def _random(self, tensor: Tensor) -> Tensor:
        # Numbers from the host are the same for every device.
        numbers = 2 * torch.rand(tensor.shape, generator=self._generator) - 1
        return numbers.to(tensor.device, tensor.dtype)


class BaselineLearner:
    """A learner without stages that repeats updates of a training.

    Args:
        pipeline: The training's. A second learner is built, with as many parameters and optimizers.
    """

    def __init__(self, pipeline: Assembly) -> None:
        # Building a learner draws its initial weights.
        with generators.Globals().apart():
            self.learner = pipeline.build_another_learner()
        self._noise: GradientNoise | None = None
        self.learner.slots.wrap(
            "optimizer_step", lambda step: partial(self._step_optimizer, step)
        )
        unit, length = pipeline.recipe.length
        self._progress = Progress(unit, length, pipeline.progress.epoch_samples)
        # The same update as in the training, with the same average.
        self._update = self.learner.update
        if pipeline.recipe.train.ema is not None:
            self._update = self.learner.averaged_update
        self._rates = [
            [float(group["lr"]) for group in optimizer.param_groups]
            for _, optimizer in self.learner.optimizers()
        ]
        self._schedule = pipeline.recipe.lr_scheduler

    def repeat(
        self, step: Step, snapshot: Snapshot, *, noise: GradientNoise | None = None
    ) -> Values:
        """Repeats the update of a snapshot, and preserves the process's random generators.

        Args:
            step: The training's, which seeds updates.
            snapshot: The start of the update; it is not changed.
            noise: Perturbs the state before, and gradients.
        """
        output = self.update_from(step, snapshot, noise=noise)
        return values_of(output, self.learner.complete_state())

    def update_from(
        self,
        step: Step,
        snapshot: Snapshot,
        *,
        noise: GradientNoise | None = None,
        around: AbstractContextManager[Any] = NOTHING,
    ) -> Any:
        """Repeats the update inside of a context, and returns its result.

        The learner then has the state after the update.
        """
        state = clones(snapshot.state)
        if noise is not None:
            state = map_tensors(noise.perturb, state)
        self._noise = noise
        inputs = clones(snapshot.inputs)
        with generators.Globals().apart():
            self.learner.load_complete_state(state)
            self._progress.load_state_dict(snapshot.counts)
            multiplier = self._schedule.multiplier(self._progress.fraction)
            self._set_rates(multiplier, step.adaptive_rates)
            # The update draws the same numbers as in the training.
            step.seed(snapshot.counts["updates"])
            with around:
                return self._update(inputs.batch, inputs.noise, self._progress)

    def _step_optimizer(
        self, step: Callable[[Optimizer], Any], optimizer: Optimizer
    ) -> Any:
        if self._noise is not None:
            self._noise.add_to_gradients(optimizer)
        return step(optimizer)

    def _set_rates(self, multiplier: float, adaptive: RateSource | None) -> None:
        optimizers = self.learner.optimizers()
        for (_, optimizer), rates in zip(optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=False):
                base_rate = rate if adaptive is None else adaptive.rate(rate)
                set_group_value(group, "lr", base_rate * multiplier)


def _has_numbers(gradient: Tensor) -> bool:
    """Returns whether noise can be added to a gradient."""
    if gradient.layout != torch.strided or not gradient.is_floating_point():
        return False
    return gradient.numel() > 0
