"""Points of a scene, selected by masks of the surfaces in it."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.api import UsageError


def select_by_mask(
    on_object: Tensor, elsewhere: Tensor, count: int, share: float
) -> Tensor:
    """Selects points of scenes, a fixed share of them on the object.

    Args:
        on_object: True for the points on the object, [B, P].
        elsewhere: True for the other points that may be selected, [B, P].
        count: Number of points to select.
        share: Share of them on the object, rounded to a number of points.

    Returns:
        Positions of the points, [B, count]: those on the object first.

    Raises:
        UsageError: A mask selects no point where some are wanted.
    """
    object_count = round(count * share)
    return torch.cat(
        [
            select_where(on_object, object_count, "the object"),
            select_where(elsewhere, count - object_count, "the table"),
        ],
        1,
    )


def select_where(mask: Tensor, count: int, surface: str) -> Tensor:
    """Selects points of scenes at random.

    Points are drawn from torch's generator without replacement, and repeated where a mask has
    fewer than wanted.

    Args:
        mask: True for the points that may be selected, [B, P].
        count: Number of points to select.
        surface: What the points are on, for the message of an error.

    Returns:
        Positions of the points, [B, count].

    Raises:
        UsageError: The mask of a scene has no point, and some are wanted.
    """
    available = mask.sum(1, keepdim=True)
    if count and not available.all():
        scene = int((available == 0).nonzero()[0, 0])
        raise UsageError(
            f"scene {scene} has none of its {mask.shape[1]:,} points on {surface}, "
            f"and {count:,} are wanted"
        )
    keys = torch.rand(mask.shape)
    # Points outside of the mask are sorted to the end.
    order = torch.where(mask, keys, 2.0).argsort(1)
    positions = torch.arange(count) % available.clamp(min=1)
    return order.gather(1, positions)
