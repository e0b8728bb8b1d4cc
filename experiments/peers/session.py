"""What the comparisons share: blocks that take turns, and one file with all figures and the machine."""

import json
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from runner.hardware import hardware
from runner.proof.statistics import ratio

RESULTS = Path(__file__).with_name("results.json")
PACKAGES = ("torch", "torchrl", "tensordict", "benchmarl", "cpprb", "mpe2")


def take_turns(
    steps: Mapping[str, Callable[[], object]], reference: str, rounds: int, block_seconds: float
) -> dict[str, dict[str, Any]]:
    """Times steps in blocks that take turns, the order reversed every other round.

    Returns:
        For every name the milliseconds of a step (median over rounds), and ``reference`` / it with a 95 % interval.
    """
    counts = {}
    for name, step in steps.items():
        for _ in range(10):
            step()
        started = time.perf_counter()
        for _ in range(5):
            step()
        counts[name] = max(1, round(5 * block_seconds / (time.perf_counter() - started)))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            started = time.perf_counter()
            for _ in range(counts[name]):
                steps[name]()
            seconds[name].append((time.perf_counter() - started) / counts[name])
    figures = {}
    for name, taken in seconds.items():
        speed = ratio(seconds[reference], taken)
        figures[name] = {
            "ms": 1e3 * statistics.median(taken),
            "ratio": speed.value,
            "ci95": [speed.low, speed.high],
        }
    return figures


def keep(part: str, command: str, figures: object) -> None:
    """Writes one part of ``results.json``; the others stay."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[part] = {
        "command": command,
        "packages": {name: version(name) for name in PACKAGES if find_spec(name)},
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "figures": figures,
    }
    RESULTS.write_text(json.dumps(known, indent=2) + "\n")
