"""Clouds of objects that stand on a round table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runner.api import UsageError

from .object_mask import select_by_mask, select_where
from .shapes import heights, on_surface, signed_distance, surface_areas

if TYPE_CHECKING:
    from .config import TableConfig

_ON_TABLE = 1e-6
"""Height in metres up to which a point of an object is on the table, and covered."""


def on_table(objects: Tensor, config: TableConfig, count: int) -> Tensor:
    """Returns clouds of objects around the origin, and of the table under them.

    A scene has ``scene_points`` points, uniform on the surfaces of the object and of the table. A
    cloud has some of those that are not covered: at random, or a share on the object, by its mask.

    Args:
        objects: Edges of cubes [B] in metres, or shapes [B, 4].
        config: Settings of the table.
        count: Number of points of a cloud.

    Returns:
        [B, count, 3] in metres.

    Raises:
        UsageError: A scene has no point on the object, or none on the table.
    """
    size = config.scene_points
    radius = config.radius_mm / 1e3
    areas = surface_areas(objects)
    share = areas / (areas + math.pi * radius**2)
    is_object = torch.arange(size) < (share * size).round()[:, None]
    height = -heights(objects)[:, None] / 2
    top = _on_disc(len(objects), size, radius)
    table = torch.cat([top, height[..., None].expand(-1, size, 1)], 2)
    scene = torch.where(is_object[..., None], on_surface(objects, size), table)

    # The object covers what is under it, and the table the underside of the object.
    in_plan = torch.cat([top, torch.zeros_like(top[..., :1])], 2)
    is_beside = signed_distance(in_plan, objects) > 0
    is_above = scene[..., 2] > height + _ON_TABLE
    on_object = is_object & is_above
    beside = ~is_object & is_beside
    try:
        if config.object_share is None:
            selected = select_where(on_object | beside, count, "the scene")
        else:
            selected = select_by_mask(
                on_object, beside, count, config.object_share
            )
    except UsageError as error:
        hint = "change table.radius_mm or table.scene_points"
        raise UsageError(f"data.table: {error}; {hint}") from None
    return scene.gather(1, selected[..., None].expand(-1, -1, 3))


def _on_disc(count: int, points: int, radius: float) -> Tensor:
    """Samples points uniformly from discs around the origin, [count, points, 2]."""
    distance = radius * torch.rand(count, points).sqrt()
    angle = torch.rand(count, points) * (2 * math.pi)
    return torch.stack([distance * angle.cos(), distance * angle.sin()], -1)
