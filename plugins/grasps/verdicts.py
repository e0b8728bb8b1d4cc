"""Which grasps are valid or strict: how deep they go into objects, and how many links are close."""

from __future__ import annotations

import torch
from torch import Tensor

from .geometry import JOINTS, LIMIT_TOLERANCE, Hand

DEPTH_MM = {"valid": 5.0, "strict": 2.0}
LINKS = {"valid": 2, "strict": 3}
"""How deep a grasp may go into the object, and how many links it needs close to it."""
CLOSE_MM = 5.0
CHUNK = 64
"""Grasps that are measured together."""


def verdicts(hand: Hand, grasp: Tensor, objects: Tensor) -> dict[str, Tensor]:
    """Returns the ``depth`` of grasps in their objects, in mm, and which of them are ``valid`` and
    ``strict``, with joints within their limits: [B] each.

    Args:
        hand: The hand.
        grasp: Grasps [B, 25] in the frames of their objects.
        objects: Edges of cubes [B] in metres, or shapes [B, 4].
    """
    # In chunks, because a grasp has some thousand points, and their distances take memory.
    chunks = zip(
        torch.split(grasp, CHUNK), torch.split(objects, CHUNK), strict=True
    )
    distances = [hand.distances(*chunk) for chunk in chunks]
    return judged(hand, grasp, torch.cat(distances))


def judged(hand: Hand, grasp: Tensor, distance: Tensor) -> dict[str, Tensor]:
    """Returns ``verdicts`` on grasps [B, 25] with the distances [B, L] of their links in metres."""
    distance = 1e3 * distance
    depth = (-distance.amin(1)).clamp(min=0)
    links = (distance <= CLOSE_MM).sum(1)
    is_reachable = hand.excess(grasp[:, JOINTS]) <= LIMIT_TOLERANCE
    within = {
        name: (depth <= DEPTH_MM[name]) & (links >= LINKS[name]) & is_reachable
        for name in DEPTH_MM
    }
    return {**within, "depth": depth}
