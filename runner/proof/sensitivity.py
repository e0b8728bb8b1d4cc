"""The smallest systematic error that a comparison of trajectories detects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from runner.proof.difference import FLOOR, TOLERANCE
from runner.proof.isolation import Frame, Location
from runner.system.tensor_trees import has_arithmetic


class Sensitivity:
    """Measures how far the state moves in updates whose results are compared.

    An error that every update repeats adds up: after all updates it is as large a share of the
    distance that the state has moved as it is of one update.

    Args:
        initial: The state before the first update.
    """

    def __init__(self, initial: Frame) -> None:
        # The tensors of a frame change in place.
        self._initial = {
            location: tensor.clone() for location, tensor in _weights(initial)
        }

    def smallest_error(self, frame: Frame) -> float | None:
        """Returns the error of each update that is detected after the last one, as a share of
        the update.

        Args:
            frame: The state after the last update that is compared with ``TOLERANCE``.

        Returns:
            The largest of all groups of tensors that moved; None if none moved.
        """
        sizes: dict[str, float] = defaultdict(float)
        distances: dict[str, float] = defaultdict(float)
        for location, tensor in _weights(frame):
            initial = self._initial.get(location)
            if initial is None or initial.shape != tensor.shape:
                continue
            group = location.name.rpartition(".")[2]
            size = float(tensor.abs().max())
            distance = float((tensor - initial).abs().max())
            sizes[group] = max(sizes[group], size)
            distances[group] = max(distances[group], distance)
        shares = [
            (TOLERANCE * sizes[group] + FLOOR) / distance
            for group, distance in distances.items()
            if distance > FLOOR
        ]
        return max(shares, default=None)


def _weights(frame: Frame) -> Iterable[tuple[Location, Tensor]]:
    """Yields the tensors of numbers in a state."""
    for location, value in frame.items():
        if location.kind != "state" or not isinstance(value, Tensor):
            continue
        is_dense = has_arithmetic(value) and value.layout == torch.strided
        if is_dense and value.numel():
            yield location, value.detach()
