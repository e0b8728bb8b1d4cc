"""The step of a training: draw, transfer, update, feedback.

Only this module defines that sequence. ``Assembly.transfer`` (pipeline.py) moves a batch to the
device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from runner.plugin.context import derived_seed
from runner.plugin.learner import Learner
from runner.plugin.lr_scheduler import ConstantConfig
from runner.plugin.source import Source
from runner.system.errors import RunnerError
from runner.system.tensor_trees import described
from runner.training.resuming import set_group_value

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from runner.plugin.source import Batch
    from runner.training.adaptive_rates import RateSource
    from runner.training.pipeline import Assembly

# The golden ratio in 64 bits: neighbouring updates get distant seeds (Steele et al. 2014,
# SplitMix).
_MIX = 0x9E3779B97F4A7C15


class Drawn(NamedTuple):
    """The input of one update."""

    batch: Batch
    noise: Batch


class Step:
    """The sequence of a training step, with its parts as separate methods.

    Attributes:
        batch: The batch of the last update.
        failed: The input of the update that raised an exception.
        adaptive_rates: Learning rates that evaluations change; None if none does.
    """

    def __init__(self, pipeline: Assembly) -> None:
        self.pipeline = pipeline
        self.slots = pipeline.slots
        self.progress = pipeline.progress
        self.source = pipeline.source
        self.learner = pipeline.learner
        context = pipeline.context
        # Samples that a process draws itself have random numbers of their own, too.
        generator = (
            context.process_generator if pipeline.draws_parts else context.generator
        )
        self.noise = generator("noise")
        parallel = pipeline.parallel
        self._counts = self.source.counts if parallel is None else parallel.counts
        # A call that does nothing delays every update of a small model.
        self._has_noise = not _is_method(self.learner.noise, Learner.noise)
        self._has_feedback = not _is_method(self.source.feedback, Source.feedback)
        self.batch: Batch = None
        self.failed: Drawn | None = None
        self._seed = derived_seed(pipeline.context.seed, "update")
        self._generator = torch.default_generator
        if pipeline.device.type == "cuda":
            index = pipeline.device.index or 0
            self._generator = torch.cuda.default_generators[index]
        # A constant schedule has nothing to set in an update.
        schedule = pipeline.recipe.lr_scheduler
        self._schedule = None if schedule == ConstantConfig() else schedule
        # The loop sets them, because it calls evaluations.
        self.adaptive_rates: RateSource | None = None
        self._optimizers: list[Optimizer] = []
        self._rates: list[tuple[dict[str, Any], float]] = []
        self.reset()

    def __call__(self, inputs: Drawn | None = None) -> dict[str, Any] | None:
        """Performs a complete step and returns the result of its update.

        Args:
            inputs: A batch that has been drawn; by default, the next one is drawn.

        Returns:
            The result; None if the source had no batch to learn from yet.
        """
        # Draw and transfer.
        inputs = inputs or self.draw()
        if inputs is None:
            return None

        # Update.
        self.seed(self.progress.updates)
        try:
            # Equal to ``update``, with one call less in every step.
            if self.pipeline.watch is None:
                if self._schedule is not None:
                    self._set_rates(self._schedule.multiplier(self.progress.fraction))
                output: dict[str, Any] = self.slots.update(
                    inputs.batch, inputs.noise, self.progress
                )
                if not isinstance(output, dict):
                    self._refuse(output)
            else:
                output = self.update(inputs)
        except RunnerError:
            raise
        except Exception as error:
            self.failed = inputs
            number = self.progress.updates + 1
            error.add_note(f"update {number}, on the batch: {described(inputs.batch)}")
            raise

        # Feedback.
        if self._has_feedback:
            self.source.feedback(inputs.batch, output)
        self.progress.updates += 1
        self.progress.advance(self._counts(inputs.batch))
        self.batch = inputs.batch
        return output

    def draw(self) -> Drawn | None:
        """Returns a batch on the device and the random numbers of its update.

        Returns None if the source has nothing to learn from yet.
        """
        batch = self.slots.next_batch(self.pipeline.batch_size, self.progress)
        if batch is None:
            self.count(None)
            return None
        noise = self.learner.noise(batch, self.noise) if self._has_noise else {}
        return Drawn(batch, noise)

    def next(self) -> Drawn:
        """Returns the input of the next update; draws until the source has a batch."""
        while (inputs := self.draw()) is None:
            pass
        return inputs

    def update(self, inputs: Drawn) -> dict[str, Any]:
        """Performs the update alone, with the learning rates that belong to it.

        Raises:
            RunnerError: The learner returned no dictionary.
        """
        if self._schedule is not None:
            self._set_rates(self._schedule.multiplier(self.progress.fraction))
        is_watched = self.pipeline.watch is not None
        with self.pipeline.first_updates() if is_watched else nullcontext():
            output = self.slots.update(inputs.batch, inputs.noise, self.progress)
        if not isinstance(output, dict):
            self._refuse(output)
        return output

    def count(self, batch: Batch | None) -> None:
        """Counts a batch as finished."""
        self.progress.advance(self._counts(batch))

    def seed(self, update: int) -> None:
        """Seeds torch's global generator of the device for the update of that number.

        A stage that draws more or fewer numbers than the baseline thus does not shift what later
        updates draw.
        """
        self._generator.manual_seed((self._seed + update * _MIX) % 2**63)

    def reset(self) -> None:
        """Collects the parameter groups again, after another state was loaded."""
        self._optimizers = [optimizer for _, optimizer in self.learner.optimizers()]
        self._rates = []
        base_rates = self.pipeline.base_rates
        for optimizer, rates in zip(self._optimizers, base_rates, strict=True):
            groups = optimizer.param_groups
            # A group that is added during the training keeps the rate that it was added with.
            rates += [float(group["lr"]) for group in groups[len(rates) :]]
            self._rates += zip(groups, rates, strict=True)

    def _set_rates(self, multiplier: float) -> None:
        group_count = sum(len(optimizer.param_groups) for optimizer in self._optimizers)
        if group_count != len(self._rates):
            self.reset()
        adaptive = self.adaptive_rates
        for group, base_rate in self._rates:
            rate = base_rate if adaptive is None else adaptive.rate(base_rate)
            set_group_value(group, "lr", rate * multiplier)

    def _refuse(self, output: object) -> NoReturn:
        method = f"{type(self.learner).__name__}.update"
        kind = type(output).__name__
        raise RunnerError(f"{method} should return a dictionary of tensors, got {kind}")


def _is_method(bound: Callable[..., object], method: Callable[..., object]) -> bool:
    """Returns whether a bound method is that of a class, which neither a subclass nor a stage has
    replaced.
    """
    return getattr(bound, "__func__", None) is method
