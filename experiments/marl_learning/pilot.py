"""A scripted pilot for the UAV simulator, and flights of any policy from fresh starts.

    python experiments/marl_learning/pilot.py

The pilot sees what the policies observe, and no more. It knows the map: the obstacle is at x = 350.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from runner.plugins.marl.uav.config import UavConfig
from runner.plugins.marl.uav.environment import FOLLOWER_LIMITS, LEADER_LIMITS, SCALE, UavEnvironment

FLIGHTS = 2000


def steer(observation: Tensor) -> Tensor:
    """The scripted policy: observations [E, N, 7] to actions [E, N, 2].

    The leader passes the obstacle on the side that it heads to, then flies to the goal. Followers fly at the leader
    with full speed, and with its speed once they are near it.
    """
    x, y, speed, heading = (observation[..., :4] / torch.tensor(SCALE)).unbind(-1)
    aim_x, aim_y = (observation[..., 4:6] / SCALE[0]).unbind(-1)
    aim_speed = torch.where(torch.hypot(aim_x - x, aim_y - y) > 45, 40.0, speed[:, :1])
    aim_speed[:, 0] = LEADER_LIMITS[3]

    behind = y[:, 0] > 400
    side = torch.where(x[:, 0] + 30 * heading[:, 0].cos() < 340, 300.0, 400.0)
    climb = torch.where((x[:, 0] - 350).abs() < 50, 15.0, 60.0)
    aim_x[:, 0] = torch.where(behind, side, aim_x[:, 0])
    aim_y[:, 0] = torch.where(behind, y[:, 0] - climb, aim_y[:, 0])

    bearing = torch.atan2(y - aim_y, aim_x - x) - heading
    turn = torch.remainder(bearing + math.pi, 2 * math.pi) - math.pi
    gains = torch.tensor([LEADER_LIMITS[:2]] + [FOLLOWER_LIMITS[:2]] * (x.shape[1] - 1))
    action = torch.stack([aim_speed - speed, turn], -1) / gains
    return action.clamp(-1, 1)


@torch.no_grad()
def fly(policy: Callable[[Tensor], Tensor], followers: int, seed: int) -> dict[str, float]:
    """The metrics of ``FLIGHTS`` flights whose starts follow from the seed, each of them counted once."""
    starts = torch.Generator().manual_seed(seed)
    device = torch.device("cpu")
    environment = UavEnvironment(UavConfig(followers=followers), FLIGHTS, device, starts)
    observation = environment.reset()
    running = torch.ones(FLIGHTS, dtype=torch.bool)
    total = torch.zeros(8, dtype=torch.float64)
    while running.any():
        step = environment.step(policy(observation))
        total += (step.episodes * running[:, None]).sum(0, dtype=torch.float64)
        running &= ~(step.terminated | step.truncated)
        observation = step.observation
    return environment.summarise(total.tolist())


if __name__ == "__main__":
    for followers in (1, 2, 3, 4):
        metrics = fly(steer, followers, seed=1_000_000)
        print(followers, {name: round(value, 4) for name, value in metrics.items()})
