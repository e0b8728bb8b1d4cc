"""Points of a scene, selected by the mask of the object in it."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.api import UsageError


def select_by_mask(mask: Tensor, points: int, share: float) -> Tensor:
    """Selects points of scenes, a fixed share of them on the object.

    Points are drawn from torch's generator without replacement, and repeated where a part of a
    scene has fewer than wanted.

    Args:
        mask: True for points on the object, [B, P].
        points: Number of points to select.
        share: Share of them on the object, rounded to a number of points.

    Returns:
        Positions of the points, [B, points]: those on the object first.

    Raises:
        UsageError: A mask selects no point, or all of them, where some are wanted.
    """
    on_object = round(points * share)
    return torch.cat(
        [
            select(mask, on_object, "the object"),
            select(~mask, points - on_object, "anything else"),
        ],
        1,
    )


def select(mask: Tensor, points: int, part: str) -> Tensor:
    """Selects points where a mask [B, P] is True, as ``select_by_mask`` does; [B, points].

    Raises:
        UsageError: A mask selects nothing of a part of the scene.
    """
    counts = mask.sum(1, keepdim=True)
    if points and not counts.all():
        scene = int((counts == 0).nonzero()[0, 0])
        raise UsageError(
            f"the mask of scene {scene} has none of its {mask.shape[1]:,} points on {part}, and "
            f"{points:,} are wanted; sample more points of a scene, or another share on the object"
        )
    keys = torch.rand(mask.shape)
    # Points outside of the mask are sorted to the end.
    order = torch.where(mask, keys, 2.0).argsort(1)
    positions = torch.arange(points) % counts.clamp(min=1)
    return order.gather(1, positions)
