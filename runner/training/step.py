"""The step of a training: draw, transfer, update, feedback; only this module defines that
sequence.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from runner.plugin.context import derived_seed
from runner.plugin.lr_scheduler import ConstantConfig
from runner.system.errors import RunnerError
from runner.system.tensor_trees import described

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from runner.plugin.source import Batch
    from runner.training.pipeline import Assembly

_MIX = 0x9E3779B97F4A7C15
"""The golden ratio in 64 bits: neighbouring updates get distant seeds (Steele et
al. 2014, SplitMix).
"""


class Drawn(NamedTuple):
    """The input of one update."""

    batch: Batch
    noise: Batch


class Step:
    """The sequence of a training step, with its parts as separate methods."""

    def __init__(self, pipeline: Assembly) -> None:
        self.pipeline, self.slots, self.progress = (
            pipeline,
            pipeline.slots,
            pipeline.progress,
        )
        self.source, self.learner = pipeline.source, pipeline.learner
        self.noise = pipeline.context.generator("noise")
        self.batch: Batch = None
        """The batch of the last update."""
        self.failed: Drawn | None = None
        """The input of the update that raised an exception."""
        self._seed = derived_seed(pipeline.context.seed, "update")
        cuda = pipeline.device.type == "cuda"
        self._generator = (
            torch.cuda.default_generators[pipeline.device.index or 0]
            if cuda
            else torch.default_generator
        )
        schedule = pipeline.recipe.lr_scheduler
        self._schedule = None if schedule == ConstantConfig() else schedule
        self._optimizers: list[Optimizer] = []
        self._rates: list[tuple[dict[str, Any], float]] = []
        self.reset()

    def __call__(self, drawn: Drawn | None = None) -> dict[str, Any] | None:
        """Performs a complete step, with a sampled batch if one is given, and
        returns the result of its update.

        Returns None if the source had no batch to learn from yet.
        """
        drawn = drawn or self.draw()
        if drawn is None:
            return None
        self.seed(self.progress.updates)
        try:
            # The same as ``update``, with one call less in every step.
            if self.pipeline.watch is None:
                if self._schedule is not None:
                    self._set_rates(self._schedule.factor(self.progress.fraction))
                output = self._checked(
                    self.slots.update(drawn.batch, drawn.noise, self.progress)
                )
            else:
                output = self.update(drawn)
        except RunnerError:
            raise
        except Exception as error:
            self.failed = drawn
            error.add_note(
                f"update {self.progress.updates + 1}, on the batch: {described(drawn.batch)}"
            )
            raise
        self.source.feedback(drawn.batch, output)
        self.progress.updates += 1
        self.count(drawn.batch)
        self.batch = drawn.batch
        return output

    def draw(self) -> Drawn | None:
        """A batch on the device, and the update's random numbers; None if there is nothing to learn from yet."""
        batch = self.slots.next_batch(self.pipeline.batch_size, self.progress)
        if batch is None:
            self.count(None)
            return None
        return Drawn(batch, self.learner.noise(batch, self.noise))

    def next(self) -> Drawn:
        """Returns the input of the next update; samples until the source has a batch to learn
        from.
        """
        while (drawn := self.draw()) is None:
            pass
        return drawn

    def count(self, batch: Batch | None) -> None:
        """Counts a sampled batch as finished."""
        self.progress.advance(self.source.counts(batch))

    def update(self, drawn: Drawn) -> dict[str, Any]:
        """The update alone, with the learning rates that belong to it; a RunnerError if it returns no dictionary."""
        if self._schedule is not None:
            self._set_rates(self._schedule.factor(self.progress.fraction))
        with (
            nullcontext()
            if self.pipeline.watch is None
            else self.pipeline.first_updates()
        ):
            return self._checked(
                self.slots.update(drawn.batch, drawn.noise, self.progress)
            )

    def seed(self, update: int) -> None:
        """Seeds torch's global generator of the device for the update of that number.

        So a stage that draws more or fewer numbers than the baseline does not shift what later updates draw.
        """
        self._generator.manual_seed((self._seed + update * _MIX) % 2**63)

    def reset(self) -> None:
        """Looks for the parameter groups again, after another state was loaded."""
        self._optimizers = [optimizer for _, optimizer in self.learner.optimizers()]
        self._rates = []
        for optimizer, rates in zip(
            self._optimizers, self.pipeline.base_rates, strict=True
        ):
            # A group that was added during the training starts with the rate with which it was
            # added.
            rates += [
                float(group["lr"]) for group in optimizer.param_groups[len(rates) :]
            ]
            self._rates += zip(optimizer.param_groups, rates, strict=True)

    def _set_rates(self, factor: float) -> None:
        if sum(len(optimizer.param_groups) for optimizer in self._optimizers) != len(
            self._rates
        ):
            self.reset()
        for group, base_rate in self._rates:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(base_rate * factor)
            else:
                group["lr"] = base_rate * factor

    def _checked(self, output: Any) -> dict[str, Any]:
        if isinstance(output, dict):
            return output
        who = f"{type(self.learner).__name__}.update"
        raise RunnerError(
            f"{who} should return a dictionary of tensors, got {type(output).__name__}"
        )
