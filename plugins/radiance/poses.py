"""Cameras from the columns of a pose table, in one of several conventions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runner.api import UsageError

from .camera import camera_from_angles, camera_from_direction, to_opengl

if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import PosedViewsConfig

MATRIX_COLUMNS = tuple(f"m{row}{column}" for row in range(3) for column in range(4))
COLUMNS = {
    "angles": ("u", "v"),
    "direction": ("x", "y", "z", "dx", "dy", "dz"),
    "opengl": MATRIX_COLUMNS,
    "opencv": MATRIX_COLUMNS,
}
"""Columns of a pose table, by ``data.pose``."""
ROTATION_TOLERANCE = 1e-2
"""Largest difference of R R^T from the identity, for tables with few digits."""
LEAST_LENGTH = 1e-6


def cameras_of(
    poses: Tensor, config: PosedViewsConfig, place: Callable[[int], str]
) -> Tensor:
    """Returns cameras [N, 3, 4] of poses [N, columns] in the convention of the settings.

    Args:
        poses: Finite numbers, in the order of ``COLUMNS``.
        config: Settings of the source.
        place: Returns the file and the row of a pose by its number, for messages.

    Raises:
        UsageError: A pose is impossible, for example a matrix without a rotation.
    """
    problem = _first_problem(poses, config.pose)
    if problem is not None:
        number, text = problem
        raise UsageError(f"{place(number)}: {text}")
    if config.pose == "angles":
        return camera_from_angles(poses, config.radius)
    if config.pose == "direction":
        return camera_from_direction(poses[:, :3], poses[:, 3:])
    return to_opengl(poses.view(-1, 3, 4), config.pose)


def _first_problem(poses: Tensor, convention: str) -> tuple[int, str] | None:
    """Returns the number of the first impossible pose and the reason; None if there is none."""
    if convention == "angles":
        is_wrong = ((poses < 0) | (poses > 1)).any(1)
        text = (
            "u and v should be from 0 to 1: u = azimuth / 360 degrees, "
            "v = (1 - sin(elevation)) / 2"
        )
        return _first(is_wrong, text)
    if convention == "direction":
        position = poses[:, :3]
        is_short = poses[:, 3:].norm(dim=1) < LEAST_LENGTH
        problem = _first(
            is_short,
            "the direction dx, dy, dz has no length; it should point along the view",
        )
    else:
        matrix = poses.view(-1, 3, 4)
        position = matrix[:, :, 3]
        problem = _rotation_problem(matrix[:, :, :3], convention)
    at_origin = position.norm(dim=1) < LEAST_LENGTH
    return problem or _first(
        at_origin, "the camera is at the origin; the object should be there"
    )


def _rotation_problem(rotation: Tensor, convention: str) -> tuple[int, str] | None:
    """Returns the first of the matrices [N, 3, 3] that is not a rotation, and the reason."""
    product = rotation @ rotation.transpose(1, 2)
    difference = (product - torch.eye(3)).abs()
    is_skewed = difference.flatten(1).amax(1) > ROTATION_TOLERANCE
    form = f"data.pose: {convention} needs a matrix [R t] from camera to world"
    problem = _first(
        is_skewed,
        f"R is not a rotation, because its axes are not orthogonal with length 1; {form}",
    )
    if problem is not None:
        return problem
    # The axes of a mirrored matrix are orthogonal, too.
    is_mirrored = torch.linalg.det(rotation) < 0
    return _first(
        is_mirrored, f"R is not a rotation but mirrors: its determinant is -1; {form}"
    )


def _first(is_wrong: Tensor, text: str) -> tuple[int, str] | None:
    """Returns the number of the first wrong pose with the reason; None if none is wrong."""
    if not is_wrong.any():
        return None
    number = int(is_wrong.int().argmax())
    return number, text
