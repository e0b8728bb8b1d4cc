"""Measures what a process holds, and how long an update takes, with parameters that are divided among processes.

    python experiments/scale/fsdp.py          # measures what fsdp.jsonl does not have
    python experiments/scale/fsdp.py --table  # writes fsdp.md

Each repetition trains one recipe in new processes, without ``fsdp`` and with it in turn. Memory is the growth of a
process from before the pipeline to its largest size in the updates (``VmHWM``), and what parameters, gradients and
moments take after them. For it, glibc returns every freed tensor to the system; seconds are measured without that.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from runner.distributed.process_group import ProcessGroup
from runner.plugin.registry import Registry
from runner.proof.ratios import ratio
from runner.recipe.loader import find, load
from runner.system.tensor_trees import nbytes, tensors
from runner.training.pipeline import assemble
from runner.training.step import Step

HERE = Path(__file__).parent
RESULTS, TABLE = HERE / "fsdp.jsonl", HERE / "fsdp.md"
REPETITIONS = {"memory": 1, "speed": 7}
"""By what is measured; memory is nearly the same every time."""
TIMED = (("0.8 million", 2), ("19 million", 2))
"""Sizes and processes whose updates are timed: as many processes as there are cores."""
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""Settings of glibc under which freed memory no longer counts as that of the process."""
UPDATES = 6
COUNTS = (2, 4)
RECIPE = "shakespeare_gpt"
SIZES = {
    "0.8 million": (),
    "19 million": ("model.width=512", "model.layers=6", "model.heads=8"),
    "57 million": ("model.width=768", "model.layers=8", "model.heads=8"),
}
"""Settings of the language model, by about how many parameters it has."""
COMMON = (
    "device=cpu",
    "data.context=64",
    "train.batch_size=8",
    "model.dropout=0",
    "optimization.compile=off",
    "optimization.heap_retention=off",
)
VARIANTS = {"data parallel": (), "fsdp": ("optimization.fsdp=on",)}


def largest_size() -> int:
    """Returns the largest size of this process so far, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) * 1024


def forget_largest_size() -> None:
    """Lets ``largest_size`` start from the present size."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def trained(rank: int, count: int, sets: tuple[str, ...], folder: str) -> None:
    """Trains in one of several processes, and writes what was measured."""
    torch.set_num_threads(1)
    group = ProcessGroup(dist.FileStore(f"{folder}/store", count), rank, count)
    group.connect("cpu", 600)
    registry = Registry()
    recipe = load(find(RECIPE), [*COMMON, *sets], registry)
    forget_largest_size()
    before = largest_size()
    pipeline = assemble(recipe, registry.files, processes=group)
    step = Step(pipeline)
    seconds = []
    for _ in range(UPDATES):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    peak = largest_size() - before
    learner = pipeline.learner
    held = {
        "parameters": list(learner.module.parameters()),
        "gradients": [parameter.grad for parameter in learner.module.parameters()],
        "moments": [optimizer.state_dict()["state"] for _, optimizer in learner.optimizers()],
    }
    sharding = learner.sharding
    bytes_held = {
        name: sum(nbytes(each if sharding is None else sharding.part_of(each)) for each in tensors(tree))
        for name, tree in held.items()
    }
    result = {
        "peak": peak,
        "held": bytes_held,
        "parameters": sum(parameter.numel() for parameter in learner.module.parameters()),
        # The first update allocates and connects.
        "seconds": seconds[1:],
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measured(count: int, sets: tuple[str, ...], variables: dict[str, str]) -> list[dict[str, Any]]:
    """Returns what every process has measured, with these variables of the environment."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, variables):
        mp.spawn(trained, args=(count, sets, folder), nprocs=count)
        return [json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(count)]


def measure() -> None:
    """Measures what is missing, variants in turn."""
    known = {tuple(row["key"]) for row in read()}
    for quantity, repetitions in REPETITIONS.items():
        variables = RETURNING if quantity == "memory" else {}
        for repetition, size, count in product(range(repetitions), SIZES, COUNTS):
            variants = list(VARIANTS) if repetition % 2 else list(VARIANTS)[::-1]
            for variant in variants:
                key = quantity, size, count, variant, repetition
                if key in known or (quantity == "speed" and (size, count) not in TIMED):
                    continue
                ranks = measured(count, (*SIZES[size], *VARIANTS[variant]), variables)
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "ranks": ranks}) + "\n")
                print(key, f"{peak_of(ranks) / 2**20:.0f} MiB, {seconds_of(ranks):.3f} s", flush=True)


def read() -> list[dict[str, Any]]:
    """Returns all results."""
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the page."""
    settings = ", ".join(f"`{each}`" for each in COMMON)
    lines = [
        "# What a process holds when parameters are divided",
        "",
        f"Written by `fsdp.py` from `fsdp.jsonl`: `{RECIPE}` with {settings}, on processes of one machine with two "
        "cores, one thread each, gloo. MiB of the largest process. *State* is what parameters, gradients and moments "
        "take between two updates; *peak* the growth of the process from before the model is built to its largest "
        f"size in the first {UPDATES} updates, with activations. Speeds are of {REPETITIONS['speed']} pairs of "
        "trainings (95 % interval).",
        "",
        "| parameters | processes | state, without | state, with fsdp | peak, without | peak, with fsdp | "
        "speed with fsdp |",
        "|---|---|---|---|---|---|---|",
    ]
    for size, count in product(SIZES, COUNTS):
        memory = [ranks_of(rows, "memory", size, count, variant) for variant in VARIANTS]
        speeds = [ranks_of(rows, "speed", size, count, variant) for variant in VARIANTS]
        if not all(memory):
            continue
        cells = [f"{memory[0][0][0]['parameters'] / 1e6:,.1f} million", str(count)]
        for quantity in (state_of, peak_of):
            cells += [f"{median(map(quantity, ranks)) / 2**20:,.0f}" for ranks in memory]
        pairs = list(zip(*speeds, strict=False))
        is_measured = len(pairs) > 2
        times = [[seconds_of(pair[side]) for pair in pairs] for side in (0, 1)]
        cells.append(str(ratio(*times)) if is_measured else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ranks_of(rows: list[dict[str, Any]], *key: Any) -> list[list[dict[str, Any]]]:
    """Returns the results of all repetitions of a measurement, by process."""
    return [row["ranks"] for row in rows if tuple(row["key"][:-1]) == key]


def state_of(ranks: list[dict[str, Any]]) -> float:
    """Returns the bytes of parameters, gradients and moments in the process with the most."""
    return max(sum(rank["held"].values()) for rank in ranks)


def peak_of(ranks: list[dict[str, Any]]) -> float:
    """Returns the growth of the process that grew most, in bytes."""
    return max(rank["peak"] for rank in ranks)


def seconds_of(ranks: list[dict[str, Any]]) -> float:
    """Returns the median seconds of an update."""
    return median(ranks[0]["seconds"])


def main() -> None:
    """Measures, or writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only write the page")
    if not parser.parse_args().table:
        measure()
    TABLE.write_text(table(read()), encoding="utf-8")


if __name__ == "__main__":
    main()
