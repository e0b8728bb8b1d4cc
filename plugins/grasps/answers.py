"""Converts sampled grasps to the responses of a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .cube import CLOSE_MM, DEPTH_MM, LINKS
from .geometry import JOINTS, ROTATION, TRANSLATION, Hand, matrix
from .served import GraspRequest, GraspResponse, PlacedGrasp


def clouds(requests: Sequence[GraspRequest], device: torch.device) -> Tensor:
    """Returns the clouds of requests of equal size, [B, P, 3] in metres."""
    return torch.tensor([request.cloud for request in requests], device=device)


def drawn(requests: Sequence[GraspRequest], *shape: int) -> Tensor:
    """Normal numbers [B, ...] on the CPU: each row from the seed of its request alone."""
    rows = [
        torch.randn(shape, generator=torch.Generator().manual_seed(request.seed))
        for request in requests
    ]
    return torch.stack(rows)


def responses(
    requests: Sequence[GraspRequest], grasps: Tensor, hand: Hand
) -> list[GraspResponse]:
    """Returns the responses for grasps [B, G, 25] in metres and radians."""
    return [_response(*each, hand) for each in zip(requests, grasps, strict=True)]


def _response(request: GraspRequest, grasps: Tensor, hand: Hand) -> GraspResponse:
    count = len(grasps)
    measured = (
        [{}] * count if request.edge is None else _measured(grasps, request.edge, hand)
    )
    boxes = hand.boxes(grasps).tolist() if request.boxes else [None] * count
    parts = zip(
        grasps[:, TRANSLATION].tolist(),
        matrix(grasps[:, ROTATION]).tolist(),
        grasps[:, JOINTS].tolist(),
        boxes,
        measured,
        strict=True,
    )
    placed = [
        PlacedGrasp(
            translation=translation, rotation=rotation, joints=joints, boxes=box, **more
        )
        for translation, rotation, joints, box, more in parts
    ]
    return GraspResponse(
        grasps=placed, half_sizes=hand.box_half.tolist() if request.boxes else None
    )


def _measured(grasps: Tensor, edge: float, hand: Hand) -> list[dict[str, Any]]:
    """Returns the measures of grasps [G, 25] of a cube along the axes."""
    distance = 1e3 * hand.distances(grasps, grasps.new_full((len(grasps),), edge))
    depth = (-distance.amin(1)).clamp(min=0).tolist()
    links = (distance <= CLOSE_MM).sum(1).tolist()
    found = []
    for deep, near in zip(depth, links, strict=True):
        passed = [
            name
            for name in ("strict", "valid")
            if deep <= DEPTH_MM[name] and near >= LINKS[name]
        ]
        found.append(
            {"depth_mm": deep, "links": near, "verdict": (*passed, "neither")[0]}
        )
    return found
