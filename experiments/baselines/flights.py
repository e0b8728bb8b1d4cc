"""The scripted pilot of experiments/marl_learning on the task of the flagship."""

import sys
import time
from pathlib import Path

from results import Result

sys.path.append(str(Path(__file__).parents[1] / "marl_learning"))
import pilot

FOLLOWERS = 3
FIRST_SEED = 1_000_000


def measure(seeds):
    """Returns the metrics of 2,000 flights for each seed of their starts."""
    by_metric = {}
    for seed in seeds:
        started = time.perf_counter()
        metrics = pilot.fly(pilot.steer, FOLLOWERS, FIRST_SEED + seed)
        seconds = time.perf_counter() - started
        for metric, value in metrics.items():
            by_metric.setdefault(metric, {})[seed] = value
    for metric, values in by_metric.items():
        yield Result("marl_phase2, marl_phase3", "scripted pilot", metric, values, seconds)
