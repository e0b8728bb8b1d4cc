"""PettingZoo environments as a source of training batches."""

from collections.abc import Mapping

import torch

from runner.api import Context

from ..simulator import SimulatorSource
from .build import environment_maker
from .config import PettingZooConfig
from .environment import PettingZooEnvironment


class PettingZooSource(SimulatorSource):
    """Copies of a PettingZoo environment with a replay buffer."""

    def __init__(self, config: PettingZooConfig, context: Context) -> None:
        self._make = environment_maker(config.environment, config.options)
        super().__init__(config, context)

    def make_environment(
        self,
        config: PettingZooConfig,
        envs: int,
        device: torch.device,
        generator: torch.Generator,
    ) -> PettingZooEnvironment:
        """Makes ``envs`` copies."""
        return PettingZooEnvironment(self._make, envs, device, generator)

    def events(self) -> Mapping[str, bool]:
        """Returns whether an episode ended in the last draw, and whether some of its agents have
        ended.
        """
        assert isinstance(self._environment, PettingZooEnvironment)
        is_partial = (
            self._latest is not None and self._environment.has_ended_agents()
        )
        return {
            **super().events(),
            "an agent that ends before the others": is_partial,
        }
