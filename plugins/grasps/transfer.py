"""Grasps of shapes: those of cubes that are strict on another shape by its geometry."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .geometry import Hand, rotated, yaw
from .shapes import HALF_SIDE, KINDS, signed_distance
from .verdicts import CLOSE_MM, DEPTH_MM, judged

TURNS = (2, 1, 2, 1)
"""Quarter turns after which a hand is elsewhere, by kind of shape: a cuboid has two different pairs
of sides, and a hexagonal prism a side or a corner.
"""
BLOCK = 64
"""Grasps of cubes that are tried together."""
TRIED = 512
SHARE = 0.05
"""Least share of the first 512 grasps of cubes that has to be strict on a shape."""
LARGEST = 128
"""Largest number of grasps of a shape."""
MIN_DIFFERENCE = 0.005
"""Least difference of the two horizontal extents of a cuboid, in metres."""


def sampled_shape(
    kind: int, smallest: float, largest: float, generator: torch.Generator
) -> Tensor:
    """Returns a shape [4] of a kind, whose extents are uniform between two limits in metres.

    A cuboid has horizontal extents that differ by at least 5 mm if the limits are 15 mm apart; a
    capsule is at least as high as it is wide.
    """
    uniform = torch.rand(3, generator=generator)
    x, y, z = (smallest + uniform * (largest - smallest)).tolist()
    if KINDS[kind] == "cuboid" and abs(x - y) < MIN_DIFFERENCE:
        # The nearer limit is on the other side.
        is_low = x + y < smallest + largest
        y = min(x + MIN_DIFFERENCE, largest) if is_low else x - MIN_DIFFERENCE
        y = max(y, smallest)
    if KINDS[kind] == "capsule":
        x, z = sorted((x, z))
    if KINDS[kind] in ("cylinder", "capsule"):
        y = x
    if KINDS[kind] == "hexagonal prism":
        y = x * math.hypot(1, HALF_SIDE)
    return torch.tensor([x, y, z, kind])


def transferred(grasp: Tensor, edge: Tensor, shape: Tensor) -> Tensor:
    """Returns grasps of cubes [N, 25] moved to a shape [4] and turned about z, [N * turns, 25].

    A hand moves along z so that the palm is as far from the shape's nearer end as it was from the
    cube's: a hand below a cube stays below.
    """
    end = torch.where(grasp[:, 2] < 0, -1.0, 1.0)
    shift = torch.zeros_like(grasp)
    shift[:, 2] = end * (shape[2] - edge) / 2
    kind = int(shape[3])
    turns = torch.arange(TURNS[kind]) * (math.pi / 2)
    rotation = yaw(turns.to(grasp.dtype))
    moved = grasp + shift
    copies = moved[:, None].expand(-1, len(turns), -1)
    return rotated(copies, rotation).flatten(0, 1)


def is_strict(hand: Hand, grasp: Tensor, shape: Tensor) -> Tensor:
    """Returns which grasps [N, 25] are strict on a shape [4], [N]."""

    def distance_from(points: Tensor) -> Tensor:
        return signed_distance(points, shape.expand(len(points), 4))

    return is_strict_by(hand, grasp, distance_from)


def is_strict_by(
    hand: Hand, grasp: Tensor, distance_from: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns which grasps [N, 25] are strict on an object, [N].

    The result is that of ``verdicts``, for a tenth of the points: no point of a box is nearer than
    its centre by more than half the diagonal, so that boxes far from the object need no points.

    Args:
        hand: The hand.
        grasp: Grasps in the object's frame.
        distance_from: Returns the distances [B, ...] of points [B, ..., 3] from the object in
            metres; negative inside.
    """
    boxes = hand.boxes(grasp)
    centre = boxes[..., :3, 3]
    signed = distance_from(centre)
    # The middle of the nearest face of a box is one of its points.
    nearest_face = hand.box_half.amin(1)
    highest = 1e3 * (signed + nearest_face).amin(1)
    candidates = highest >= -DEPTH_MM["strict"]

    half_diagonal = hand.box_half.norm(dim=1)
    lowest = 1e3 * (signed - half_diagonal)
    is_near = (lowest <= CLOSE_MM) & candidates[:, None]
    rows, numbers = is_near.nonzero(as_tuple=True)
    in_frame = hand.box_grid() * hand.box_half[numbers, None]
    near = boxes[rows, numbers]
    rotation = near[:, :3, :3]
    position = near[:, None, :3, 3]
    points = in_frame @ rotation.transpose(1, 2) + position

    in_box = torch.full_like(signed, torch.inf)
    in_box[rows, numbers] = distance_from(points).amin(1)
    distance = hand.nearest_of_links(in_box)
    verdict = judged(hand, grasp, distance)
    return verdict["strict"] & candidates


def strict_grasps(
    hand: Hand, grasp: Tensor, edge: Tensor, shape: Tensor
) -> Tensor | None:
    """Returns grasps of cubes that are strict on a shape, at most 128.

    Args:
        hand: The hand.
        grasp: Grasps of cubes [N, 25], in random order.
        edge: Edges of the cubes, [N] in metres.
        shape: The shape, [4].

    Returns:
        Moved grasps [G, 25]; None if fewer than 5 % of the first 512 are strict.
    """
    strict = list[Tensor]()
    count = 0
    for start in range(0, len(grasp), BLOCK):
        if start == TRIED and count < SHARE * TRIED:
            return None
        block = slice(start, start + BLOCK)
        candidates = transferred(grasp[block], edge[block], shape)
        mask = is_strict(hand, candidates, shape)
        strict.append(candidates[mask])
        count += int(mask.sum())
        if count >= LARGEST:
            break
    if count < SHARE * min(TRIED, len(grasp)):
        return None
    return torch.cat(strict)[:LARGEST]
