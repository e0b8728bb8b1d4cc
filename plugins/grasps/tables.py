"""Clouds of objects that stand on a round table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runner.api import UsageError

from .object_mask import select, select_by_mask
from .shapes import heights, on_surface, signed_distance, surface_areas

if TYPE_CHECKING:
    from .config import TableConfig


def on_table(objects: Tensor, config: TableConfig, points: int) -> Tensor:
    """Returns clouds [B, points, 3] of objects around the origin, and of the table under them.

    A scene has ``scene_points`` points, uniform on all surfaces that are not covered. Of these, the
    cloud has some: at random, or a share on the object, by its mask.

    Args:
        objects: Edges of cubes [B] in metres, or shapes [B, 4].
        config: Of the table.
        points: Of a cloud.

    Raises:
        UsageError: A scene has no point on the object, or none on the table.
    """
    size = config.scene_points
    radius = config.radius_mm / 1e3
    objects_area = surface_areas(objects)
    share = objects_area / (objects_area + math.pi * radius**2)
    is_object = torch.arange(size) < (share * size).round()[:, None]
    top = _on_disc(len(objects), size, radius)
    table = torch.cat(
        [top, (-heights(objects) / 2)[:, None, None].expand_as(top[..., :1])],
        2,
    )
    scene = torch.where(is_object[..., None], on_surface(objects, size), table)

    in_plan = torch.cat([top, torch.zeros_like(top[..., :1])], 2)
    is_covered = signed_distance(in_plan, objects) < 0
    is_visible = is_object | ~is_covered
    visible = select(is_visible, size, "the scene")
    if config.object_share is None:
        selected = visible[:, :points]
    else:
        mask = is_object.gather(1, visible)
        try:
            by_mask = select_by_mask(mask, points, config.object_share)
        except UsageError as error:
            raise UsageError(f"data.table: {error}") from None
        selected = visible.gather(1, by_mask)
    return scene.gather(1, selected[..., None].expand(-1, -1, 3))


def _on_disc(count: int, points: int, radius: float) -> Tensor:
    """Samples points uniformly from discs around the origin, [count, points, 2]."""
    distance = radius * torch.rand(count, points).sqrt()
    angle = torch.rand(count, points) * (2 * math.pi)
    return torch.stack([distance * angle.cos(), distance * angle.sin()], -1)
