"""Cuts a batch into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, field_validator

from runner.api import (
    Batch,
    Close,
    Config,
    Contract,
    GradientLearnerConfig,
    MemoryChoice,
    Pipeline,
    Progress,
    RunnerError,
    Setting,
    Stage,
    StageConfig,
    Statistical,
    UsageError,
)

if TYPE_CHECKING:
    from torch import Tensor

    from runner.api import Loss


PLANNED_PARTS = 3
"""Parts after which no further one has a higher peak: gradients exist, and losses are added."""
TIME_OF_HALVING = 0.05
"""Share of an update's time that halving the parts adds, expected from experience with small models."""


class Divisor(Config):
    """The number of parts of a batch from an epoch on."""

    epoch: Annotated[int, Field(ge=0)]
    """The first epoch, counted from 0."""
    divisor: Annotated[int, Field(ge=1)]
    """Number of parts of a batch."""

    def part_of(self, batch_size: int) -> int:
        """Returns the number of samples of the largest part of a batch."""
        return -(-batch_size // self.divisor)


class GradientAccumulationConfig(StageConfig):
    """Computes the gradient of a batch in several smaller parts, one after the other, before the optimizer steps.

    The batch of an update is still ``train.batch_size``; only ``micro_batch`` samples at a time are
    in memory. Losses are weighted by the learner's count (samples, tokens), so the gradient is that
    of the complete batch, also if the last part is smaller. Noise is cut where the learner's
    ``noise_layout`` has one row per sample. Where several networks are trained in turns (a GAN),
    each one's gradient is accumulated in a separate window.

    ``divisors`` lets accumulation grow with the epochs: with
    ``[{epoch: 10, divisor: 2}, {epoch: 20, divisor: 8}]`` a batch has two parts from epoch 10 on, and
    eight from epoch 20 on. The batch and its gradient stay the same; it is for data or models whose
    samples need more memory later in a training.

    When it helps: activations of the complete batch do not fit into memory. In quarters, an update
    of two graph transformers held 74 % less, their processes of 445 MiB 14 % less.
    When it hurts: small parts use the hardware worse. Dropout uses other masks, and batch
    normalisation sees each part separately.
    """

    kind: ClassVar[str] = "gradient_accumulation"
    implementation = "GradientAccumulation"
    phase: ClassVar[int] = 2
    claims: ClassVar[frozenset[str]] = frozenset({"forward_backward"})
    cuts_batches: ClassVar[bool] = True

    micro_batch: Annotated[int, Field(ge=1)] = 8
    """Samples that are in memory at a time."""
    divisors: list[Divisor] | None = None
    """Number of parts by epoch, in ascending order; ``micro_batch`` applies before the first one."""

    @field_validator("divisors")
    @classmethod
    def _grow(cls, divisors: list[Divisor] | None) -> list[Divisor] | None:
        if divisors is None:
            return None
        if not divisors:
            raise ValueError("names no epoch; leave it out, or write [{epoch: 10, divisor: 2}]")
        for before, after in pairwise(divisors):
            if after.epoch <= before.epoch:
                raise ValueError(f"epoch {after.epoch} follows epoch {before.epoch}: sort by epoch, each once")
            if after.divisor < before.divisor:
                problem = f"divisor {after.divisor} of epoch {after.epoch} is below {before.divisor}"
                raise ValueError(f"{problem}: accumulation grows with the epochs")
        return divisors

    def inactive(self, setting: Setting) -> str | None:
        """Returns None; raises a UsageError for divisors of data without epochs."""
        if self.divisors and "epochs" not in setting.data.units:
            raise _without_epochs(setting.data.kind)
        return None

    def largest_part(self, batch_size: int) -> int:
        """Returns the largest number of samples that are in memory at a time in a training."""
        if not self.divisors:
            return self.micro_batch
        first = self.divisors[0]
        largest = first.part_of(batch_size)
        return largest if first.epoch == 0 else max(largest, self.micro_batch)

    def part_size(self, batch_size: int, epoch: int) -> int:
        """Returns the number of samples that are in memory at a time in an epoch."""
        reached = [divisor for divisor in self.divisors or () if divisor.epoch <= epoch]
        return reached[-1].part_of(batch_size) if reached else self.micro_batch

    def contract(self, setting: Setting) -> Contract:
        """Returns ``Close``, or ``Statistical`` if an update uses random numbers, which
        differ in parts.
        """
        return Statistical() if setting.model.draws() else Close()

    def planned_batch_size(self, setting: Setting, batch_size: int) -> int:
        """Returns the size of a few parts: later ones need as much memory.

        Other learners than a ``GradientLearner`` may compute something with the whole batch.
        """
        if not isinstance(setting.model, GradientLearnerConfig):
            return batch_size
        return min(batch_size, PLANNED_PARTS * self.largest_part(batch_size))

    @classmethod
    def memory_choices(cls, batch_size: int) -> Sequence[MemoryChoice]:
        """Returns parts of half the batch, a quarter, and so on."""
        choices = []
        parts = 2
        while parts <= batch_size:
            time = 1 + TIME_OF_HALVING * (parts.bit_length() - 1)
            micro_batch = -(-batch_size // parts)
            choices.append(
                MemoryChoice({"micro_batch": micro_batch}, time, f"{parts} smaller parts, one after another")
            )
            parts *= 2
        return choices


class GradientAccumulation(Stage):
    """Calls ``forward_backward`` once for each part."""

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces the gradient of a batch by the sum of the gradients of its parts.

        Raises:
            UsageError: There are divisors, and the data have no epochs.
        """
        from torch.nn.modules.batchnorm import _BatchNorm

        from runner.api import PartCounts, has_numbers

        self.learner = pipeline.learner
        self.source = pipeline.source
        # Settings do not show whether a stream has a length. A plan of the memory has no data.
        is_stream = not has_numbers(getattr(self.source, "train", ()))
        if self.config.divisors and is_stream and self.source.epoch_samples(pipeline.batch_size) is None:
            raise _without_epochs(type(self.source).__name__)
        self.part_counts = PartCounts(self.config.kind, self.learner, self.source)
        largest_part = self.config.largest_part(pipeline.batch_size)
        if largest_part >= pipeline.batch_size and not self.config.divisors:
            pipeline.note(f"a batch of {pipeline.batch_size} is one part: there is nothing to cut")
        modules = self.learner.modules().values()
        layers = [layer for module in modules for layer in module.modules()]
        if any(isinstance(layer, _BatchNorm) for layer in layers):
            pipeline.note(f"batch normalisation sees {largest_part} samples at a time")
        self.whole: Callable[..., Loss] = pipeline.slots.forward_backward
        pipeline.slots.replace("forward_backward", self.accumulated)

    def accumulated(
        self,
        batch: Batch,
        noise: Batch,
        progress: Progress,
        denominator: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> Loss:
        """Adds the gradient of the batch, in parts.

        Gradients from before the call, such as that of a penalty or of another loss, stay as they
        are.

        Args:
            batch: A batch.
            noise: The random numbers of its update.
            progress: Current progress of the training.
            denominator: Converts the count of the batch to the divisor of its loss, if the batch is
                a part of a larger one.
            options: Passed to the slot. A learner with several losses names one of them.

        Returns:
            The loss of the batch, detached.
        """
        size = self.source.size(batch)
        start = 0
        losses: list[Loss] = []
        sizes: list[int] = []
        divisor: Any = None

        def share(count: Any) -> Any:
            # The count of the batch is only known at the end; until then, it is extrapolated from
            # the first part.
            nonlocal divisor
            if divisor is None:
                divisor = _at_least_one(count * size / micro_size)
                if denominator is not None:
                    divisor = denominator(divisor)
            return divisor

        parameters = self._parameters()
        earlier = [parameter.grad for parameter in parameters]
        # The correction below must not scale gradients of earlier losses.
        for parameter in parameters:
            parameter.grad = None

        part_size = self.config.part_size(size, progress.epochs)
        for micro_batch in self.source.split(batch, part_size):
            micro_size = self.source.size(micro_batch)
            part_of_noise = self._part_of_noise(noise, size, slice(start, start + micro_size))
            losses.append(self.whole(micro_batch, part_of_noise, progress, share, **options))
            sizes.append(micro_size)
            start += micro_size
        self.part_counts.check(batch, sizes, losses)
        loss = type(losses[0]).total(losses)
        # Parts with other counts than the first one (padding) make the extrapolation wrong.
        count = loss.count if denominator is None else denominator(loss.count)
        scale = _scale(divisor, count)
        is_exact = isinstance(scale, int | float) and scale == 1
        for parameter, gradient in zip(parameters, earlier, strict=True):
            if not is_exact and parameter.grad is not None:
                parameter.grad.mul_(scale)
            if gradient is not None:
                parameter.grad = _sum(gradient, parameter.grad)
        return loss

    def _parameters(self) -> list[Tensor]:
        """Returns the trainable parameters; one that several roles share is included once."""
        parameters = (parameter for _, parameter in self.learner.named_parameters())
        return list({id(parameter): parameter for parameter in parameters}.values())

    def _part_of_noise(self, noise: Batch, size: int, rows: slice) -> Batch:
        """Returns the random numbers of a part from those of an update."""
        try:
            return self.learner.noise_layout.take(noise, rows, size)
        except ValueError as error:
            owner = type(self.learner).__name__
            hint = f"name entries of the entire batch in {owner}.noise_layout = BatchLayout(shared={{...}})"
            raise RunnerError(f"gradient_accumulation: the noise of {owner} cannot be cut: {error}; {hint}") from None


def _without_epochs(data: str) -> UsageError:
    return UsageError(f"gradient_accumulation.divisors: '{data}' has no epochs: use micro_batch")


def _scale(denominator: Any, count: Any) -> Any:
    """Returns the factor that corrects gradients divided by an extrapolated count; with nothing
    counted they stay zero.
    """
    if isinstance(count, int | float):
        return denominator / count if count else 1
    return denominator / count.masked_fill(count == 0, 1)


def _at_least_one(count: Any) -> Any:
    return max(count, 1) if isinstance(count, int | float) else count.clamp(min=1)


def _sum(earlier: Tensor, added: Tensor | None) -> Tensor:
    """Returns the sum of two gradients, in the memory of the earlier one if it is dense."""
    if added is None:
        return earlier
    # torch adds a sparse tensor to a dense one, but not the other way round.
    return added + earlier if earlier.is_sparse else earlier.add_(added)
