"""Images with their cameras, and the rays that training would cast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .camera import depths_of, project


class CameraScene(NamedTuple):
    """Images with their cameras, and the rays that training would cast."""

    image: Tensor
    """[N, 3, side, side], from -1 to 1."""
    label: Tensor
    """[N]."""
    pose: Tensor
    """[N, 2]: u and v."""
    camera: Tensor
    """[N, 3, 4]."""
    lens: Tensor
    """[4], as ``rays`` takes it."""
    near: float
    far: float
    pixel_offset: float
    classes: Sequence[str]

    @property
    def distance(self) -> Tensor:
        """Distances [N] of the cameras from the origin."""
        distance: Tensor = self.camera[:, :, 3].norm(dim=1)
        return distance

    @property
    def sees_origin(self) -> Tensor:
        """True for each camera whose image contains the origin, [N]."""
        origin = torch.zeros(len(self.camera), 1, 3)
        depth = depths_of(origin, self.camera)[:, 0]
        position = project(origin, self.camera, self.lens)[:, 0]
        return (depth > 0) & (position.abs() <= 1).all(-1)

    @property
    def reaches_origin(self) -> Tensor:
        """True for each camera whose rays pass the distance of the origin, [N]."""
        return (self.distance > self.near) & (self.distance < self.far)
