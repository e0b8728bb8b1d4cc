"""Rotations, the joints of a hand, and how far its links are from an object."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from .shapes import signed_distance

TRANSLATION = slice(0, 3)
JOINTS = slice(3, 19)
ROTATION = slice(19, 25)
"""Of the 25 numbers of a grasp: metres, radians, and the first two columns of a rotation matrix."""
LIMIT_TOLERANCE = math.radians(1.0)
"""Angle by which a joint may exceed its limit before the grasp counts as beyond the limits."""
SURFACE = 5
"""Points along every edge of a box, by whose distance the box is judged."""
TIE = 1e-5
"""Metres by which the distances of equally near points may differ by rounding."""
HAND = (
    "parent",
    "origin",
    "turn",
    "axis",
    "keypoints",
    "box_link",
    "box_turn",
    "box_centre",
    "box_half",
)
"""The tables that make a hand."""
LIMITS = ("joint_lower", "joint_upper")
"""Tables of the smallest and the largest angle of every joint."""


class LimitedGrasps(NamedTuple):
    """Grasps whose joints are within the limits of the hand.

    Attributes:
        grasp: The grasps, [..., 25].
        predicted_joints: The joints before they were limited, [..., 16].
    """

    grasp: Tensor
    predicted_joints: Tensor


def matrix(rotation: Tensor) -> Tensor:
    """Returns rotation matrices [..., 3, 3] for their 6D representations [..., 6].

    This is Gram-Schmidt (Zhou et al. 2019, arXiv 1812.07035).
    """
    first = F.normalize(rotation[..., :3], dim=-1)
    column = rotation[..., 3:]
    along_first = (first * column).sum(-1, keepdim=True) * first
    second = F.normalize(column - along_first, dim=-1)
    third = torch.linalg.cross(first, second)
    return torch.stack([first, second, third], -1)


def rotation_6d(rotation: Tensor) -> Tensor:
    """Returns the first two columns of rotation matrices, [..., 3, 3] to [..., 6]."""
    return torch.cat([rotation[..., 0], rotation[..., 1]], -1)


def yaw(angle: Tensor) -> Tensor:
    """Returns rotations about z, [...] in radians to [..., 3, 3]."""
    sine = angle.sin()
    cosine = angle.cos()
    zero = torch.zeros_like(angle)
    rows = [cosine, -sine, zero, sine, cosine, zero, zero, zero, zero + 1]
    return torch.stack(rows, -1).view(*angle.shape, 3, 3)


def straightening(cloud: Tensor) -> Tensor:
    """Returns rotations about z [B, 3, 3] that bring clouds [B, P, 3] into a canonical orientation.

    They are computed from the mean of r^2 (x + iy)^4, to which far points, so corners,
    contribute most: its angle is four times that of the cloud. One of the four
    equivalent orientations is selected.
    """
    # In float64, because the terms nearly cancel for points in any order.
    flat = cloud[..., :2].double()
    x, y = (flat - flat.mean(1, keepdim=True)).unbind(-1)
    square = x * x + y * y
    real_part = x**4 - 6 * x * x * y * y + y**4
    real = (square * real_part).mean(1)
    imaginary = (square * 4 * x * y * (x * x - y * y)).mean(1)
    return yaw(-torch.atan2(-imaginary, -real) / 4).to(cloud.dtype)


def rotated(grasp: Tensor, rotation: Tensor) -> Tensor:
    """Returns grasps [..., 25] rotated together with the object, by rotations [..., 3, 3]."""
    vectors = [grasp[..., TRANSLATION], grasp[..., 19:22], grasp[..., 22:25]]
    columns = torch.stack(vectors, -1)
    translation, first, second = (rotation @ columns).unbind(-1)
    return torch.cat([translation, grasp[..., JOINTS], first, second], -1)


class Hand(nn.Module):
    """The joints, links and boxes of a hand; link 0 is the palm, and joint j moves link j + 1."""

    parent: Tensor
    origin: Tensor
    turn: Tensor
    axis: Tensor
    keypoints: Tensor
    box_link: Tensor
    box_turn: Tensor
    box_centre: Tensor
    box_half: Tensor
    joint_lower: Tensor
    joint_upper: Tensor

    def __init__(self, tables: Mapping[str, Tensor]) -> None:
        """Keeps the tables.

        Args:
            tables: ``parent`` [J], the link that a joint is on; ``origin`` [J, 3] and ``turn``
                [J, 3, 3], where and how it is there; ``axis`` [J, 3] of its motion; ``keypoints``
                [K], links; ``box_link`` [N], ``box_turn`` [N, 3, 3], ``box_centre`` [N, 3] and
                ``box_half`` [N, 3], boxes in the frames of their links, in metres;
                ``joint_lower`` and ``joint_upper`` [J], the limits of the joints in radians.
        """
        super().__init__()
        # Buffers move to the device together with a network.
        for name in HAND:
            self.register_buffer(name, tables[name].clone())
        # They are not in a network's state: older checkpoints have none, and the tables of the
        # data contain them whenever a network is built.
        for name in LIMITS:
            self.register_buffer(name, tables[name].clone(), persistent=False)
        self.parents: list[int] = tables["parent"].tolist()

    def links(self, grasp: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rotations [..., L, 3, 3] and positions [..., L, 3] in metres of the links, for
        grasps [..., 25].
        """
        # Rodrigues' formula gives the rotation of every joint about its axis.
        angle = grasp[..., JOINTS, None, None]
        cross = self._cross()
        identity = torch.eye(3, dtype=angle.dtype, device=angle.device)
        motion = (
            identity + angle.sin() * cross + (1 - angle.cos()) * cross @ cross
        )
        local = self.turn @ motion

        # A joint comes after the link that it is on, so one pass is sufficient.
        rotations = [matrix(grasp[..., ROTATION])]
        positions = [grasp[..., TRANSLATION]]
        for joint, parent in enumerate(self.parents):
            origin = self.origin[joint][:, None]
            offset = (rotations[parent] @ origin).squeeze(-1)
            positions.append(positions[parent] + offset)
            rotations.append(rotations[parent] @ local[..., joint, :, :])
        return torch.stack(rotations, -3), torch.stack(positions, -2)

    def limited(self, grasp: Tensor) -> LimitedGrasps:
        """Moves the joints of grasps [..., 25] that are beyond their limits to these."""
        predicted = grasp[..., JOINTS]
        joints = predicted.clamp(self.joint_lower, self.joint_upper)
        parts = [grasp[..., TRANSLATION], joints, grasp[..., ROTATION]]
        return LimitedGrasps(torch.cat(parts, -1), predicted)

    def excess(self, joints: Tensor) -> Tensor:
        """Returns the largest angle by which a joint exceeds its limit: [..., J] to [...]."""
        below = self.joint_lower - joints
        above = joints - self.joint_upper
        return torch.maximum(below, above).amax(-1).clamp(min=0)

    def keypoints_of(self, grasp: Tensor) -> Tensor:
        """Returns the origins of a few links, [..., K, 3] in metres, for grasps [..., 25]."""
        return self.links(grasp)[1].index_select(-2, self.keypoints)

    def outline_of(self, grasp: Tensor) -> Tensor:
        """Returns points that outline the links, [..., 2 N, 3] in metres, for grasps [..., 25]: the
        centres of the two faces of every box across its longest axis.
        """
        longest = self.box_half.argmax(1, keepdim=True)
        offset = torch.zeros_like(self.box_half).scatter(
            1, longest, self.box_half.gather(1, longest)
        )
        ends = torch.stack([-offset, offset], 1)
        # First in the frames of the links, [N, 2, 3].
        in_link = ends @ self.box_turn.transpose(1, 2)
        in_link = in_link + self.box_centre[:, None]
        rotation, position = self.links(grasp)
        link_rotation = rotation[..., self.box_link, :, :].transpose(-1, -2)
        points = in_link @ link_rotation
        points = points + position[..., self.box_link, None, :]
        return points.flatten(-3, -2)

    def boxes(self, grasp: Tensor) -> Tensor:
        """Returns transformations [..., N, 4, 4] from the frames of the boxes to that of the grasps
        [..., 25], in metres.
        """
        rotation, position = self.links(grasp)
        link_rotation = rotation[..., self.box_link, :, :]
        link_position = position[..., self.box_link, :]
        offset = (link_rotation @ self.box_centre[:, :, None]).squeeze(-1)
        centre = offset + link_position
        top = torch.cat([link_rotation @ self.box_turn, centre[..., None]], -1)
        bottom = top.new_tensor([0.0, 0.0, 0.0, 1.0]).expand(
            *top.shape[:-2], 1, 4
        )
        return torch.cat([top, bottom], -2)

    def distances(self, grasp: Tensor, objects: Tensor) -> Tensor:
        """Returns the distance of every link from an object around the origin: [B, L] in
        metres, negative inside.

        Each is that of the nearest of 98 points on the surface of each of its boxes; a link
        without a box is infinitely far away.

        Args:
            grasp: [B, 25] in the object's frame.
            objects: Edges of cubes [B] in metres, or shapes [B, 4].
        """
        signed = signed_distance(self._surface(grasp), objects)
        return self.nearest_of_links(signed.amin(2))

    def nearest_points(
        self, grasp: Tensor, objects: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the point of every link that is nearest to an object around the origin, [B, L, 3]
        in metres, and ``distances``, [B, L].

        Of points that are equally near, as of an edge that is parallel to a face, it is the mean.
        The point of a link without a box is the origin.
        """
        points = self._surface(grasp)
        signed = signed_distance(points, objects)
        in_box = signed.amin(2)
        distance = self.nearest_of_links(in_box)
        is_tied = (signed <= in_box[..., None] + TIE)[..., None]
        point = (points * is_tied).sum(2) / is_tied.sum(2)

        # The box that a link is nearest with: the first of equal ones.
        boxes = torch.arange(len(self.box_link), device=grasp.device)
        is_nearest = in_box == distance[:, self.box_link]
        candidates = torch.where(is_nearest, boxes, len(boxes))
        box = torch.full_like(distance, len(boxes), dtype=torch.long)
        links = self.box_link.expand(len(grasp), -1)
        box = box.scatter_reduce(1, links, candidates, "amin")
        point = torch.cat([point, torch.zeros_like(point[:, :1])], 1)
        return point.gather(1, box[..., None].expand(-1, -1, 3)), distance

    def _surface(self, grasp: Tensor) -> Tensor:
        """Returns 98 points on the surface of every box, [B, N, 98, 3], for grasps [B, 25]."""
        rotation, position = self.links(grasp)
        # Points on the surface of every box, first in the frame of its link.
        box_points = self.box_grid() * self.box_half[:, None]
        link_points = box_points @ self.box_turn.transpose(1, 2)
        link_points = link_points + self.box_centre[:, None]
        link_rotation = rotation[:, self.box_link].transpose(-1, -2)
        points: Tensor = link_points @ link_rotation
        return points + position[:, self.box_link, None]

    def box_grid(self) -> Tensor:
        """Returns 98 points on the surface of a cube from -1 to 1, [98, 3]."""
        half = self.box_half
        line = torch.linspace(
            -1, 1, SURFACE, dtype=half.dtype, device=half.device
        )
        cube = torch.cartesian_prod(line, line, line)
        return cube[(cube.abs() == 1).any(1)]

    def nearest_of_links(self, in_box: Tensor) -> Tensor:
        """Returns the smallest distance of the boxes of every link: [B, N] to [B, L]."""
        unreached = torch.full(
            (len(in_box), len(self.parents) + 1),
            torch.inf,
            dtype=in_box.dtype,
            device=in_box.device,
        )
        links = self.box_link.expand(len(in_box), -1)
        return unreached.scatter_reduce(1, links, in_box, "amin")

    def _cross(self) -> Tensor:
        """Returns the matrices [J, 3, 3] of the cross product with the joints' axes."""
        x, y, z = self.axis.unbind(1)
        zero = torch.zeros_like(x)
        return torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], 1).view(
            -1, 3, 3
        )
