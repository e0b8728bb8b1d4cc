"""The UAV path-planning environment: E simulations of one leader and n followers as one batch of
tensors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runner.api import State

from ..simulator import EnvironmentStep
from .config import ACTION_SIZE, UavConfig
from .failed_starts import FailedStarts
from .obstacles import Obstacles
from .rewards import (
    COLLISION_RADIUS,
    GOAL_RADIUS,
    OBSTACLE_RADIUS,
    coefficients,
    measure,
    rewards,
)

FIELD_X = (50.0, 750.0)
FIELD_Y = (50.0, 650.0)
TURN = 2 * math.pi

# x, y, speed, heading of an agent at the start of an episode: lowest and highest value
LEADER_START = ((300.0, 500.0, 10.0, 0.0), (400.0, 550.0, 20.0, TURN))
FOLLOWER_START = ((400.0, 500.0, 20.0, 0.0), (500.0, 550.0, 30.0, TURN))
# obstacle x, y, goal x, y
SCENE_START = ((350.0, 400.0, 300.0, 150.0), (350.0, 450.0, 500.0, 200.0))
# gain of acceleration, gain of turn, lowest and highest speed
LEADER_LIMITS = (0.3, 0.6, 10.0, 20.0)
FOLLOWER_LIMITS = (0.6, 1.2, 10.0, 40.0)
# x, y, speed, heading in an observation
SCALE = (1 / 1000, 1 / 1000, 1 / 30, 1 / TURN)


class UavEnvironment:
    """Steps E simulations together, without a loop and without waiting for the device.

    State: bodies [E, N, 4] (x, y, speed, heading), the leader first; scenes [E, 4] (obstacle x,
    y, goal x, y); sums over the running episodes [E, 4] (steps, leader's return, formation,
    strict formation). With several or moving obstacles, these are rows [E, C, 4] of ``Obstacles``
    in place of the scene's obstacle. ``obstacle_positions`` [E, C, 2] are those that the last
    step was judged with. One step is one unit of time: acceleration and turn first,
    then the move with the new speed and heading; y grows against sin(heading). Obstacles move at
    the same time. New episodes are drawn for every simulation at every step and taken where one
    ended, so that the random numbers which are consumed do not depend on what happens.
    """

    action_size = ACTION_SIZE

    def __init__(
        self,
        config: UavConfig,
        envs: int,
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        """Starts ``envs`` episodes.

        Args:
            config: the simulator's settings.
            envs: number of simulations E.
            device: where the tensors live.
            generator: draws the episodes; on the same device.
        """
        self.agents = 1 + config.followers
        self.observation_size = config.observation_size
        self._envs = envs
        self._device = device
        self._generator = generator
        self._coefficients = coefficients(config.reward)
        self.episode_limit = config.episode_limit
        self._legacy_timing = config.legacy_timing

        def table(
            leader: tuple[float, ...],
            follower: tuple[float, ...],
            *rest: tuple[float, ...],
        ) -> Tensor:
            return torch.tensor(
                [leader, *[follower] * config.followers, *rest],
                dtype=torch.float32,
                device=device,
            )

        self._start_low = table(
            LEADER_START[0], FOLLOWER_START[0], SCENE_START[0]
        )
        self._start_span = (
            table(LEADER_START[1], FOLLOWER_START[1], SCENE_START[1])
            - self._start_low
        )
        limits = table(LEADER_LIMITS, FOLLOWER_LIMITS)
        self._gain = limits[:, :2]
        self._slowest = limits[:, 2]
        self._fastest = limits[:, 3]
        self._scale = torch.tensor(SCALE, dtype=torch.float32, device=device)
        self._random_obstacles: Obstacles | None = None
        if config.obstacles.are_random:
            self._random_obstacles = Obstacles(
                config.obstacles, (SCALE[0], SCALE[2]), device, generator
            )
        self._failed_starts: FailedStarts | None = None
        self.reset()

    def repeat_failures(self, share: float) -> None:
        """Makes a share of new episodes start like one that failed; call it before the first
        step.
        """
        start = torch.cat(
            [self._bodies, self._scene.unsqueeze(1), self._obstacles], 1
        )
        self._failed_starts = FailedStarts(share, start, self._generator)

    def reset(self) -> Tensor:
        """Starts new episodes everywhere and returns their observations [E, N, o]."""
        start = self._draw_starts()
        self._bodies, self._scene, self._obstacles = self._split(start)
        self._sums = torch.zeros(self._envs, 4, device=self._device)
        self.obstacle_positions = self._positions(self._scene, self._obstacles)
        return self._observe(self._bodies, self._scene, self._obstacles)

    def step(self, action: Tensor) -> EnvironmentStep:
        """Applies accelerations and turns [E, N, 2]; values beyond [-1, 1] count as -1 or 1."""
        moved = self._move(action)
        moved_obstacles = self._obstacles
        if self._random_obstacles is not None:
            moved_obstacles = self._random_obstacles.move(self._obstacles)
        measured_bodies = self._bodies if self._legacy_timing else moved
        measured_obstacles = (
            self._obstacles if self._legacy_timing else moved_obstacles
        )
        self.obstacle_positions = self._positions(
            self._scene, measured_obstacles
        )
        geometry = measure(
            measured_bodies, self._scene[:, 2:], self.obstacle_positions
        )
        reward = rewards(geometry, self._coefficients)
        success = geometry.goal_distance[:, 0] < GOAL_RADIUS
        collision = geometry.obstacle_distance[:, 0] < COLLISION_RADIUS
        terminated = success | collision

        ones = torch.ones_like(reward[:, 0])
        in_formation = geometry.in_formation
        sums = self._sums + torch.stack(
            [
                ones,
                reward[:, 0],
                in_formation.float().mean(1),
                in_formation.all(1).float(),
            ],
            1,
        )
        steps = sums[:, 0]
        truncated = (steps >= self.episode_limit) & ~terminated
        done = terminated | truncated
        outcome = torch.stack(
            [ones, success, collision, truncated, steps * success], 1
        )
        rates = sums[:, 2:] / steps.unsqueeze(1)
        episodes = torch.cat(
            [outcome, sums[:, 1:2], rates], 1
        ) * done.unsqueeze(1)

        # New starts are sampled for all simulations: the random numbers that are consumed must
        # not depend on which episodes end.
        next_observation = self._observe(
            measured_bodies, self._scene, measured_obstacles
        )
        start = self._draw_starts()
        if self._failed_starts is not None:
            start = self._failed_starts.replace(start)
            self._failed_starts.end(done, done & ~success, start)
        bodies, scene, obstacles = self._split(start)
        is_done = done.view(-1, 1, 1)
        observation = torch.where(
            is_done, self._observe(bodies, scene, obstacles), next_observation
        )
        # In place, because a captured step reads its state where it was.
        torch.where(is_done, bodies, moved, out=self._bodies)
        torch.where(is_done[:, 0], scene, self._scene, out=self._scene)
        torch.where(is_done, obstacles, moved_obstacles, out=self._obstacles)
        torch.mul(sums, ~is_done[:, 0], out=self._sums)
        return EnvironmentStep(
            observation,
            next_observation,
            reward,
            terminated,
            truncated,
            episodes,
        )

    def _draw_starts(self) -> Tensor:
        """Returns uniformly distributed bodies, followed by the scene and by obstacles,
        [E, N + 1 + C, 4].
        """
        rows, columns = self._start_low.shape
        obstacles = self._random_obstacles
        count = 0 if obstacles is None else obstacles.count
        uniform = torch.rand(
            (self._envs, rows + count, columns),
            generator=self._generator,
            dtype=torch.float32,
            device=self._device,
        )
        start = torch.addcmul(
            self._start_low, uniform[:, :rows], self._start_span
        )
        if obstacles is None:
            return start
        return torch.cat([start, obstacles.start(uniform[:, rows:])], 1)

    def _split(self, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns bodies [E, N, 4], scenes [E, 4] and obstacles [E, C, 4] of starts."""
        agents = self.agents
        return start[:, :agents], start[:, agents], start[:, agents + 1 :]

    def _positions(self, scene: Tensor, obstacles: Tensor) -> Tensor:
        """Returns the positions of all obstacles, [E, C, 2], which a step does not change."""
        if self._random_obstacles is None:
            return scene[:, None, :2].clone()
        return obstacles[..., :2].clone()

    def _move(self, action: Tensor) -> Tensor:
        x, y, speed, heading = self._bodies.unbind(-1)
        acceleration, rotation = (
            action.float().clamp(-1, 1) * self._gain
        ).unbind(-1)
        speed = torch.clamp(speed + acceleration, self._slowest, self._fastest)
        # Rounding can make a heading just below 0 a full turn, which is equivalent to 0.
        heading = torch.remainder(heading + rotation, TURN)
        x = torch.addcmul(x, speed, heading.cos()).clamp(*FIELD_X)
        y = torch.addcmul(y, speed, heading.sin(), value=-1).clamp(*FIELD_Y)
        return torch.stack([x, y, speed, heading], -1)

    def _observe(
        self, bodies: Tensor, scene: Tensor, obstacles: Tensor
    ) -> Tensor:
        """Returns observations [E, N, o] of bodies [E, N, 4] in scenes [E, 4] with obstacles
        [E, C, 4].
        """
        scaled = bodies * self._scale
        positions = self._positions(scene, obstacles)
        to_obstacle = bodies[:, :1, :2] - positions
        distance = torch.hypot(to_obstacle[..., 0], to_obstacle[..., 1])
        warning = (distance < OBSTACLE_RADIUS).any(1, keepdim=True)
        # The leader observes the goal and an obstacle in sight, its followers observe the leader.
        goal_and_obstacle = [scene[:, 2:] * SCALE[0], warning]
        leader_sees = torch.cat(goal_and_obstacle, 1).unsqueeze(1)
        follower_sees = scaled[:, :1, :3].expand(-1, self.agents - 1, -1)
        numbers = [scaled, torch.cat([leader_sees, follower_sees], 1)]
        if self._random_obstacles is not None:
            numbers.append(self._random_obstacles.observe(bodies, obstacles))
        return torch.cat(numbers, -1)

    def summarise(self, total: list[float]) -> dict[str, float]:
        """Metrics of finished episodes.

        Every rate is first taken over the steps of one episode and then averaged over episodes,
        so a long episode counts as much as a short one.

        Args:
            total: sum of rows of ``EnvironmentStep.episodes``, at least one episode.

        Returns:
            ``success_rate``, ``collision_rate``, ``timeout_rate``: shares of the episodes.
            ``steps_to_goal``: mean over the successful episodes; the episode limit if there is
            none. ``return``: mean of the leader's undiscounted return. ``formation_rate``: share
            of (step, follower) pairs with the follower within 50 of the leader.
            ``formation_strict``: share of steps with all followers within 50 of the leader.
        """
        (
            episodes,
            success,
            collision,
            timeout,
            steps,
            leader_return,
            formation,
            strict,
        ) = total
        return {
            "success_rate": success / episodes,
            "collision_rate": collision / episodes,
            "timeout_rate": timeout / episodes,
            "steps_to_goal": steps / success
            if success
            else float(self.episode_limit),
            "return": leader_return / episodes,
            "formation_rate": formation / episodes,
            "formation_strict": strict / episodes,
        }

    def state_dict(self) -> State:
        """Returns bodies, scenes, sums over the running episodes, obstacles that are not the
        scene's, and starts of failed episodes.
        """
        state: State = {
            "bodies": self._bodies.clone(),
            "scene": self._scene.clone(),
            "sums": self._sums.clone(),
        }
        if self._random_obstacles is not None:
            state["obstacles"] = self._obstacles.clone()
        if self._failed_starts is not None:
            state["failed_starts"] = self._failed_starts.state_dict()
        return state

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned; any number of simulations."""
        # Copies, because a step changes them in place.
        self._bodies, self._scene, self._sums = (
            state[key].to(self._device, copy=True)
            for key in ("bodies", "scene", "sums")
        )
        self._envs = len(self._bodies)
        self._obstacles = self._bodies[:, :0]
        if self._random_obstacles is not None:
            self._obstacles = state["obstacles"].to(self._device, copy=True)
        self.obstacle_positions = self._positions(self._scene, self._obstacles)
        if self._failed_starts is not None:
            self._failed_starts.load_state_dict(state["failed_starts"])
