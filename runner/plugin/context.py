"""What learners and sources are built with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runner.plugin.optimizer import OptimizerSettings
from runner.plugin.slots import Slots

if TYPE_CHECKING:
    import torch


@dataclass
class Context:
    """Device, slots, settings that belong to no plugin, and random generators."""

    device: torch.device
    slots: Slots
    seed: int
    batch_size: int = 1
    """The recipe's; a stage may train with another one."""
    optimizers: Mapping[str, OptimizerSettings] = field(default_factory=dict)
    """By role."""
    ema: float | None = None
    """Decay of the averaged parameters that evaluation uses; None evaluates the parameters themselves."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """What the source says of its data beside shapes (how many classes, how large a vocabulary)."""
    generators: dict[str, torch.Generator] = field(default_factory=dict)

    def generator(self, name: str, device: torch.device | str | None = None) -> torch.Generator:
        """The random generator of that name; the same seed, name and device give the same numbers.

        Args:
            name: who draws from it ("noise", "environment", ...); asked for again, the same generator comes back.
            device: where it draws; the context's device unless told.
        """
        import torch

        if name not in self.generators:
            generator = torch.Generator(self.device if device is None else device)
            generator.manual_seed(derived_seed(self.seed, name))
            self.generators[name] = generator
        return self.generators[name]


def derived_seed(seed: int, name: str) -> int:
    """A seed of 63 bits that follows from another one and a name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
