"""The scripted pilots of experiments/marl_learning on the task of the flagship, and with moving obstacles."""

import sys
import time
from pathlib import Path

from results import Result

sys.path.append(str(Path(__file__).parents[1] / "marl_learning"))
import pilot

from runner.plugins.marl.uav.config import ObstaclesConfig

RECIPES = "marl_phase2, marl_phase3"
FOLLOWERS = 3
FIRST_SEED = 1_000_000
COUNT = pilot.OBSTACLES.count
TURN = pilot.OBSTACLES.turn
SPEEDS = (0, 5, 10, 20)
"""Speeds of the obstacles; a leader flies 10 to 20."""
METRICS = ("success_rate", "collision_rate", "steps_to_goal", "formation_rate")
"""Metrics that are reported with moving obstacles."""


def measure(seeds):
    """Returns the metrics of 2,000 flights for each seed of their starts."""
    yield from measure_pilots(RECIPES, ObstaclesConfig(), seeds)
    for speed in SPEEDS:
        obstacles = ObstaclesConfig(count=COUNT, speed=speed, turn=TURN if speed else 0)
        task = f"{RECIPES} data.obstacles={{count: {COUNT}, speed: {speed}, turn: {obstacles.turn:g}}}"
        yield from measure_pilots(task, obstacles, seeds, METRICS)


def measure_pilots(task, obstacles, seeds, metrics=None):
    """Returns metrics of all pilots for a task, all metrics by default."""
    for name, policy in pilot.pilots_for(obstacles).items():
        by_metric = {}
        for seed in seeds:
            started = time.perf_counter()
            flights = pilot.fly(policy, FOLLOWERS, FIRST_SEED + seed, obstacles)
            seconds = time.perf_counter() - started
            for metric in metrics or flights:
                by_metric.setdefault(metric, {})[seed] = flights[metric]
        for metric, values in by_metric.items():
            yield Result(task, name, metric, values, seconds)
