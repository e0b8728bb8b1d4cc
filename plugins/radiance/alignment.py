"""Azimuth offsets of classes, for generators that are trained without the poses of images."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.api import Learner

from .camera import rotate_azimuth

OFFSETS = 24
"""Offsets that are tried, evenly spaced over a full turn."""
VIEWS_OF_CLASS = 4
"""Views of a class by which offsets are compared."""


def best_offsets(learner: Learner, views: dict[str, Tensor]) -> dict[int, float]:
    """Returns the azimuth offset of each class at which renders are most like the real views.

    Args:
        learner: Learner whose ``predict`` renders views.
        views: ``image`` [N, 3, H, W], ``label`` [N], ``pose`` [N, 2] and ``camera`` [N, 3, 4].

    Returns:
        Offsets in turns, from 0 to 1, by label.
    """
    best: dict[int, float] = {}
    for label in sorted(set(views["label"].tolist())):
        numbers = (views["label"] == label).nonzero().flatten()
        # Views that are spread over those of the class.
        count = min(VIEWS_OF_CLASS, len(numbers))
        last = len(numbers) - 1
        spread = torch.linspace(0, last, count).round().long()
        numbers = numbers[spread.to(numbers.device)]
        sample = {name: table[numbers] for name, table in views.items()}
        best[label] = best_offset(learner, sample)
    return best


def best_offset(learner: Learner, views: dict[str, Tensor]) -> float:
    """Returns the azimuth offset, in turns, at which renders are most like the real views."""
    offsets = torch.arange(OFFSETS, device=views["camera"].device) / OFFSETS
    errors = []
    for offset in offsets:
        shifted = shift_azimuth(views, offset.expand(len(views["label"])))
        render = learner.predict(learner.inputs(shifted))
        error = (render - views["image"]).square().mean()
        errors.append(error)
    smallest = torch.stack(errors).argmin()
    return float(offsets[smallest])


def shift_azimuth(views: dict[str, Tensor], offset: Tensor) -> dict[str, Tensor]:
    """Returns views whose poses and cameras are rotated about the vertical axis.

    Args:
        views: ``pose`` [N, 2] and ``camera`` [N, 3, 4]; the other tables stay as they are.
        offset: [N], in turns.
    """
    pose = views["pose"].clone()
    pose[:, 0] = torch.remainder(pose[:, 0] + offset, 1.0)
    camera = rotate_azimuth(views["camera"], offset)
    return {**views, "pose": pose, "camera": camera}
