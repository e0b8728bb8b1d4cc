"""Plans of a convolution: the backend of each direction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .key import DIRECTIONS, ConvKey, Direction
from .registry import BACKENDS


class Needs(NamedTuple):
    """The gradients that a training step computes.

    Attributes:
        data: Whether it needs the gradient of the input.
        weight: Whether it needs the gradient of the weight.
    """

    data: bool
    weight: bool

    @classmethod
    def of(cls, x: Tensor, w: Tensor) -> Needs:
        """Returns what torch will compute for these tensors."""
        # A prediction and a training step of the same convolution have different plans.
        if not torch.is_grad_enabled():
            return cls(False, False)
        return cls(x.requires_grad, w.requires_grad)

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The directions that are computed."""
        needed = (True, self.data, self.weight)
        pairs = zip(DIRECTIONS, needed, strict=True)
        return tuple(direction for direction, is_needed in pairs if is_needed)

    def __str__(self) -> str:
        return "+".join(self.directions)


class ConvPlan(NamedTuple):
    """The names of backends, by direction."""

    forward: str = "native"
    backward_data: str = "native"
    backward_weight: str = "native"

    @property
    def is_native(self) -> bool:
        """Returns whether torch's choice computes all directions."""
        return set(self) == {"native"}

    def data(self, needs: Needs) -> dict[str, str]:
        """Returns the names of the directions that are needed, for a file."""
        return {direction: getattr(self, direction) for direction in needs.directions}


def plan_key(key: ConvKey, needs: Needs) -> str:
    """Returns the text under which a plan is kept: all that its times depend on, on one machine."""
    return f"{key.towards('forward')} needs={needs}"


def parse_plan(values: object, key: ConvKey, needs: Needs) -> ConvPlan:
    """Reads what ``ConvPlan.data`` returned.

    Raises:
        ValueError: It is another form, or a backend cannot compute this convolution.
    """
    expected = set(needs.directions)
    if not isinstance(values, Mapping) or values.keys() != expected:
        raise ValueError(f"should name a backend for {needs}, got {values!r:.80}")
    for direction in needs.directions:
        # A file or a lock may contain anything.
        name = values[direction]
        backend = BACKENDS.get(name) if isinstance(name, str) else None
        if backend is None:
            raise ValueError(f"{direction}: unknown backend {name!r:.40}")
        refusal = backend.refusal(key.towards(direction))
        if refusal is not None:
            raise ValueError(f"{direction}: {refusal}")
    return ConvPlan(**values)
