"""Training steps with and without single stages on a GPU, in turns: time and peak memory.

    python experiments/gpu/pairs.py [NAME ...] [--rounds 8] [--updates 20]

Both sides of a pair are in one process, and see batches of their own. Prints one JSON object, with a
row for a pair as soon as it is known on the error output.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).parent))

from gpt import in_turns

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.training.pipeline import assemble
from runner.training.step import Step

WARM_UP = 5


class Pair(NamedTuple):
    """A recipe without and with a change.

    Attributes:
        recipe: Name of the recipe.
        settings: Settings of both sides.
        change: Further settings of one side.
    """

    recipe: str
    settings: tuple[str, ...]
    change: tuple[str, ...]


GPT = (
    "data.synthetic=true", "data.context=512", "model={layers: 8, width: 512, heads: 8}", "train.batch_size=32",
    "optimization.compile=off",
)  # fmt: skip
FLIGHTS = ("data.warmup=200",)
HOST_REPLAY = (*FLIGHTS, "data.replay={kind: uniform, device: cpu}")
CLOUDS = ("data.synthetic=true",)
PAIRS = {
    "bf16": Pair("shakespeare_gpt", (*GPT, "optimization.amp=off"), ("optimization.amp={dtype: bf16}",)),
    "fused optimizer": Pair(
        "shakespeare_gpt", (*GPT, "optimization.fused_optimizer=off"), ("optimization.fused_optimizer=on",)
    ),
    "activation offload": Pair("shakespeare_gpt", GPT, ("optimization.activation_offload=on",)),
    "activation checkpointing": Pair("shakespeare_gpt", GPT, ("optimization.activation_checkpointing=on",)),
    "accumulation of 4 parts": Pair("shakespeare_gpt", GPT, ("optimization.gradient_accumulation={micro_batch: 8}",)),
    "asynchronous transfer": Pair("marl_phase1", HOST_REPLAY, ("optimization.async_transfer={depth: 2}",)),
    "stacked agents": Pair("marl_phase1", FLIGHTS, ("optimization.stacked_agents=on",)),
    "graph of an update": Pair("marl_phase2", FLIGHTS, ("optimization.cuda_graph=on",)),
    "graph of an iteration": Pair("marl_phase2", FLIGHTS, ("optimization.cuda_graph={scope: iteration}",)),
    "channels last": Pair("conv_classifier", (), ("optimization.channels_last=on",)),
    "grasps in bf16": Pair("grasp_diffusion", CLOUDS, ("optimization.amp={dtype: bf16}",)),
}


def built(recipe: str, settings: tuple[str, ...]) -> tuple[Callable[[], Any], float]:
    """Returns a training step, and the peak of memory that the training takes in MiB."""
    before = torch.cuda.memory_allocated()
    step = Step(assemble(load(recipe, settings, Registry())))

    def update() -> None:
        while step() is None:
            pass

    for _ in range(WARM_UP):
        update()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    update()
    torch.cuda.synchronize()
    return update, (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(pair: Pair, rounds: int, updates: int) -> dict[str, Any]:
    """Returns time and memory of both sides, and the ratio without / with the change."""
    started = time.perf_counter()
    sides = {
        "without": built(pair.recipe, pair.settings),
        "with": built(pair.recipe, (*pair.settings, *pair.change)),
    }
    times = in_turns({name: step for name, (step, _) in sides.items()}, rounds, updates)
    ratios = [one / other for one, other in zip(times["without"], times["with"], strict=True)]
    memory = {name: peak for name, (_, peak) in sides.items()}
    return {
        "recipe": pair.recipe,
        "settings": list(pair.settings),
        "change": list(pair.change),
        "ms": {name: round(statistics.median(values), 3) for name, values in times.items()},
        "speed": [round(value, 3) for value in (statistics.median(ratios), min(ratios), max(ratios))],
        "mib": {name: round(peak, 1) for name, peak in memory.items()},
        "memory": round(memory["with"] / memory["without"], 3),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    """Measures the pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="names of pairs; all unless given")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--updates", type=int, default=20)
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    for name in options.names or PAIRS:
        try:
            rows[name] = measure(PAIRS[name], options.rounds, options.updates)
        except Exception as error:  # the others are measured in any case
            rows[name] = {"problem": f"{type(error).__name__}: {error}"}
        print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
