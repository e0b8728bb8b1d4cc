"""The subject of a comparison: one training step, and everything that it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Outputs = Any
"""A tensor; tensors by name (a dictionary, a tuple with or without names); None; or
numbers in place of tensors.
"""
Listener = Callable[[str, Any], None]
"""Receives the name of a slot and its result."""


class Stateful(Protocol):
    """A module, an optimizer, a scheduler: anything whose state can be saved and loaded."""

    def state_dict(self) -> Any:
        """Returns everything that a step changes."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restores what ``state_dict`` returned."""


@dataclass(frozen=True)
class Subject:
    """A training step with its state.

    The same step is called many times, each time with another batch; what it draws at random should
    come from the batch or from the global generators of Python, NumPy and torch, which are seeded
    alike for all that is compared.
    """

    step: Callable[[Any], Outputs]
    """Trains on one batch; returns what it logs (a loss)."""
    state: Mapping[str, Stateful]
    """Everything that a step changes, by name: ``{"model": model, "optimizer": optimizer}``."""
    parameters: Callable[[], Iterable[tuple[str, Tensor]]] | None = None
    """Trainable parameters by name; by default those of the modules in ``state``."""
    gradients: Callable[[], Mapping[str, Tensor | None]] | None = None
    """Their last gradients; by default ``.grad``, or the gradients that the optimizers in ``state``
    used, if a step deletes them.
    """
    seed: Callable[[int], None] | None = None
    """Seeds what a step draws from torch's global generator, by the number of the step; where a
    loop does so.
    """
    watch: Callable[[Listener], None] | None = None
    """Registers a listener for the results of the named parts of a step, its slots,
    which locates a change.
    """


Build = Callable[[], Subject]
"""Makes a subject, always the same one, seeds included; under the default type float64 for the
comparison in it.
"""
