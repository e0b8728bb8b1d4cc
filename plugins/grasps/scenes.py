"""Scenes: cubes as clouds of points, with grasps of them, sampled and rotated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from scipy.spatial.transform import Rotation
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)
from torch.utils.data import Dataset

from .geometry import rotated, yaw

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
    """Returns the smallest and the largest of every number of grasps [N, 25] in any rotation.

    Both are [25].
    """
    lower = grasp.amin(0)
    upper = grasp.amax(0)
    # Each of the three vectors can point anywhere in the plane or in space.
    for first in (0, 19, 22):
        if frame != "object":
            stop = first + (3 if frame == "random" else 2)
            reach = grasp[:, first:stop].norm(dim=1).max()
            lower[first:stop] = -reach
            upper[first:stop] = reach
    middle = (lower + upper) / 2
    # Joints that never move would divide by zero.
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
        """Stores the arguments.

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
        # Without an IndexError, a loop over the dataset would not end.
        if not 0 <= index < self.count:
            raise IndexError(index)
        return {
            name: tensor[0]
            for name, tensor in self.__getitems__([index]).items()
        }

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Returns scenes as a batch."""
        sizes = [index % len(self.rows) for index in indices]
        rows_by_scene = [self.rows[size] for size in sizes]
        count = self.config.grasps
        selected = torch.stack(
            [rows[torch.randint(len(rows), (count,))] for rows in rows_by_scene]
        )
        edge = self.grasps.edge[selected[:, 0]]
        observed = self.seen(torch.tensor(sizes), edge)
        grasp = rotated(self.grasps.grasp[selected], observed["turn"][:, None])
        lower, upper = self.scale
        return {
            "grasp": (grasp - lower) / (upper - lower) * 2 - 1,
            "edge": edge,
            **observed,
        }

    def seen(self, size: Tensor, edge: Tensor) -> dict[str, Tensor]:
        """Returns clouds of cubes: ``cloud`` [B, points, 3], ``turn`` [B, 3, 3].

        Args:
            size: the numbers of the cubes' sizes, [B].
            edge: the same in metres.
        """
        rotation = sampled_frames(len(edge), self.config.frame)
        return {
            "cloud": on_cubes(edge, self.config.points)
            @ rotation.transpose(1, 2),
            "turn": rotation,
        }


class TrainingScenes(Scenes):
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
        self.stored: dict[str, Tensor] | None = None
        """Observations of the stored clouds, size by size; a sample has the ``number``
        of its cloud.
        """
        if config.clouds is not None:
            size = torch.arange(len(rows)).repeat_interleave(config.clouds)
            edges = [grasps.edge[rows_of_size[0]] for rows_of_size in rows]
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                observed = super().seen(size, torch.stack(edges)[size])
            self.stored = {**observed, "number": torch.arange(len(size))}

    def seen(self, size: Tensor, edge: Tensor) -> dict[str, Tensor]:
        """Returns observations like ``Scenes``; with the ``number`` [B] of a stored cloud."""
        if self.stored is None or self.config.clouds is None:
            seen = super().seen(size, edge)
        else:
            clouds = self.config.clouds
            number = size * clouds + torch.randint(clouds, size.shape)
            seen = {
                name: tensor[number] for name, tensor in self.stored.items()
            }
        return self.augmented(seen)

    def augmented(self, observed: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns clouds with a small additional rotation, and with jitter of the points.

        The grasps get the same rotation through ``turn``.
        """
        augment = self.config.augment
        cloud = observed["cloud"]
        rotation = observed["turn"]
        if augment.degrees:
            largest = math.radians(augment.degrees)
            perturbation = sampled_rotations(
                len(rotation), self.config.frame, largest
            )
            cloud = cloud @ perturbation.transpose(1, 2)
            rotation = perturbation @ rotation
        if augment.jitter_mm:
            cloud = cloud + augment.jitter_mm / 1e3 * torch.randn_like(cloud)
        return {**observed, "cloud": cloud, "turn": rotation}


def sampled_frames(count: int, frame: str) -> Tensor:
    """Returns rotations [count, 3, 3] of scenes."""
    if frame == "object":
        return torch.eye(3).expand(count, 3, 3)
    if frame == "quarter":
        return yaw((torch.rand(count) - 0.5) * math.pi / 2)
    if frame == "yaw":
        return yaw(torch.rand(count) * 2 * math.pi)
    # Normalised normal numbers are uniform on the sphere of quaternions.
    quaternions = torch.randn(count, 4).numpy()
    matrices = Rotation.from_quat(quaternions).as_matrix()
    return torch.from_numpy(matrices).to(torch.get_default_dtype())


def sampled_rotations(count: int, frame: str, largest: float) -> Tensor:
    """Returns rotations [count, 3, 3] by at most ``largest`` radians: about z, or with ``random``
    about any axis.
    """
    angle = (torch.rand(count) * 2 - 1) * largest
    if frame != "random":
        return yaw(angle)
    axis = F.normalize(torch.randn(count, 3), dim=1)
    vectors = (axis * angle[:, None]).numpy()
    matrices = Rotation.from_rotvec(vectors).as_matrix()
    return torch.from_numpy(matrices).to(torch.get_default_dtype())


def on_cubes(edge: Tensor, points: int) -> Tensor:
    """Samples points uniformly from the surfaces of cubes [B] around the origin.

    Returns:
        [B, points, 3] in metres.
    """
    interior = torch.rand(len(edge), points, 3) * 2 - 1
    # One coordinate of every point moves to one of the two faces along that axis.
    face = torch.randint(3, (len(edge), points, 1))
    side = (torch.randint(2, face.shape) * 2 - 1).to(interior.dtype)
    return interior.scatter(2, face, side) * edge[:, None, None] / 2
