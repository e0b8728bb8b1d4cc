"""Scenes: objects as clouds of points, with grasps of them, sampled and rotated."""

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
from .shapes import on_surface
from .tables import on_table

if TYPE_CHECKING:
    from .config import CubeGraspsConfig


class Grasps(NamedTuple):
    """Grasps in the frames of their objects, and the tables of the hand.

    Attributes:
        objects: What every grasp is of: edges of cubes [N] in metres, or shapes [N, 4].
        grasp: The grasps, [N, 25].
        tables: Of the hand.
        digest: Digest of the files.
    """

    objects: Tensor
    grasp: Tensor
    tables: dict[str, Tensor]
    digest: str

    @property
    def key(self) -> str:
        """Name of the objects in a batch."""
        return "edge" if self.objects.ndim == 1 else "shape"


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
    """Objects with clouds and grasps, sampled from torch's generator at each access."""

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
            rows: For every object, the numbers of the grasps to sample.
            config: Of the source.
            scale: The smallest and the largest of every number, [2, 25].
            count: Number of scenes; their objects alternate.
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
        numbers = [index % len(self.rows) for index in indices]
        rows_by_scene = [self.rows[number] for number in numbers]
        count = self.config.grasps
        selected = torch.stack(
            [rows[torch.randint(len(rows), (count,))] for rows in rows_by_scene]
        )
        objects = self.grasps.objects[selected[:, 0]]
        observed = self.seen(torch.tensor(numbers), objects)
        grasp = rotated(self.grasps.grasp[selected], observed["turn"][:, None])
        lower, upper = self.scale
        return {
            "grasp": (grasp - lower) / (upper - lower) * 2 - 1,
            self.grasps.key: objects,
            **observed,
        }

    def seen(self, number: Tensor, objects: Tensor) -> dict[str, Tensor]:
        """Returns clouds of objects: ``cloud`` [B, points, 3], ``turn`` [B, 3, 3].

        Args:
            number: Numbers of the objects among those of the scenes, [B].
            objects: Edges of cubes [B] in metres, or shapes [B, 4].
        """
        rotation = sampled_frames(len(objects), self.config.frame)
        points = self.config.points
        table = self.config.table
        cloud = (
            on_surface(objects, points)
            if table is None
            else on_table(objects, table, points)
        )
        return {"cloud": cloud @ rotation.transpose(1, 2), "turn": rotation}


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
        """Stores the arguments like ``Scenes``; the stored clouds, [objects * clouds, points, 3],
        are sampled from the seed.
        """
        super().__init__(grasps, rows, config, scale, count)
        self.stored: dict[str, Tensor] | None = None
        """Observations of the stored clouds, object by object; a sample has the ``number``
        of its cloud.
        """
        if config.clouds is not None:
            number = torch.arange(len(rows)).repeat_interleave(config.clouds)
            objects = [grasps.objects[numbers[0]] for numbers in rows]
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                observed = super().seen(number, torch.stack(objects)[number])
            self.stored = {**observed, "number": torch.arange(len(number))}

    def seen(self, number: Tensor, objects: Tensor) -> dict[str, Tensor]:
        """Returns observations like ``Scenes``; with the ``number`` [B] of a stored cloud."""
        if self.stored is None or self.config.clouds is None:
            seen = super().seen(number, objects)
        else:
            clouds = self.config.clouds
            stored = number * clouds + torch.randint(clouds, number.shape)
            seen = {
                name: tensor[stored] for name, tensor in self.stored.items()
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
