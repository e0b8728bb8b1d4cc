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
    """Returns the share of rays through an object in one view that cross it in another one.

    The rays pass the outline of a silhouette, and their samples are looked up in the other one.

    Pairs of views of the same class and rays are sampled with a fixed seed. With correct cameras
    the share is close to 1; a wrong convention or direction of rotation lowers it. A wrong field of
    view scales the object, and is found less often.

    Returns:
        None if no silhouette is complete: without a white background, or if objects reach the
        borders.
    """
    mask = silhouette(scene.image)
    # One pixel more, because a silhouette is rounded to pixels.
    target = _dilated(mask)
    is_usable = mask.flatten(1).any(1) & ~touches_border(mask)
    usable = is_usable.nonzero().flatten()
    if len(usable) < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    # A fixed seed, because the figure of a data set should not change.
    picks = torch.randint(len(usable), (VIEW_PAIRS,), generator=generator)
    first = usable[picks]
    partners = [
        _partner(scene.label, usable, int(number), generator) for number in first
    ]
    second = torch.stack(partners)

    positions = _outline_positions(mask[first], generator)
    origin, direction = rays(scene.camera[first], positions, scene.lens)
    middle = torch.full((RAYS, SAMPLES), 0.5)
    depths = stratified_depths(scene.near, scene.far, middle)
    offset = direction[:, :, None] * depths[..., None]
    points = origin[:, :, None] + offset
    is_inside = _in_silhouette(points.flatten(1, 2), scene, second, target)
    is_crossing = is_inside.view(VIEW_PAIRS, RAYS, SAMPLES).any(-1)
    return float(is_crossing.float().mean())


def touches_border(mask: Tensor) -> Tensor:
    """Returns which silhouettes [B, H, W] reach the border of the image, [B] bool."""
    rows = mask[:, [0, -1], :].flatten(1).any(1)
    columns = mask[:, :, [0, -1]].flatten(1).any(1)
    return rows | columns


def _dilated(mask: Tensor) -> Tensor:
    """Returns masks [B, H, W] that are one pixel wider on all sides."""
    largest = F.max_pool2d(mask.float()[:, None], 3, 1, 1)
    return largest[:, 0] > 0


def _partner(
    label: Tensor, usable: Tensor, number: int, generator: torch.Generator
) -> Tensor:
    """Returns the number of a view of the same class."""
    candidates = usable[label[usable] == label[number]]
    pick = torch.randint(len(candidates), (), generator=generator)
    return candidates[pick]


def _outline_positions(mask: Tensor, generator: torch.Generator) -> Tensor:
    """Returns positions [B, RAYS, 2] of random pixels at the outlines of silhouettes [B, H, W]."""
    # Rays through the middle of an object would cross it from almost any camera.
    outline = mask & _dilated(~mask)
    index = torch.multinomial(
        outline.flatten(1).float(),
        RAYS,
        replacement=True,
        generator=generator,
    )
    height, width = mask.shape[1:]
    return pixel_positions(height, width)[index]


def _in_silhouette(
    points: Tensor, scene: CameraScene, numbers: Tensor, mask: Tensor
) -> Tensor:
    """Returns which points [B, P, 3] appear in the silhouettes of B views, [B, P] bool."""
    camera = scene.camera[numbers]
    position = project(points, camera, scene.lens)
    is_in_front = depths_of(points, camera) > 0
    is_in_image = (position.abs() < 1).all(-1)
    side = mask.shape[-1]
    pixel = (position + 1) / 2 * side
    # Points in the plane of the camera have no position.
    pixel = pixel.nan_to_num(0).long().clamp(0, side - 1)
    column, row = pixel.unbind(-1)
    image = torch.arange(len(numbers))[:, None]
    is_object = mask[numbers][image, row, column]
    return is_in_front & is_in_image & is_object
