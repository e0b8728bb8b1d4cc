"""Converts sampled grasps to the responses of a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .geometry import (
    JOINTS,
    LIMIT_TOLERANCE,
    ROTATION,
    TRANSLATION,
    Hand,
    LimitedGrasps,
    matrix,
)
from .served import GraspRequest, GraspResponse, PlacedGrasp
from .verdicts import CLOSE_MM, DEPTH_MM, LINKS


def clouds(requests: Sequence[GraspRequest], device: torch.device) -> Tensor:
    """Returns the clouds of requests of equal size, [B, P, 3] in metres."""
    return torch.tensor([request.cloud for request in requests], device=device)


def drawn(requests: Sequence[GraspRequest], *shape: int) -> Tensor:
    """Returns normal numbers [B, ...] on the CPU: each row from the seed of its request alone."""
    rows = [
        torch.randn(
            shape, generator=torch.Generator().manual_seed(request.seed)
        )
        for request in requests
    ]
    return torch.stack(rows)


def responses(
    requests: Sequence[GraspRequest], outputs: LimitedGrasps, hand: Hand
) -> list[GraspResponse]:
    """Returns the responses for grasps [B, G, 25] in metres and radians."""
    excess = hand.excess(outputs.predicted_joints)
    rows = zip(requests, outputs.grasp, excess, strict=True)
    return [
        _response(request, grasps, angles, hand)
        for request, grasps, angles in rows
    ]


def _response(
    request: GraspRequest, grasps: Tensor, excess: Tensor, hand: Hand
) -> GraspResponse:
    count = len(grasps)
    # Without the edge of a cube there is nothing to measure a grasp by.
    measures: list[dict[str, Any]] = [{}] * count
    if request.edge is not None:
        measures = _measured(grasps, request.edge, hand)
    boxes = hand.boxes(grasps).tolist() if request.boxes else [None] * count
    parts = zip(
        grasps[:, TRANSLATION].tolist(),
        matrix(grasps[:, ROTATION]).tolist(),
        grasps[:, JOINTS].tolist(),
        (excess > LIMIT_TOLERANCE).tolist(),
        excess.rad2deg().tolist(),
        boxes,
        measures,
        strict=True,
    )
    placed = [
        PlacedGrasp(
            translation=translation,
            rotation=rotation,
            joints=joints,
            clamped=clamped,
            clamped_degrees=degrees,
            boxes=box,
            **measure,
        )
        for translation, rotation, joints, clamped, degrees, box, measure in parts
    ]
    half_sizes = hand.box_half.tolist() if request.boxes else None
    return GraspResponse(grasps=placed, half_sizes=half_sizes)


def _measured(grasps: Tensor, edge: float, hand: Hand) -> list[dict[str, Any]]:
    """Returns the measures of grasps [G, 25] of a cube along the axes."""
    distance = 1e3 * hand.distances(
        grasps, grasps.new_full((len(grasps),), edge)
    )
    depth = (-distance.amin(1)).clamp(min=0).tolist()
    links = (distance <= CLOSE_MM).sum(1).tolist()
    measures = []
    for depth_mm, close_links in zip(depth, links, strict=True):
        verdicts = [
            name
            for name in ("strict", "valid")
            if depth_mm <= DEPTH_MM[name] and close_links >= LINKS[name]
        ]
        # The strictest verdict comes first.
        verdict = (*verdicts, "neither")[0]
        measures.append(
            {"depth_mm": depth_mm, "links": close_links, "verdict": verdict}
        )
    return measures
