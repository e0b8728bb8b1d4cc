"""Reward presets and the reward of every agent from the geometry of a scene."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from .config import RewardConfig

COLLISION_RADIUS = 20.0
OBSTACLE_RADIUS = 40.0
GOAL_RADIUS = 40.0
FORMATION_RADIUS = 50.0
SPEED_TOLERANCE = 1.0
INNER_X = (100.0, 700.0)
INNER_Y = (100.0, 600.0)
"""On these lines and outside them an agent is near the border."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Coefficients of the terms of the reward; ``RewardConfig`` defines each term."""

    collision: float = -500.0
    obstacle: float = -2.0
    border: float = -1.0
    goal: float = 1000.0
    goal_distance: float = -0.02
    formation: float = -0.005
    speed_match: float = 1.0
    step: float = -0.2


PRESETS = {
    "seed": Coefficients(goal_distance=-0.001, formation=-0.001, step=0.0),
    "v0_1": Coefficients(goal_distance=-0.005, formation=-0.001, step=-1.0),
    "v0_2": Coefficients(),
}


def coefficients(config: RewardConfig) -> Coefficients:
    """Returns the preset's coefficients, overridden by those of the recipe."""
    names = [field.name for field in fields(Coefficients)]
    configured = {name: getattr(config, name) for name in names}
    overrides = {
        name: value for name, value in configured.items() if value is not None
    }
    return replace(PRESETS[config.preset], **overrides)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Distances in E scenes with N agents, the leader first; lengths are in units of the field."""

    x: Tensor
    """[E, N]."""
    y: Tensor
    """[E, N]."""
    obstacle_distance: Tensor
    """[E, N]: of every agent to the nearest obstacle."""
    goal_distance: Tensor
    """[E, N]: of every agent to the goal."""
    leader_distance: Tensor
    """[E, N - 1]: of every follower to the leader."""
    in_formation: Tensor
    """[E, N - 1], bool: the follower is within the formation radius of the leader."""
    speed_difference: Tensor
    """[E, N - 1]: of every follower to the leader, without sign."""


def measure(bodies: Tensor, goal: Tensor, obstacles: Tensor) -> Geometry:
    """Measures bodies [E, N, 4] (x, y, speed, heading), with goals [E, 2] and C obstacles [E, C,
    2] in each scene.
    """
    x = bodies[..., 0]
    y = bodies[..., 1]
    goal_x, goal_y = goal.unsqueeze(1).unbind(-1)
    obstacle_x, obstacle_y = obstacles.unsqueeze(1).unbind(-1)
    obstacle_distance = torch.hypot(
        x.unsqueeze(-1) - obstacle_x, y.unsqueeze(-1) - obstacle_y
    )
    leader = bodies[:, :1] - bodies[:, 1:]
    leader_distance = torch.hypot(leader[..., 0], leader[..., 1])
    return Geometry(
        x=x,
        y=y,
        obstacle_distance=obstacle_distance.amin(-1),
        goal_distance=torch.hypot(x - goal_x, y - goal_y),
        leader_distance=leader_distance,
        in_formation=leader_distance < FORMATION_RADIUS,
        speed_difference=leader[..., 2].abs(),
    )


def rewards(geometry: Geometry, coefficients: Coefficients) -> Tensor:
    """Returns the rewards [E, N]: the sum of all terms that apply.

    The formation term of a follower is spared while it is in formation and the leader is nearer
    the goal than it, so a follower that overtakes its leader pays; the leader pays for every
    follower that is out of formation.
    """
    c = coefficients
    near_obstacle = geometry.obstacle_distance < OBSTACLE_RADIUS
    x = geometry.x
    y = geometry.y
    near_border = (
        (x <= INNER_X[0])
        | (x >= INNER_X[1])
        | (y <= INNER_Y[0])
        | (y >= INNER_Y[1])
    )
    shared = c.step + c.obstacle * near_obstacle + c.border * near_border

    distance_penalty = c.formation * geometry.leader_distance
    matched = c.speed_match * (
        geometry.in_formation & (geometry.speed_difference < SPEED_TOLERANCE)
    )
    # A follower in formation pays nothing, unless it is nearer to the goal than its leader.
    behind = geometry.goal_distance[:, :1] < geometry.goal_distance[:, 1:]
    follower = matched + distance_penalty * ~(geometry.in_formation & behind)

    goal_distance = geometry.goal_distance[:, 0]
    obstacle_distance = geometry.obstacle_distance[:, 0]
    leader = torch.where(
        goal_distance < GOAL_RADIUS, c.goal, c.goal_distance * goal_distance
    )
    leader = leader + c.collision * (obstacle_distance < COLLISION_RADIUS)
    leader = leader + (matched + distance_penalty * ~geometry.in_formation).sum(
        1
    )
    return shared + torch.cat([leader.unsqueeze(1), follower], 1)
