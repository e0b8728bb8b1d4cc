"""Cameras and rays.

A camera is a matrix [3, 4] from camera to world coordinates: three columns with its axes and one
with its position. Its axes are those of OpenGL: x to the right of the image, y to its top, and the
camera looks along -z. A position in an image is a pair from -1 to 1, x from left to right and y
from top to bottom.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

FLIPPED = {"opengl": (1.0, 1.0, 1.0), "opencv": (1.0, -1.0, -1.0)}
"""By convention: the signs of its axes in those of OpenGL."""
LEAST_SINE = 1e-6
"""Sine of the angle between a camera's direction and the z axis below which they are parallel."""
LEAST_RADIUS = 1e-12
"""Smallest distance from the origin by which is divided."""


def camera_from_angles(angles: Tensor, radius: float) -> Tensor:
    """Returns cameras on a sphere that look at its centre, the origin.

    The z axis of the world points up in their images.

    Args:
        angles: [B, 2], u and v from 0 to 1. The azimuth is 2 pi u, and the polar angle is
            arccos(1 - 2v).
        radius: Of the sphere.

    Returns:
        Cameras [B, 3, 4].
    """
    u, v = angles.unbind(-1)
    azimuth = 2 * math.pi * u
    cosine = azimuth.cos()
    sine = azimuth.sin()

    height = 1 - 2 * v
    # Rounding may make the height of a pole larger than 1.
    distance_from_axis = (1 - height.square()).clamp(min=0).sqrt()
    x = distance_from_axis * cosine
    y = distance_from_axis * sine
    back = torch.stack([x, y, height], -1)

    right = torch.stack([-sine, cosine, torch.zeros_like(azimuth)], -1)
    up = torch.linalg.cross(back, right)
    position = radius * back
    return torch.stack([right, up, back, position], -1)


def rotate_azimuth(cameras: Tensor, turns: Tensor) -> Tensor:
    """Returns cameras [B, 3, 4] that are rotated about the world's z axis.

    Args:
        cameras: [B, 3, 4].
        turns: [B], in full turns; 0.25 is 90 degrees.
    """
    angle = 2 * math.pi * turns
    cosine = angle.cos()
    sine = angle.sin()
    zero = torch.zeros_like(angle)
    x_axis = torch.stack([cosine, sine, zero], -1)
    y_axis = torch.stack([-sine, cosine, zero], -1)
    z_axis = torch.stack([zero, zero, torch.ones_like(angle)], -1)
    rotation = torch.stack([x_axis, y_axis, z_axis], -1)
    return rotation @ cameras


def camera_from_direction(position: Tensor, direction: Tensor) -> Tensor:
    """Returns cameras [B, 3, 4] at positions [B, 3] that look along directions [B, 3].

    The z axis of the world points up in their images.
    """
    back = -normalize(direction, dim=-1)
    vertical = back.new_tensor([0.0, 0.0, 1.0]).expand_as(back)
    right = torch.linalg.cross(vertical, back)
    # A camera that looks straight up or down has the world's x axis at its right.
    is_vertical = right.norm(dim=-1, keepdim=True) < LEAST_SINE
    x_axis = back.new_tensor([1.0, 0.0, 0.0])
    right = torch.where(is_vertical, x_axis, right)
    right = normalize(right, dim=-1)

    up = torch.linalg.cross(back, right)
    return torch.stack([right, up, back, position], -1)


def to_opengl(cameras: Tensor, convention: str) -> Tensor:
    """Returns cameras [B, 3, 4] with the axes of OpenGL.

    Args:
        cameras: [B, 3, 4].
        convention: That of their axes, a key of ``FLIPPED``.
    """
    signs = cameras.new_tensor([*FLIPPED[convention], 1.0])
    return cameras * signs


def angles_of(cameras: Tensor) -> Tensor:
    """Returns u and v [B, 2] of cameras [B, 3, 4], the inverse of ``camera_from_angles``."""
    position = cameras[..., 3]
    x, y, z = position.unbind(-1)
    azimuth = torch.atan2(y, x)
    # A camera at the origin has no angles; any will do.
    radius = position.norm(dim=-1).clamp(min=LEAST_RADIUS)

    u = torch.remainder(azimuth / (2 * math.pi), 1.0)
    v = (1 - z / radius) / 2
    return torch.stack([u, v], -1)


def pixel_positions(height: int, width: int, offset: float = 0.5) -> Tensor:
    """Returns the positions [height * width, 2] of pixels, row by row.

    Args:
        height: Of the image, in pixels.
        width: Of the image, in pixels.
        offset: Where in a pixel its colour was taken; 0.5 is the centre.
    """
    y = (torch.arange(height) + offset) / height * 2 - 1
    x = (torch.arange(width) + offset) / width * 2 - 1
    rows, columns = torch.meshgrid(y, x, indexing="ij")
    grid = torch.stack([columns, rows], -1)
    return grid.view(-1, 2)


def rays(cameras: Tensor, positions: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rays through positions of images.

    Args:
        cameras: [B, 3, 4].
        positions: [B, R, 2].
        lens: [4]: focal lengths in x and y, and the position of the optical axis, in units of half
            an image.

    Returns:
        Origins [B, 1, 3], and directions [B, R, 3] of length 1.
    """
    focal_length = lens[:2]
    optical_axis = lens[2:]
    x, y = ((positions - optical_axis) / focal_length).unbind(-1)
    # Images have y from top to bottom, and the camera looks along -z.
    in_camera = torch.stack([x, -y, -torch.ones_like(x)], -1)

    axes = cameras[:, :, :3]
    origin = cameras[:, None, :, 3]
    direction = in_camera @ axes.transpose(1, 2)
    return origin, normalize(direction, dim=-1)


def project(points: Tensor, cameras: Tensor, lens: Tensor) -> Tensor:
    """Returns the positions [B, P, 2] in the images at which points of the world appear.

    Args:
        points: [B, P, 3].
        cameras: [B, 3, 4].
        lens: As for ``rays``.
    """
    axes = cameras[:, :, :3]
    origin = cameras[:, None, :, 3]
    in_camera = (points - origin) @ axes
    flat = in_camera[..., :2] / -in_camera[..., 2:]

    focal_length = lens[:2]
    optical_axis = lens[2:]
    # Images have y from top to bottom.
    signs = flat.new_tensor([1.0, -1.0])
    return flat * signs * focal_length + optical_axis


def depths_of(points: Tensor, cameras: Tensor) -> Tensor:
    """Returns by how much points [B, P, 3] are in front of cameras [B, 3, 4], [B, P]."""
    origin = cameras[:, None, :, 3]
    back = cameras[:, None, :, 2]
    offset = points - origin
    return -(offset * back).sum(-1)
