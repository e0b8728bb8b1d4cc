"""Measures what replay costs at several capacities: sample and update of 256 transitions from full buffers.

All variants are measured in turn, round after round, so that whatever else the machine does meets all of them. A turn
gives the median of some single cycles, which leaves out those that another process interrupted. The figure is the
median over turns; a capacity's ratio is the median of the ratios within a round.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from runner.plugins.marl.replay.buffer import Replay
from runner.plugins.marl.replay.build import make_replay
from runner.plugins.marl.replay.config import PrioritizedConfig, UniformConfig
from runner.system.hardware import hardware

AGENTS, OBSERVATION, ACTION = 4, 7, 2
SHAPES = {
    "observation": (AGENTS, OBSERVATION),
    "action": (AGENTS, ACTION),
    "reward": (AGENTS,),
    "next_observation": (AGENTS, OBSERVATION),
    "terminated": (),
}
CAPACITIES = (20_000, 200_000, 1_000_000)
BATCH = 256
CHUNK = 10_000


def full_buffer(config: UniformConfig | PrioritizedConfig, generator: torch.Generator) -> Replay:
    replay = make_replay(config, SHAPES, torch.device("cpu"), generator)
    for _ in range(0, config.capacity, CHUNK):
        index = replay.add({name: torch.randn(CHUNK, *shape) for name, shape in SHAPES.items()})
        replay.update_priorities(index, torch.randn(CHUNK) * 10)
    return replay


def microseconds_per_cycle(replay: Replay, errors: torch.Tensor, cycles: int) -> float:
    seconds = []
    for _ in range(cycles):
        started = time.perf_counter()
        batch = replay.sample(BATCH, 0.5)
        replay.update_priorities(batch["index"], errors)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e6


def measure(rounds: int, cycles: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    configs = [config(capacity=c) for config in (UniformConfig, PrioritizedConfig) for c in CAPACITIES]
    buffers = [full_buffer(config, generator) for config in configs]
    times: list[list[float]] = [[] for _ in configs]
    for turn in range(-rounds // 10, rounds):  # a tenth more to warm up
        order = range(len(buffers)) if turn % 2 else reversed(range(len(buffers)))
        for i in order:
            errors = torch.randn(BATCH) * 10
            microseconds = microseconds_per_cycle(buffers[i], errors, cycles)
            if turn >= 0:
                times[i].append(microseconds)

    results = []
    for i, config in enumerate(configs):
        low, median, high = statistics.quantiles(times[i], n=4)
        base = times[i - i % len(CAPACITIES)]
        ratio = statistics.median(own / first for own, first in zip(times[i], base, strict=True))
        results.append(
            {
                "kind": config.kind,
                "capacity": config.capacity,
                "median_us": round(median, 1),
                "quartiles_us": [round(low, 1), round(high, 1)],
                "ratio_to_smallest": round(ratio, 3),
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--cycles", type=int, default=30, help="samples and updates in a row in one turn")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    results = measure(arguments.rounds, arguments.cycles)
    report = {
        "batch": BATCH,
        "shapes": SHAPES,
        "rounds": arguments.rounds,
        "cycles": arguments.cycles,
        "torch": torch.__version__,
        "hardware": hardware(),
        "load_average": psutil.getloadavg()[0],
        "results": results,
    }
    arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print("| replay | capacity | median, us | quartiles, us | ratio |")
    print("|---|---|---|---|---|")
    for row in results:
        low, high = row["quartiles_us"]
        print(
            f"| {row['kind']} | {row['capacity']:,} | {row['median_us']:.0f} | {low:.0f} to {high:.0f} "
            f"| {row['ratio_to_smallest']:.2f} |"
        )


if __name__ == "__main__":
    main()
