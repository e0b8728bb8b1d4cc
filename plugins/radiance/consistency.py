"""Consistency of cameras with images: a ray through an object crosses it in other images, too."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from .camera import depths_of, pixel_positions, project, rays
from .camera_scene import CameraScene
from .measures import silhouette
from .rendering import stratified_depths

VIEW_PAIRS = 128
RAYS = 48
"""Rays of each pair of views."""
SAMPLES = 64


def crossing_share(scene: CameraScene) -> float | None:
    """Returns the share of rays through the outline of an object in one view that cross its silhouette in another one.

    Pairs of views of the same class and rays are sampled with a fixed seed. With correct cameras the share is close to
    1; a wrong convention or direction of rotation lowers it. A wrong field of view hardly does: it scales the object.

    Returns:
        None if no silhouette is complete: without a white background, or if objects reach the borders.
    """
    mask = silhouette(scene.image)
    # One pixel more, because a silhouette is rounded to pixels.
    target = F.max_pool2d(mask.float()[:, None], 3, 1, 1)[:, 0] > 0
    usable = (mask.flatten(1).any(1) & ~touches_border(mask)).nonzero().flatten()
    if len(usable) < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    first = usable[torch.randint(len(usable), (VIEW_PAIRS,), generator=generator)]
    second = torch.stack([_partner(scene.label, usable, int(number), generator) for number in first])

    positions = _outline_positions(mask[first], generator)
    origin, direction = rays(scene.camera[first], positions, scene.lens)
    depths = stratified_depths(scene.near, scene.far, torch.full((RAYS, SAMPLES), 0.5))
    points = origin[:, :, None] + direction[:, :, None] * depths[..., None]
    is_crossing = _in_silhouette(points.flatten(1, 2), scene, second, target).view(VIEW_PAIRS, RAYS, SAMPLES).any(-1)
    return float(is_crossing.float().mean())


def touches_border(mask: Tensor) -> Tensor:
    """Returns which silhouettes [B, H, W] reach the border of the image, [B] bool."""
    rows = mask[:, [0, -1], :].flatten(1).any(1)
    columns = mask[:, :, [0, -1]].flatten(1).any(1)
    return rows | columns


def _partner(label: Tensor, usable: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Returns the number of a view of the same class."""
    candidates = usable[label[usable] == label[number]]
    return candidates[torch.randint(len(candidates), (), generator=generator)]


def _outline_positions(mask: Tensor, generator: torch.Generator) -> Tensor:
    """Returns positions [B, RAYS, 2] of random pixels at the outlines of silhouettes [B, H, W]."""
    outside = F.max_pool2d((~mask).float()[:, None], 3, 1, 1)[:, 0] > 0
    index = torch.multinomial((mask & outside).flatten(1).float(), RAYS, replacement=True, generator=generator)
    return pixel_positions(*mask.shape[1:])[index]


def _in_silhouette(points: Tensor, scene: CameraScene, numbers: Tensor, mask: Tensor) -> Tensor:
    """Returns which points [B, P, 3] appear in the silhouettes of B views, [B, P] bool."""
    camera = scene.camera[numbers]
    position = project(points, camera, scene.lens)
    is_visible = (depths_of(points, camera) > 0) & (position.abs() < 1).all(-1)
    side = mask.shape[-1]
    pixel = ((position + 1) / 2 * side).nan_to_num(0).long().clamp(0, side - 1)
    rows = torch.arange(len(numbers))[:, None]
    return is_visible & mask[numbers][rows, pixel[..., 1], pixel[..., 0]]
