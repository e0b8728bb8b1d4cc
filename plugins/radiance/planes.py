"""Inputs of the discriminator besides patches."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from runner.api import Batch

from .patches import Patch

PLANES: Mapping[str, int] = {"pose": 3, "position": 2}
"""Planes by condition. A class has one plane for each class."""


def count_planes(conditions: Collection[str], classes: int) -> int:
    """Returns the number of planes of some conditions."""
    planes = {"class": classes, **PLANES}
    return sum(planes[name] for name in conditions)


def condition_planes(
    conditions: Collection[str],
    batch: Batch,
    patch: Patch,
    size: int,
    classes: int,
) -> Tensor:
    """Returns the discriminator's inputs besides patches, [B, planes, size, size].

    Args:
        conditions: Any of ``class``, ``pose`` and ``position``.
        batch: ``label`` [B] and ``pose`` [B, 2].
        patch: Where the patches are in their images.
        size: Side of a patch, in pixels.
        classes: Number of classes.
    """
    u, v = batch["pose"].unbind(1)
    azimuth = 2 * math.pi * u
    numbers: list[Tensor] = []
    if "class" in conditions:
        numbers += one_hot(batch["label"], classes).to(azimuth).unbind(1)
    # Sine and cosine, because azimuths of 0 and 1 are the same direction.
    if "pose" in conditions:
        numbers += [azimuth.cos(), azimuth.sin(), v]
    # These are constant over a patch.
    columns = [number.view(-1, 1, 1) for number in numbers]
    planes = [column.expand(-1, size, size) for column in columns]

    if "position" in conditions:
        positions = patch.positions(size).view(-1, size, size, 2)
        planes += positions.unbind(-1)
    return torch.stack(planes, 1)
