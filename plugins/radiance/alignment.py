"""Azimuth offsets of classes, for generators that are trained without knowing the pose of an image."""

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
    offsets = torch.arange(OFFSETS, device=views["camera"].device) / OFFSETS
    best: dict[int, float] = {}
    for label in sorted(set(views["label"].tolist())):
        numbers = (views["label"] == label).nonzero().flatten()
        # Views that are spread over those of the class.
        spread = torch.linspace(0, len(numbers) - 1, min(VIEWS_OF_CLASS, len(numbers)))
        numbers = numbers[spread.round().long().to(numbers.device)]
        sample = {name: table[numbers] for name, table in views.items()}
        errors = []
        for offset in offsets:
            render = learner.predict(learner.inputs(shift_azimuth(sample, offset.expand(len(numbers)))))
            errors.append((render - sample["image"]).square().mean())
        best[label] = float(offsets[torch.stack(errors).argmin()])
    return best


def shift_azimuth(views: dict[str, Tensor], offset: Tensor) -> dict[str, Tensor]:
    """Returns views whose poses and cameras are rotated about the vertical axis by offsets [N], in turns."""
    pose = views["pose"].clone()
    pose[:, 0] = torch.remainder(pose[:, 0] + offset, 1.0)
    return {**views, "pose": pose, "camera": rotate_azimuth(views["camera"], offset)}
