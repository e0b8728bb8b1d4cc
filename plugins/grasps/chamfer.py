"""The Chamfer distance of two sets of points."""

from __future__ import annotations

import torch
from torch import Tensor

from .encoder import picked


def chamfer(points: Tensor, others: Tensor) -> Tensor:
    """Returns the symmetric Chamfer distance of sets of points, [B, P, 3] and [B, Q, 3]: [B].

    It is the mean squared distance from a point to the nearest one of the other set, in both
    directions, added up (Fan et al. 2017, arXiv:1612.00603, section 4.1, with means for sums). The
    nearest points are found without gradients; only the P + Q distances to them have some.
    """
    with torch.no_grad():
        # As a product of matrices, the distances of close points would be wrong.
        distance = torch.cdist(
            points, others, compute_mode="donot_use_mm_for_euclid_dist"
        )
        nearest_other = distance.argmin(2)
        nearest_point = distance.argmin(1)
    forward = (points - picked(others, nearest_other)).square().sum(-1)
    backward = (others - picked(points, nearest_point)).square().sum(-1)
    return forward.mean(1) + backward.mean(1)
