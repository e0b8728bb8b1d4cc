"""What the comparisons share: blocks that take turns, and one file with all figures and the machine."""

import argparse
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from runner.ablation.variant_process import Measured
from runner.plugin.registry import Registry
from runner.proof.ratios import ratio
from runner.recipe.loader import load
from runner.system.hardware import hardware
from runner.training.pipeline import Assembly, assemble
from runner.training.step import Drawn

RESULTS = Path(__file__).with_name("results.json")
PACKAGES = ("torch", "torchrl", "tensordict", "benchmarl", "cpprb", "mpe2", "lightning", "transformers",
            "torch_geometric")  # fmt: skip
Step = Callable[[], object]
_own: list[Step] = []
"""The step of this process."""


def take_turns(
    builds: Mapping[str, Callable[[], Step]], reference: str, rounds: int, block_seconds: float
) -> dict[str, dict[str, Any]]:
    """Times steps in blocks that take turns, the order reversed every other round.

    Each step has a process of its own: what one sets for its process, as ``heap_retention`` does, helps no other.

    Returns:
        For every name the milliseconds of a step (median over rounds), and ``reference`` / it with a 95 % interval.
    """
    seconds: dict[str, list[float]] = {name: [] for name in builds}
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin, (build,)))
            for name, build in builds.items()
        }
        counts = {}
        for name, process in processes.items():
            process.submit(_seconds, 10).result()
            counts[name] = max(1, round(5 * block_seconds / process.submit(_seconds, 5).result()))
        for turn in range(rounds):
            for name in list(builds)[:: 1 if turn % 2 else -1]:
                seconds[name].append(processes[name].submit(_seconds, counts[name]).result() / counts[name])
    figures = {}
    for name, taken in seconds.items():
        speed = ratio(seconds[reference], taken)
        figures[name] = {
            "ms": 1e3 * statistics.median(taken),
            "ratio": speed.value,
            "ci95": [speed.low, speed.high],
        }
    return figures


def _begin(build: Callable[[], Step]) -> None:
    _own.append(build())


def _seconds(count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        _own[0]()
    return time.perf_counter() - started


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


def assembled(recipe: str, *sets: str) -> Assembly:
    """A recipe on the CPU."""
    return assemble(load(recipe, ["device=cpu", *sets], Registry()), [])


def draws(pipeline: Assembly) -> Iterator[Drawn]:
    """A few of its batches, over and over."""
    return itertools.cycle(Measured(pipeline).pool())


def ours(recipe: str, *sets: str) -> Step:
    """An update of a recipe."""
    pipeline = assembled(recipe, *sets)
    drawn, step = draws(pipeline), Measured(pipeline).step
    return lambda: step.update(next(drawn))


def beside(part: str, builds: Mapping[str, Callable[[], Step]], reference: str, about: str | None) -> None:
    """A command line: lets steps take turns, prints what they took and keeps it."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rounds", type=int, default=16)
    rounds = parser.parse_args().rounds
    figures = take_turns(builds, reference, rounds, 1.0)
    for name, each in figures.items():
        low, high = each["ci95"]
        print(f"{name:36} {each['ms']:7.1f} ms   {each['ratio']:.2f} [{low:.2f}, {high:.2f}]", flush=True)
    keep(part, f"python experiments/peers/{part}.py --rounds {rounds}", figures)
