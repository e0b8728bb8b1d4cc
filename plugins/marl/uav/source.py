"""The UAV simulator as a source of training batches."""

import torch

from ..simulator import SimulatorSource
from .config import UavConfig
from .environment import UavEnvironment


class UavSource(SimulatorSource):
    """Batched UAV simulations with a replay buffer."""

    def make_environment(
        self, config: UavConfig, envs: int, device: torch.device, generator: torch.Generator
    ) -> UavEnvironment:
        """Builds ``envs`` simulations as one batch of tensors."""
        return UavEnvironment(config, envs, device, generator)
