"""The UAV simulator as a source of training batches."""

from collections.abc import Mapping
from pathlib import Path

import torch

from runner.api import Context, Learner

from ..simulator import SimulatorSource
from .config import UavConfig
from .environment import SCALE, UavEnvironment
from .flights import Flight, draw

DRAWN = 6
"""Episodes in a plot."""
OUTCOMES = ("goal", "collision", "cut off")


class UavSource(SimulatorSource):
    """Batched UAV simulations with a replay buffer."""

    captures_environment = True

    def __init__(self, config: UavConfig, context: Context) -> None:
        super().__init__(config, context)
        # These settings concern the training only; an evaluation makes other environments.
        assert isinstance(self._environment, UavEnvironment)
        if config.training_limit is not None:
            self._environment.episode_limit = min(
                config.training_limit, config.episode_limit
            )
        if config.repeat_failures:
            self._environment.repeat_failures(config.repeat_failures)

    def make_environment(
        self,
        config: UavConfig,
        envs: int,
        device: torch.device,
        generator: torch.Generator,
    ) -> UavEnvironment:
        """Builds ``envs`` simulations as one batch of tensors."""
        return UavEnvironment(config, envs, device, generator)

    def events(self) -> Mapping[str, bool]:
        """Returns whether an episode ended in the last draw, by its outcome."""
        outcomes = torch.zeros(3)
        if self._latest is not None:
            outcomes = self._latest.episodes[:, 1:4].sum(0)
        names = ("success", "collision", "timeout")
        return {
            f"an episode that ends by {name}": bool(count)
            for name, count in zip(names, outcomes, strict=True)
        }

    @torch.no_grad()
    def render(self, learner: Learner, path: Path) -> None:
        """Draws the first episodes of an evaluation."""
        environment, observation = self.held_out()
        assert isinstance(environment, UavEnvironment)
        goals = environment.state_dict()["scene"][:DRAWN, 2:].cpu()
        obstacles = [environment.obstacle_positions[:DRAWN]]
        positions = [observation[:DRAWN, :, :2]]
        moving = []
        outcomes = torch.zeros(len(goals), 3)
        for step, running in self.rollout(learner, environment, observation):
            is_running = running[:DRAWN].cpu()
            # The other episodes of the evaluation can take much longer.
            if not is_running.any():
                break
            positions.append(step.next_observation[:DRAWN, :, :2])
            obstacles.append(environment.obstacle_positions[:DRAWN])
            moving.append(is_running)
            outcomes += step.episodes[:DRAWN, 1:4].cpu() * is_running.unsqueeze(
                1
            )
        paths = torch.stack(positions).cpu() / torch.tensor(SCALE[:2])
        obstacle_paths = torch.stack(obstacles).cpu()
        lengths = torch.stack(moving).sum(0).tolist()
        flights = [
            Flight(
                paths[: length + 1, index],
                obstacle_paths[: length + 1, index],
                goals[index],
                OUTCOMES[int(outcomes[index].argmax())],
            )
            for index, length in enumerate(lengths)
        ]
        title = (
            f"the first {len(flights)} of {len(observation)} held-out episodes"
        )
        draw(flights, title, path)
