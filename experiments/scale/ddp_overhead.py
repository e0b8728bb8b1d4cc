"""Compares an update on several processes with one of a plain loop with torch's DistributedDataParallel.

    python experiments/scale/ddp_overhead.py          # measures what ddp_overhead.jsonl does not have
    python experiments/scale/ddp_overhead.py --table  # writes ddp_overhead.md

The plain loop draws only the samples of its process, computes their mean loss, and steps the same optimizer; it logs
nothing. Both take turns in the same processes, which exchange gradients by gloo, with one thread each. A third variant
is the plain loop again. In separate rounds, every operation in which all processes take part is timed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runner.distributed.data_parallel import DataParallel
from runner.distributed.process_group import ProcessGroup
from runner.plugin.learner import GradientLearner
from runner.plugin.registry import Registry
from runner.proof.ratios import ratio
from runner.recipe.loader import find, load
from runner.training.pipeline import assemble
from runner.training.step import Step

HERE = Path(__file__).parent
RESULTS, TABLE = HERE / "ddp_overhead.jsonl", HERE / "ddp_overhead.md"
ROUNDS = 60
UPDATES = 8
"""Updates of a variant in each round."""
BATCH = 64
COUNTS = (2, 4)
RECIPES = {
    "digits_classifier": (),
    "shakespeare_gpt": ("model.layers=2", "model.width=64", "model.heads=4", "data.context=64"),
}
VARIANTS = ("plain", "plain again", "runner")


class LossOfLearner(nn.Module):
    """Mean loss of a learner as a module, whose parameters DistributedDataParallel finds."""

    def __init__(self, learner: GradientLearner) -> None:
        super().__init__()
        self.module = learner.module
        self.learner = [learner]

    def forward(self, batch: Any, noise: Any, progress: Any) -> Tensor:
        """Returns the mean loss of a batch, a scalar."""
        loss = self.learner[0].loss(batch, noise, progress)
        return loss.sum / loss.count


def recipe_of(name: str, batch_size: int) -> Any:
    """Returns a recipe without stages."""
    sets = ["device=cpu", *RECIPES[name], f"train.batch_size={batch_size}"]
    recipe = load(find(name), sets, Registry())
    off = [f"optimization.{kind}=off" for kind in recipe.stages]
    return load(find(name), [*sets, *off], Registry())


def plain_loop(name: str, rank: int, count: int) -> Callable[[], None]:
    """Returns the update of a plain loop, on the samples of a process."""
    recipe = recipe_of(name, BATCH // count)
    torch.manual_seed(recipe.seed)
    pipeline = assemble(replace(recipe, seed=recipe.seed + rank), Registry().files)
    learner: Any = pipeline.learner
    source = pipeline.source
    model = DistributedDataParallel(LossOfLearner(learner))
    ((_, optimizer),) = learner.optimizers()
    progress = pipeline.progress
    generator = pipeline.context.generator("noise")

    def update() -> None:
        batch = source.draw(BATCH // count, progress)
        optimizer.zero_grad(set_to_none=True)
        model(batch, learner.noise(batch, generator), progress).backward()
        optimizer.step()

    return update


def measure(rank: int, name: str, count: int, folder: str) -> None:
    """Measures all variants of a recipe; the first process records the result."""
    torch.set_num_threads(1)
    group = ProcessGroup(dist.FileStore(f"{folder}/store", count), rank, count)
    group.connect("cpu", 300)
    recipe = recipe_of(name, BATCH)
    torch.manual_seed(recipe.seed)
    updates: dict[str, Callable[[], Any]] = {
        "plain": plain_loop(name, rank, count),
        "plain again": plain_loop(name, rank, count),
        "runner": Step(assemble(recipe, Registry().files, processes=group)),
    }
    for update in updates.values():
        for _ in range(4 * UPDATES):
            update()
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in range(ROUNDS):
        start = number % len(VARIANTS)
        for variant in VARIANTS[start:] + VARIANTS[:start]:
            dist.barrier()
            started = time.perf_counter()
            for _ in range(UPDATES):
                updates[variant]()
            dist.barrier()
            seconds[variant].append((time.perf_counter() - started) / UPDATES)
    with timed_operations() as parts:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(ROUNDS):
            updates["runner"]()
        dist.barrier()
        parts["all"].append(time.perf_counter() - started)
    if rank:
        return
    operations = {part: [len(times) / ROUNDS, 1e3 * sum(times) / ROUNDS] for part, times in parts.items()}
    record({"recipe": name, "processes": count, "seconds": seconds, "operations": operations})


@contextmanager
def timed_operations() -> Iterator[dict[str, list[float]]]:
    """Records the seconds of operations of all processes inside the ``with``, by what they are for."""
    times: dict[str, list[float]] = defaultdict(list)
    purposes = {
        (DataParallel, "total_count"): "counts of losses",
        (DataParallel, "sum_gradients"): "gradients",
        (DataParallel, "_equalize_buffers"): "buffers",
        (DataParallel, "_added_up"): "results and signals",
        (DataParallel, "_begin"): "comparison of parameters",
    }
    methods = {(owner, method): getattr(owner, method) for owner, method in purposes}
    for (owner, method), purpose in purposes.items():
        setattr(owner, method, timed(methods[owner, method], times[purpose]))
    try:
        yield times
    finally:
        for (owner, method), function in methods.items():
            setattr(owner, method, function)


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Returns a function that records its seconds."""

    def call(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            seconds.append(time.perf_counter() - started)

    return call


def stored() -> list[dict[str, Any]]:
    """Returns the results so far."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def record(entry: dict[str, Any]) -> None:
    """Appends a result."""
    with RESULTS.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def write_table() -> None:
    """Writes the table of all results."""
    lines = [
        "# An update on several processes beside a plain loop with DistributedDataParallel",
        "",
        "Written by `python experiments/scale/ddp_overhead.py`, which describes the method. Two cores, one thread for",
        f"each process, {ROUNDS} rounds of {UPDATES} updates, a batch of {BATCH} samples. Ratios of times with the",
        "95 % interval over rounds.",
        "",
        "| recipe | processes | plain ms | runner ms | runner / plain | plain again / plain |",
        "|---|---|---|---|---|---|",
    ]
    details = ["", "## Where the time of the runner's update goes", ""]
    details += ["| recipe | processes | part | calls per update | ms per update | share |", "|---|---|---|---|---|---|"]
    for entry in stored():
        seconds = entry["seconds"]
        middle = {variant: 1e3 * sorted(times)[len(times) // 2] for variant, times in seconds.items()}
        ratios = [str(ratio(seconds[variant], seconds["plain"])) for variant in ("runner", "plain again")]
        head = [entry["recipe"], str(entry["processes"])]
        milliseconds = [f"{middle[variant]:.2f}" for variant in ("plain", "runner")]
        lines.append(f"| {' | '.join([*head, *milliseconds, *ratios])} |")
        total = entry["operations"]["all"][1]
        for part, (count, milliseconds) in entry["operations"].items():
            if part != "all" and count:
                cells = [*head, part, f"{count:.2g}", f"{milliseconds:.2f}", f"{milliseconds / total:.0%}"]
                details.append(f"| {' | '.join(cells)} |")
    TABLE.write_text("\n".join([*lines, *details]) + "\n")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    known = {(entry["recipe"], entry["processes"]) for entry in stored()}
    for name in RECIPES:
        for count in COUNTS:
            if options.table or (name, count) in known:
                continue
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(measure, (name, count, folder), count)
    write_table()


if __name__ == "__main__":
    main()
