"""Obstacles that start at random positions and may move."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import OBSTACLE_SIZE, ObstaclesConfig

REGION = ((50.0, 240.0), (750.0, 460.0))
"""Lowest and highest x, y of an obstacle: the band between all starts and all goals, each of
which is at least 40 away from it.
"""


class Obstacles:
    """Start, motion and observation of C obstacles in each of E simulations.

    An obstacle is a row x, y, velocity in x, velocity in y. Its speed is constant. It is
    reflected at the borders of the region, and takes a new, uniformly distributed direction
    with a constant probability in each step. The random numbers that are consumed do not
    depend on positions.
    """

    def __init__(
        self,
        config: ObstaclesConfig,
        scale: tuple[float, float],
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        """Reads the settings.

        Args:
            config: Settings of several or moving obstacles.
            scale: Factors of positions and of velocities in observations.
            device: Device of all tensors.
            generator: Selects directions; on the same device.
        """
        self.count = config.count
        self._observed = min(config.count, config.observed)
        self._speed = config.speed
        # Obstacles that do not move have no direction.
        self._turn = config.turn if config.speed else 0.0
        self._generator = generator
        self._low, self._high = torch.tensor(
            REGION, dtype=torch.float32, device=device
        )
        self._scale = torch.tensor(
            [scale[0], scale[0], scale[1], scale[1]],
            dtype=torch.float32,
            device=device,
        )

    def start(self, uniform: Tensor) -> Tensor:
        """Returns obstacles [E, C, 4] at uniformly distributed positions.

        Args:
            uniform: [E, C, 4], random numbers in [0, 1); the last of each four is not used.
        """
        span = self._high - self._low
        position = torch.addcmul(self._low, uniform[..., :2], span)
        return torch.cat([position, self._velocity(uniform[..., 2])], -1)

    def move(self, obstacles: Tensor) -> Tensor:
        """Returns obstacles [E, C, 4] one step later."""
        if not self._speed:
            return obstacles
        position = obstacles[..., :2]
        velocity = obstacles[..., 2:]
        if self._turn:
            uniform = torch.rand(
                (2, *obstacles.shape[:2]),
                generator=self._generator,
                dtype=torch.float32,
                device=obstacles.device,
            )
            turns = (uniform[0] < self._turn).unsqueeze(-1)
            velocity = torch.where(turns, self._velocity(uniform[1]), velocity)

        # A step is shorter than the region, so that one reflection is enough.
        position = position + velocity
        is_below = position < self._low
        is_above = position > self._high
        position = torch.where(is_below, 2 * self._low - position, position)
        position = torch.where(is_above, 2 * self._high - position, position)
        velocity = torch.where(is_below | is_above, -velocity, velocity)
        return torch.cat([position, velocity], -1)

    def observe(self, bodies: Tensor, obstacles: Tensor) -> Tensor:
        """Returns what agents observe of their nearest obstacles, the nearest first.

        Args:
            bodies: [E, N, 4], of which x and y are read.
            obstacles: [E, C, 4].

        Returns:
            [E, N, 4 K] for K observed obstacles: scaled positions relative to the agent, and
            scaled velocities.
        """
        offset = obstacles[:, None, :, :2] - bodies[:, :, None, :2]
        distance = torch.hypot(offset[..., 0], offset[..., 1])
        nearest = distance.topk(self._observed, largest=False).indices
        velocity = obstacles[:, None, :, 2:].expand_as(offset)
        rows = torch.cat([offset, velocity], -1) * self._scale
        index = nearest.unsqueeze(-1).expand(-1, -1, -1, OBSTACLE_SIZE)
        return rows.gather(2, index).flatten(2)

    def _velocity(self, uniform: Tensor) -> Tensor:
        """Returns velocities [..., 2] whose directions follow from numbers in [0, 1)."""
        direction = uniform * math.tau
        unit = torch.stack([direction.cos(), direction.sin()], -1)
        return unit * self._speed
