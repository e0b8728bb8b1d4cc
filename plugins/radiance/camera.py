"""Cameras and rays.

A camera is a matrix [3, 4] from camera to world coordinates: three columns with its axes and one with its position.
Its axes are those of OpenGL: x to the right of the image, y to its top, and the camera looks along -z.
A position in an image is a pair from -1 to 1, x from left to right and y from top to bottom.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLIPPED = {"opengl": (1.0, 1.0, 1.0), "opencv": (1.0, -1.0, -1.0)}
"""By convention: the signs of its axes in those of OpenGL."""


def camera_from_angles(angles: Tensor, radius: float) -> Tensor:
    """Returns cameras on a sphere around the origin, which they look at; the z axis of the world points up.

    Args:
        angles: [B, 2], u and v from 0 to 1: the azimuth is 2 pi u, and the polar angle is arccos(1 - 2v).
        radius: Of the sphere.

    Returns:
        Cameras [B, 3, 4].
    """
    azimuth = 2 * math.pi * angles[:, 0]
    height = 1 - 2 * angles[:, 1]
    reach = (1 - height.square()).clamp(min=0).sqrt()
    back = torch.stack([reach * azimuth.cos(), reach * azimuth.sin(), height], -1)
    right = torch.stack([-azimuth.sin(), azimuth.cos(), torch.zeros_like(azimuth)], -1)
    up = torch.linalg.cross(back, right)
    return torch.stack([right, up, back, radius * back], -1)


def rotate_azimuth(cameras: Tensor, turns: Tensor) -> Tensor:
    """Returns cameras [B, 3, 4] that are rotated about the world's z axis.

    Args:
        cameras: [B, 3, 4].
        turns: [B], in full turns; 0.25 is 90 degrees.
    """
    angle = 2 * math.pi * turns
    zero = torch.zeros_like(angle)
    x_axis = torch.stack([angle.cos(), angle.sin(), zero], -1)
    y_axis = torch.stack([-angle.sin(), angle.cos(), zero], -1)
    z_axis = torch.stack([zero, zero, torch.ones_like(angle)], -1)
    rotation = torch.stack([x_axis, y_axis, z_axis], -1)
    return rotation @ cameras


def camera_from_direction(position: Tensor, direction: Tensor) -> Tensor:
    """Returns cameras [B, 3, 4] at positions [B, 3] that look along directions [B, 3]; the z axis points up."""
    back = -torch.nn.functional.normalize(direction, dim=-1)
    vertical = back.new_tensor([0.0, 0.0, 1.0]).expand_as(back)
    right = torch.linalg.cross(vertical, back)
    # A camera that looks straight up or down has the world's x axis at its right.
    is_vertical = right.norm(dim=-1, keepdim=True) < 1e-6
    right = torch.where(is_vertical, back.new_tensor([1.0, 0.0, 0.0]), right)
    right = torch.nn.functional.normalize(right, dim=-1)
    return torch.stack([right, torch.linalg.cross(back, right), back, position], -1)


def to_opengl(cameras: Tensor, convention: str) -> Tensor:
    """Returns cameras [B, 3, 4] whose axes follow a convention of ``FLIPPED`` with the axes of OpenGL."""
    signs = cameras.new_tensor([*FLIPPED[convention], 1.0])
    return cameras * signs


def angles_of(cameras: Tensor) -> Tensor:
    """Returns u and v [B, 2] of cameras [B, 3, 4], the inverse of ``camera_from_angles``."""
    position = cameras[..., 3]
    azimuth = torch.atan2(position[..., 1], position[..., 0])
    height = position[..., 2] / position.norm(dim=-1).clamp(min=1e-12)
    return torch.stack([torch.remainder(azimuth / (2 * math.pi), 1.0), (1 - height) / 2], -1)


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
    return torch.stack([columns, rows], -1).view(-1, 2)


def rays(cameras: Tensor, positions: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rays through positions of images.

    Args:
        cameras: [B, 3, 4].
        positions: [B, R, 2].
        lens: [4]: focal lengths in x and y, and the position of the optical axis, in units of half an image.

    Returns:
        Origins [B, 1, 3], and directions [B, R, 3] of length 1.
    """
    x, y = ((positions - lens[2:]) / lens[:2]).unbind(-1)
    in_camera = torch.stack([x, -y, -torch.ones_like(x)], -1)
    direction = in_camera @ cameras[:, :, :3].transpose(1, 2)
    return cameras[:, None, :, 3], torch.nn.functional.normalize(direction, dim=-1)


def project(points: Tensor, cameras: Tensor, lens: Tensor) -> Tensor:
    """Returns the positions [B, P, 2] in the images at which points [B, P, 3] of the world appear."""
    in_camera = (points - cameras[:, None, :, 3]) @ cameras[:, :, :3]
    flat = in_camera[..., :2] / -in_camera[..., 2:]
    return flat * flat.new_tensor([1.0, -1.0]) * lens[:2] + lens[2:]


def depths_of(points: Tensor, cameras: Tensor) -> Tensor:
    """Returns by how much points [B, P, 3] are in front of cameras [B, 3, 4], [B, P]."""
    offset = points - cameras[:, None, :, 3]
    return -(offset * cameras[:, None, :, 2]).sum(-1)
