"""Batches that show how large the inputs of layers are, before these are rounded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from runner.api import Config, Pipeline, UsageError

if TYPE_CHECKING:
    from runner.api import Batch

BATCHES = 8
"""Batches that show the ranges of a network with convolutions without ``calibration``."""


class Calibration(Config):
    """Batches whose smallest and largest inputs of a layer become the range of its inputs."""

    data: Literal["train", "held_out"] = "train"
    """The training data, without what the training does to them; or the data of evaluations.
    A verdict on held-out data that set the ranges is slightly too good.
    """
    share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of its batches, the first ones."""
    most: Annotated[int, Field(ge=1)] = 256
    """Most batches, whatever the share: that of a long text would take a quarter of an hour."""


def calibration_batches(
    pipeline: Pipeline, calibration: Calibration | None
) -> Iterator[Batch]:
    """Yields the configured batches on the pipeline's device; without settings, ``BATCHES``.

    Raises:
        UsageError: The source cannot provide them, or the share has no batch.
    """
    if calibration is None or calibration.data == "train":
        limit = BATCHES if calibration is None else _count(pipeline, calibration)
        return (batch for batch, _ in islice(pipeline.batches(), limit))
    limit = _count(pipeline, calibration)
    batches = islice(_held_out(pipeline), limit)
    return map(pipeline.slots.transfer, batches)


def _count(pipeline: Pipeline, calibration: Calibration) -> int:
    """Returns the number of calibration batches."""
    if calibration.data == "held_out":
        total = sum(1 for _ in _held_out(pipeline))
    else:
        samples = pipeline.source.epoch_samples(pipeline.batch_size)
        if samples is None:
            source = type(pipeline.source).__name__
            raise UsageError(
                f"quantise: calibration.data: {source} does not report how long an epoch is; "
                "use data: held_out"
            )
        total = samples // pipeline.batch_size
    # The product of a share like 0.29 and a hundred is slightly less than an integer.
    count = math.floor(calibration.share * total + 1e-9)
    if count == 0:
        least = (
            f"at least {math.ceil(1000 / total) / 1000:g}" if total else "other data"
        )
        raise UsageError(
            f"quantise: calibration.share: {calibration.share:g} of {total} batches "
            f"({calibration.data}) contains no batch: use {least}"
        )
    if count > calibration.most:
        pipeline.note(
            f"calibrated with {calibration.most} of the {count:,} batches that are "
            f"{calibration.share:g} of the data (calibration.most)"
        )
    return min(count, calibration.most)


def _held_out(pipeline: Pipeline) -> Iterator[Batch]:
    """Returns the held-out batches; raises a UsageError if the source has none."""
    from runner.api import DatasetSource

    source = pipeline.source
    if not isinstance(source, DatasetSource):
        name = type(source).__name__
        raise UsageError(
            f"quantise: calibration.data: {name} has no held-out batches; use data: train"
        )
    return source.held_out_batches()
