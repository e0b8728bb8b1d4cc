"""Cubes as clouds of points, with grasps of them: what is drawn, and how it is turned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from scipy.spatial.transform import Rotation
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)
from torch.utils.data import Dataset

from .geometry import turned, yaw

if TYPE_CHECKING:
    from .config import CubeGraspsConfig


class Grasps(NamedTuple):
    """Grasps in the frames of their cubes: edge [N] in metres, grasp [N, 25]; and the tables of
    the hand.
    """

    edge: Tensor
    grasp: Tensor
    tables: dict[str, Tensor]
    digest: str


def scaling(grasp: Tensor, frame: str) -> tuple[Tensor, Tensor]:
    """The least and the largest of every number of grasps [N, 25], however they are turned: [25]
    each.
    """
    lower = grasp.amin(0)
    upper = grasp.amax(0)
    for first in (0, 19, 22):
        if frame != "object":
            upto = first + (3 if frame == "random" else 2)
            reach = grasp[:, first:upto].norm(dim=1).max()
            lower[first:upto] = -reach
            upper[first:upto] = reach
    middle = (lower + upper) / 2
    half = ((upper - lower) / 2).clamp(min=1e-3)
    return middle - half, middle + half


class Scenes(Dataset[dict[str, Tensor]]):
    """Cubes with clouds and grasps, sampled from torch's generator at each access."""

    def __init__(
        self,
        grasps: Grasps,
        rows: Sequence[Tensor],
        config: CubeGraspsConfig,
        scale: Tensor,
        count: int,
    ) -> None:
        """Keeps what to draw from.

        Args:
            grasps: All grasps.
            rows: For every size, the numbers of the grasps to sample.
            config: Of the source.
            scale: The smallest and the largest of every number, [2, 25].
            count: Number of scenes; their sizes alternate.
        """
        self.grasps = grasps
        self.rows = rows
        self.config = config
        self.scale = scale
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Returns one scene."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        return {name: tensor[0] for name, tensor in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Scenes as a batch."""
        sizes = [index % len(self.rows) for index in indices]
        own = [self.rows[size] for size in sizes]
        chosen = torch.stack(
            [rows[torch.randint(len(rows), (self.config.grasps,))] for rows in own]
        )
        edge = self.grasps.edge[chosen[:, 0]]
        seen = self.seen(torch.tensor(sizes), edge)
        grasp = turned(self.grasps.grasp[chosen], seen["turn"][:, None])
        lower, upper = self.scale
        return {
            "grasp": (grasp - lower) / (upper - lower) * 2 - 1,
            "edge": edge,
            **seen,
        }

    def seen(self, size: Tensor, edge: Tensor) -> dict[str, Tensor]:
        """Clouds of cubes: ``cloud`` [B, points, 3], ``turn`` [B, 3, 3].

        Args:
            size: the numbers of the cubes' sizes, [B].
            edge: the same in metres.
        """
        turn = drawn_turns(len(edge), self.config.frame)
        return {
            "cloud": on_cubes(edge, self.config.points) @ turn.transpose(1, 2),
            "turn": turn,
        }


class LearntScenes(Scenes):
    """Scenes for training: optionally with stored clouds, and augmented."""

    def __init__(
        self,
        grasps: Grasps,
        rows: Sequence[Tensor],
        config: CubeGraspsConfig,
        scale: Tensor,
        count: int,
        seed: int,
    ) -> None:
        """Stores the arguments like ``Scenes``; the stored clouds, [sizes * clouds, points, 3], are
        sampled from the seed.
        """
        super().__init__(grasps, rows, config, scale, count)
        self.kept: dict[str, Tensor] | None = None
        """Observations of the stored clouds, size by size; a sample has the ``number``
        of its cloud.
        """
        if config.clouds is not None:
            size = torch.arange(len(rows)).repeat_interleave(config.clouds)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                seen = super().seen(
                    size, torch.stack([grasps.edge[own[0]] for own in rows])[size]
                )
            self.kept = {**seen, "number": torch.arange(len(size))}

    def seen(self, size: Tensor, edge: Tensor) -> dict[str, Tensor]:
        """Returns observations like ``Scenes``; with the ``number`` [B] of a stored cloud."""
        if self.kept is None or self.config.clouds is None:
            seen = super().seen(size, edge)
        else:
            number = size * self.config.clouds + torch.randint(
                self.config.clouds, size.shape
            )
            seen = {name: tensor[number] for name, tensor in self.kept.items()}
        return self.augmented(seen)

    def augmented(self, seen: dict[str, Tensor]) -> dict[str, Tensor]:
        """Clouds that are turned a little further, as their grasps will be, and whose points are
        moved.
        """
        augment = self.config.augment
        cloud = seen["cloud"]
        turn = seen["turn"]
        if augment.degrees:
            further = drawn_rotations(
                len(turn), self.config.frame, math.radians(augment.degrees)
            )
            cloud = cloud @ further.transpose(1, 2)
            turn = further @ turn
        if augment.jitter_mm:
            cloud = cloud + augment.jitter_mm / 1e3 * torch.randn_like(cloud)
        return {**seen, "cloud": cloud, "turn": turn}


def drawn_turns(count: int, frame: str) -> Tensor:
    """Rotations [count, 3, 3] by which scenes are turned."""
    if frame == "object":
        return torch.eye(3).expand(count, 3, 3)
    if frame == "quarter":
        return yaw((torch.rand(count) - 0.5) * math.pi / 2)
    if frame == "yaw":
        return yaw(torch.rand(count) * 2 * math.pi)
    quaternions = torch.randn(count, 4).numpy()
    return torch.from_numpy(Rotation.from_quat(quaternions).as_matrix()).to(
        torch.get_default_dtype()
    )


def drawn_rotations(count: int, frame: str, largest: float) -> Tensor:
    """Returns rotations [count, 3, 3] by at most ``largest`` radians: about z, or with ``random``
    about any axis.
    """
    angle = (torch.rand(count) * 2 - 1) * largest
    if frame != "random":
        return yaw(angle)
    axis = F.normalize(torch.randn(count, 3), dim=1)
    return torch.from_numpy(
        Rotation.from_rotvec((axis * angle[:, None]).numpy()).as_matrix()
    ).to(torch.get_default_dtype())


def on_cubes(edge: Tensor, points: int) -> Tensor:
    """Points drawn uniformly from the surfaces of cubes [B] around the origin: [B, points, 3] in
    metres.
    """
    places = torch.rand(len(edge), points, 3) * 2 - 1
    face = torch.randint(3, (len(edge), points, 1))
    side = (torch.randint(2, face.shape) * 2 - 1).to(places.dtype)
    return places.scatter(2, face, side) * edge[:, None, None] / 2
