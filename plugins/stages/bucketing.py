"""Cuts batches by the size of their samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from runner.api import (
    Batch,
    Close,
    Pipeline,
    Progress,
    RunnerError,
    Setting,
    Source,
    SourceConfig,
    Stage,
    StageConfig,
    UsageError,
    tensors,
)

if TYPE_CHECKING:
    from runner.api import Learner, Loss


class BucketingConfig(StageConfig):
    """Computes the loss of a batch in parts whose samples are about equally large.

    A batch is padded to its largest sample; a part only to the largest of the part. Losses are
    sums, so those of the parts add up to that of the batch, in any order of its samples; the
    optimizer steps once, as before.

    When it helps: sizes differ much, so that a large part of a batch is padding.
    When it hurts: sizes are alike; every part needs a separate forward.
    """

    kind: ClassVar[str] = "bucketing"
    implementation = "Bucketing"
    phase: ClassVar[int] = 1
    wraps: ClassVar[frozenset[str]] = frozenset({"loss"})

    def contract(self, setting: Setting) -> Close:
        """Returns ``Close``: the same algebra."""
        return Close()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason if samples are of one size."""
        return None if setting.data.shapes_vary else nothing_is_padded(setting.data)


def nothing_is_padded(data: SourceConfig) -> str:
    """Returns the reason why a source whose samples are of one size needs no stage for padding."""
    name = type(data).__name__
    return f"samples are of one size, as {name}.shapes_vary = False declares: nothing is padded"


class Bucketing(Stage):
    """Adds up the losses of the parts."""

    def attach(self, pipeline: Pipeline) -> None:
        """Wraps the loss.

        Raises:
            UsageError: The update samples random numbers (dropout), which would differ in parts;
                or the source does not define how its batches are padded.
        """
        if pipeline.learner.config.draws():
            raise UsageError("bucketing would use other random numbers than the batch: switch the model's dropout off")
        source = pipeline.source
        if type(source).buckets is Source.buckets:
            name = type(source).__name__
            raise UsageError(f"bucketing needs a method {name}.buckets(batch), which cuts a padded batch into parts")

        def wrapper(step: Callable[..., Loss]) -> Callable[..., Loss]:
            import torch

            from runner.api import PartCounts

            part_counts = PartCounts(self.config.kind, pipeline.learner, source)

            def loss(batch: Batch, noise: Batch, progress: Progress) -> Loss:
                rows = source.size(batch)
                layout = pipeline.learner.noise_layout
                losses = []
                indices = []
                for index, bucket in source.buckets(batch):
                    # A sample keeps its random numbers, whatever bucket it is in.
                    bucket_noise = layout.take(noise, index, rows)
                    try:
                        losses.append(step(bucket, bucket_noise, progress))
                    except torch.OutOfMemoryError:
                        raise
                    except RuntimeError as error:
                        _explain(error, pipeline.learner, noise, (batch, bucket))
                        raise
                    indices.append(index)
                part_counts.check(batch, list(map(len, indices)), losses)
                total: Loss = type(losses[0]).total(losses)
                if total.samples is None:
                    return total
                # In the order of the batch, not of the buckets.
                order = torch.cat(indices).to(total.samples.device).argsort()
                return total._replace(samples=total.samples[order])

            return loss

        pipeline.slots.wrap("loss", wrapper)


def _explain(error: RuntimeError, learner: Learner, noise: Batch, batches: tuple[Batch, Batch]) -> None:
    """Raises a RunnerError if noise has the size of a padded batch, which a bucket has not."""
    for padded, cut in zip(*map(tensors, batches), strict=False):
        for tensor in tensors(noise):
            if tensor.shape == padded.shape and padded.shape[1:] != cut.shape[1:]:
                problem = (
                    f"its shape {list(tensor.shape)} is that of the padded batch, and a bucket has {list(cut.shape)}"
                )
                hint = "cut it to the size of the batch in loss, or switch bucketing off"
                raise RunnerError(f"bucketing: {type(learner).__name__}.noise: {problem}; {hint}") from error
