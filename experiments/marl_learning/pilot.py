"""Scripted pilots for the UAV simulator, and flights of any policy from fresh starts.

    python experiments/marl_learning/pilot.py

Pilots see what the policies observe, and no more. The map is built in: an obstacle that does not move is at x = 350,
others are in their region.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from runner.plugins.marl.uav.config import OBSERVATION_SIZE, OBSTACLE_SIZE, ObstaclesConfig, UavConfig
from runner.plugins.marl.uav.environment import FOLLOWER_LIMITS, LEADER_LIMITS, SCALE, UavEnvironment
from runner.plugins.marl.uav.obstacles import REGION
from runner.plugins.marl.uav.rewards import COLLISION_RADIUS, GOAL_RADIUS

FLIGHTS = 2000
HEADINGS = 32
"""Headings that the leader compares."""
STEPS_AHEAD = 10
DODGE = 6
"""Steps with a heading; afterwards the leader flies to the goal."""
MARGIN = 40.0
"""Distance to an obstacle below which a heading costs more."""
GROWTH = {True: 0.05, False: 0.2}
"""Growth of this margin in each step ahead, as a share of the obstacle's speed, with and without extrapolation."""
STEPS_LOST = 40.0
"""Cost of a collision in the next step, in steps of the flight."""
FADING = 0.85
"""Factor of this cost for every step later, because obstacles turn."""


def steer(observation: Tensor) -> Tensor:
    """The pilot for one obstacle that does not move: observations [E, N, 7] to actions [E, N, 2].

    The leader passes the obstacle on the side that it heads to, then flies to the goal.
    """
    x, y, _, heading = (observation[:, 0, :4] / torch.tensor(SCALE)).unbind(-1)
    aim_x, aim_y = (observation[:, 0, 4:6] / SCALE[0]).unbind(-1)
    behind = y > 400
    side = torch.where(x + 30 * heading.cos() < 340, 300.0, 400.0)
    climb = torch.where((x - 350).abs() < 50, 15.0, 60.0)
    return follow(observation, torch.where(behind, side, aim_x), torch.where(behind, y - climb, aim_y))


def follow(observation: Tensor, leader_x: Tensor, leader_y: Tensor) -> Tensor:
    """Returns actions [E, N, 2] with which the leader flies to a position, [E] each, and the followers to the leader.

    Followers have full speed, and that of the leader once they are near it.
    """
    x, y, speed, heading = (observation[..., :4] / torch.tensor(SCALE)).unbind(-1)
    aim_x, aim_y = (observation[..., 4:6] / SCALE[0]).unbind(-1)
    aim_speed = torch.where(torch.hypot(aim_x - x, aim_y - y) > 45, 40.0, speed[:, :1])
    aim_speed[:, 0] = LEADER_LIMITS[3]
    aim_x[:, 0] = leader_x
    aim_y[:, 0] = leader_y

    turn = wrap(torch.atan2(y - aim_y, aim_x - x) - heading)
    gains = torch.tensor([LEADER_LIMITS[:2]] + [FOLLOWER_LIMITS[:2]] * (x.shape[1] - 1))
    action = torch.stack([aim_speed - speed, turn], -1) / gains
    return action.clamp(-1, 1)


def evade(observation: Tensor, is_extrapolated: bool) -> Tensor:
    """The pilot for obstacles that it observes: observations [E, N, 7 + 4 K] to actions [E, N, 2].

    The leader simulates ``HEADINGS`` and takes the one with the lowest cost: steps to the goal, and the worst approach
    to an obstacle (a dynamic window, Fox et al. 1997). Obstacles stay where they are, or keep their velocities.
    """
    leader = observation[:, 0]
    x, y, speed, heading = (leader[:, :4] / torch.tensor(SCALE)).unsqueeze(1).unbind(-1)  # [E, 1]
    goal_x, goal_y = (leader[:, 4:6] / SCALE[0]).unsqueeze(1).unbind(-1)
    rows = leader[:, OBSERVATION_SIZE:].unflatten(1, (-1, OBSTACLE_SIZE)).unsqueeze(1)  # [E, 1, K, 4]
    position = rows[..., :2] / SCALE[0] + torch.stack([x, y], -1).unsqueeze(2)
    velocity = rows[..., 2:] / SCALE[2]
    growth = torch.linalg.vector_norm(velocity, dim=-1) * GROWTH[is_extrapolated]
    velocity = velocity * is_extrapolated

    headings = torch.arange(HEADINGS) * (2 * math.pi / HEADINGS)
    start_x, start_y = x, y
    risk = torch.zeros(len(x), HEADINGS)
    needed = torch.full_like(risk, math.inf)
    for step in range(1, STEPS_AHEAD + 1):
        aim = headings if step <= DODGE else torch.atan2(y - goal_y, goal_x - x)
        heading = heading + wrap(aim - heading).clamp(-LEADER_LIMITS[1], LEADER_LIMITS[1])
        speed = (speed + LEADER_LIMITS[0]).clamp(max=LEADER_LIMITS[3])
        x, y = x + speed * heading.cos(), y - speed * heading.sin()
        offset = torch.stack([x, y], -1).unsqueeze(2) - reflect(position + step * velocity)
        distance = torch.hypot(offset[..., 0], offset[..., 1])
        margin = MARGIN + step * growth
        approach = ((margin - distance) / (margin - COLLISION_RADIUS)).amax(-1)
        # An approach after the leader has reached the goal does not count.
        risk = torch.maximum(risk, (needed > step) * FADING ** (step - 1) * approach)
        missing = (torch.hypot(x - goal_x, y - goal_y) - GOAL_RADIUS).clamp(min=0)
        needed = torch.minimum(needed, step + missing / LEADER_LIMITS[3])
    best = headings[(needed + STEPS_LOST * risk).argmin(1)]
    return follow(observation, start_x[:, 0] + 100 * best.cos(), start_y[:, 0] - 100 * best.sin())


def wrap(angle: Tensor) -> Tensor:
    """Returns the angle between -pi and pi."""
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi


def reflect(position: Tensor) -> Tensor:
    """Returns positions [..., 2], reflected at the borders of the obstacles' region."""
    low, high = torch.tensor(REGION)
    return high - (torch.remainder(position - low, 2 * (high - low)) - (high - low)).abs()


PILOTS: dict[str, Callable[[Tensor], Tensor]] = {
    "pilot that observes positions": partial(evade, is_extrapolated=False),
    "pilot that extrapolates velocities": partial(evade, is_extrapolated=True),
}
"""Pilots for several or moving obstacles."""


def pilots_for(obstacles: ObstaclesConfig) -> dict[str, Callable[[Tensor], Tensor]]:
    """Returns the pilots for a task by name."""
    return PILOTS if obstacles.are_random else {"scripted pilot": steer}


@torch.no_grad()
def fly(
    policy: Callable[[Tensor], Tensor], followers: int, seed: int, obstacles: ObstaclesConfig | None = None
) -> dict[str, float]:
    """The metrics of ``FLIGHTS`` flights whose starts follow from the seed, each of them counted once."""
    starts = torch.Generator().manual_seed(seed)
    config = UavConfig(followers=followers, obstacles=obstacles or ObstaclesConfig())
    environment = UavEnvironment(config, FLIGHTS, torch.device("cpu"), starts)
    observation = environment.reset()
    running = torch.ones(FLIGHTS, dtype=torch.bool)
    total = torch.zeros(8, dtype=torch.float64)
    while running.any():
        step = environment.step(policy(observation))
        total += (step.episodes * running[:, None]).sum(0, dtype=torch.float64)
        running &= ~(step.terminated | step.truncated)
        observation = step.observation
    return environment.summarise(total.tolist())


OBSTACLES = ObstaclesConfig(count=12, speed=20, turn=0.1)
"""A task on which the pilots fail sometimes."""

if __name__ == "__main__":
    for followers in (1, 2, 3, 4):
        for obstacles in (ObstaclesConfig(), OBSTACLES):
            for name, policy in pilots_for(obstacles).items():
                metrics = fly(policy, followers, 1_000_000, obstacles)
                print(followers, name, {metric: round(value, 4) for metric, value in metrics.items()})
