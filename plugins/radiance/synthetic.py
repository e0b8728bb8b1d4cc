"""Volume-rendered views of colored boxes, for machines without data."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .camera import camera_from_angles, pixel_positions, rays
from .patches import rows_to_patch
from .rendering import composite, lengths, stratified_depths

SIDE = 32
AZIMUTHS = 24
ELEVATIONS = (0.5, 0.4, 0.3, 0.2)
"""Values of v."""
SAMPLES = 64
DENSITY = 40.0
HALF_DEPTH = 0.6
"""Rays start and end at this distance from the centre."""
BOXES = {
    "synthetic low box": ((0.34, 0.22, 0.12), (0.85, 0.30, 0.20)),
    "synthetic tall box": ((0.10, 0.20, 0.38), (0.20, 0.45, 0.85)),
    "synthetic long box": ((0.10, 0.38, 0.20), (0.25, 0.65, 0.30)),
}
"""Half of the edges of each box, and its colour."""


@cache
def render_boxes(
    radius: float, lens: tuple[float, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Renders each box from several elevations and all sides.

    Args:
        radius: Distance of the cameras from the centre.
        lens: Numbers of a lens, as ``rays`` takes them.

    Returns:
        Images [N, 3, side, side] in bytes, labels [N] and cameras [N, 3, 4].
    """
    azimuth = torch.arange(AZIMUTHS) / AZIMUTHS
    v, u = torch.meshgrid(torch.tensor(ELEVATIONS), azimuth, indexing="ij")
    angles = torch.stack([u.flatten(), v.flatten()], -1)
    camera = camera_from_angles(angles, radius)
    positions = pixel_positions(SIDE, SIDE).expand(len(camera), -1, -1)
    origin, direction = rays(camera, positions, torch.tensor(lens))
    near = radius - HALF_DEPTH
    far = radius + HALF_DEPTH
    middle = torch.full((*direction.shape[:2], SAMPLES), 0.5)
    depths = stratified_depths(near, far, middle)
    offset = direction.unsqueeze(2) * depths.unsqueeze(-1)
    points = origin.unsqueeze(2) + offset
    length = lengths(depths, near, far)

    # The same cameras and rays for all boxes.
    images = []
    for half_edges, colour in BOXES.values():
        edges = torch.tensor(half_edges)
        is_inside = (points.abs() < edges).all(-1)
        # Sides differ in brightness, so that a view shows where the camera is.
        shade = 0.75 + 0.25 * points[..., :1] / half_edges[0]
        colours = shade * torch.tensor(colour)
        rendering = composite(DENSITY * is_inside, colours, length)
        images.append(rows_to_patch(rendering.colour, SIDE))

    levels = torch.cat(images) * 255
    pixels = levels.round().clamp(0, 255).to(torch.uint8)
    label = torch.arange(len(BOXES)).repeat_interleave(len(camera))
    return pixels, label, camera.repeat(len(BOXES), 1, 1)
