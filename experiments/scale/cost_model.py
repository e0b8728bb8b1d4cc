"""Predicts from measured parts how many processes still make an update faster.

    RUNNER_DATA=... python experiments/scale/cost_model.py   # measures, writes cost_model.json, .md and .png
    python experiments/scale/cost_model.py --table           # writes the page from cost_model.json

The time of an update of one batch on p processes is that of computing 1/p of the batch, and of adding up gradients and
two small vectors (the counts of losses; results and signals) in a ring, which moves 2 (p - 1) / p times their bytes:

    T(p) = C(B / p) + 3 (p - 1) latency + 2 (p - 1) / p * bytes / bandwidth

C(b) = fixed + b * rate is fitted to updates of one process with batches of different sizes. Latency and bandwidth are
fitted to sums of vectors between processes of this machine; those of other networks are assumptions.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from runner.distributed.process_group import ProcessGroup
from runner.plugin.registry import Registry
from runner.recipe.loader import find, load
from runner.system.hardware import cpu_model
from runner.training.pipeline import assemble
from runner.training.step import Step

HERE = Path(__file__).parent
RESULTS, TABLE, PLOT = (HERE / f"cost_model.{ending}" for ending in ("json", "md", "png"))
SHARES = (1, 2, 4, 8)
"""Parts of a batch whose updates are timed."""
SIZES = (2**8, 2**12, 2**16, 2**20, 2**22)
"""Lengths of the vectors that are added up."""
UPDATES = 20
ROUNDS = 7
PROCESSES = (1, 2, 4, 8, 16, 32, 64)
SMALL_SUMS = 2
"""Sums of an update besides that of the gradients."""


class Network(NamedTuple):
    """What a network needs for a message between neighbours of a ring."""

    name: str
    latency_s: float
    bytes_per_s: float


NETWORKS = (
    Network("1 Gbit/s", 50e-6, 0.118e9),
    Network("10 Gbit/s", 30e-6, 1.18e9),
    Network("100 Gbit/s", 5e-6, 11.8e9),
)
"""Assumed, with the usual share of headers; latencies are those of a data centre."""


class Workload(NamedTuple):
    """A recipe and the batch that its processes share."""

    recipe: str
    batch_size: int
    sets: tuple[str, ...] = ()
    can_train: bool = True
    """Whether the runner trains it on several processes today."""


WORKLOADS = (
    Workload("digits_classifier", 64),
    Workload("shakespeare_gpt", 32),
    Workload("marl_phase2", 128, can_train=False),
)


def step_of(workload: Workload, batch_size: int, group: ProcessGroup | None = None) -> Step:
    """Returns the training step of a recipe with a batch size."""
    sets = ["device=cpu", *workload.sets, f"train.batch_size={batch_size}"]
    recipe = load(find(workload.recipe), sets, Registry())
    if "amp" in recipe.stages:
        recipe = load(find(workload.recipe), [*sets, "optimization.amp=off"], Registry())
    torch.manual_seed(recipe.seed)
    return Step(assemble(recipe, Registry().files, processes=group))


def seconds_of(step: Step) -> float:
    """Returns the median seconds of an update alone, without the drawing of its batch."""
    inputs = step.next()
    for _ in range(3):
        step.update(inputs)
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(UPDATES):
            step.update(inputs)
        times.append((time.perf_counter() - started) / UPDATES)
    return sorted(times)[ROUNDS // 2]


def measure_updates(workload: Workload) -> dict[str, Any]:
    """Returns the times of updates by batch size, and the bytes of the gradients."""
    torch.set_num_threads(1)
    seconds = {}
    size = 0
    for share in SHARES:
        step = step_of(workload, workload.batch_size // share)
        seconds[workload.batch_size // share] = seconds_of(step)
        size = sum(parameter.numel() for _, parameter in step.learner.named_parameters() if parameter.requires_grad)
    return {"seconds": seconds, "gradient_bytes": 4 * size}


def measure_group(rank: int, count: int, folder: str) -> None:
    """Times sums of vectors, and complete updates, of a group of processes."""
    torch.set_num_threads(1)
    group = ProcessGroup(dist.FileStore(f"{folder}/store", count), rank, count)
    group.connect("cpu", 300)
    sums = []
    for size in SIZES:
        vector = torch.ones(size)
        times = []
        for _ in range(40):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(vector)
            times.append(time.perf_counter() - started)
        sums.append([4 * size, sorted(times)[len(times) // 2]])
    updates = {}
    for workload in WORKLOADS:
        if workload.can_train:
            updates[workload.recipe] = seconds_of(step_of(workload, workload.batch_size, group))
    if not rank:
        Path(folder, "result.json").write_text(json.dumps({"sums": sums, "updates": updates}))


def measure() -> dict[str, Any]:
    """Returns all measurements."""
    groups = {}
    for count in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure_group, (count, folder), count)
            groups[count] = json.loads(Path(folder, "result.json").read_text())
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_model(),
        "torch": torch.__version__,
        "updates": {workload.recipe: measure_updates(workload) for workload in WORKLOADS},
        "groups": groups,
    }


def line_of(points: dict[float, float]) -> tuple[float, float]:
    """Returns constant and slope of the line with the smallest relative errors, neither below zero."""
    weights = {x: 1 / y**2 for x, y in points.items()}
    total = sum(weights.values())
    mean_x = sum(weights[x] * x for x in points) / total
    mean_y = sum(weights[x] * y for x, y in points.items()) / total
    covariance = sum(weights[x] * (x - mean_x) * (y - mean_y) for x, y in points.items())
    variance = sum(weights[x] * (x - mean_x) ** 2 for x in points)
    slope = max(0.0, covariance / variance)
    return max(0.0, mean_y - slope * mean_x), slope


def this_machine(groups: dict[str, Any], count: int) -> Network:
    """Returns latency and bandwidth between processes of this machine, for a number of processes."""
    points = {float(size): seconds for size, seconds in groups[str(count)]["sums"]}
    constant, slope = line_of(points)
    # A sum of p processes has 2 (p - 1) messages, which together move 2 (p - 1) / p of the bytes.
    messages = 2 * (count - 1)
    return Network("this machine", constant / messages, messages / count / slope)


def update_seconds(entry: dict[str, Any], batch_size: int, processes: int, network: Network) -> float:
    """Returns the predicted time of an update."""
    fixed, rate = line_of({float(size): seconds for size, seconds in entry["seconds"].items()})
    computation = fixed + rate * batch_size / processes
    if processes == 1:
        return computation
    messages = 2 * (processes - 1)
    latency = (1 + SMALL_SUMS) * messages * network.latency_s
    return computation + latency + messages / processes * entry["gradient_bytes"] / network.bytes_per_s


def write_page(results: dict[str, Any]) -> None:
    """Writes the page and its plot."""
    lines = [
        "# How many processes are worth it?",
        "",
        "Written by `python experiments/scale/cost_model.py`, which describes the model. Measured on this machine "
        f"({results['cpu']}, two cores, torch {results['torch']}, {results['date']}), one thread for each "
        "process; the rest is computed.",
        "",
        "A batch of a fixed size is divided, so every process computes less, and sends all gradients nevertheless.",
        "",
        "| recipe | batch | gradients | update of one process: fixed + for the batch | predicted, measured for two |",
        "|---|---|---|---|---|",
    ]
    machine = this_machine(results["groups"], 2)
    for workload in WORKLOADS:
        entry = results["updates"][workload.recipe]
        fixed, rate = line_of({float(size): seconds for size, seconds in entry["seconds"].items()})
        predicted = 1e3 * update_seconds(entry, workload.batch_size, 2, machine)
        measured = results["groups"]["2"]["updates"].get(workload.recipe)
        beside = f"{predicted:.1f} ms, " + (f"{1e3 * measured:.1f} ms" if measured else "not possible")
        parts = f"{1e3 * fixed:.1f} + {1e3 * rate * workload.batch_size:.1f} ms"
        size = f"{entry['gradient_bytes'] / 2**10:,.0f} KiB"
        lines.append(f"| {workload.recipe} | {workload.batch_size} | {size} | {parts} | {beside} |")
    lines += [
        "",
        "The prediction leaves out what processes wait for each other and compute for the exchange, which is most of "
        "the time of a small model.",
        "",
        f"Two processes of this machine: {1e6 * machine.latency_s:.0f} µs for a message, "
        f"{machine.bytes_per_s / 1e9:.2f} GB/s. "
        "`marl_phase2` has a simulator, which the runner does not divide: its rows are computed.",
        "",
        "## Bytes of an update",
        "",
        "What each process sends in a ring, 2 (p - 1) / p of the gradients: it grows to twice the gradients and not "
        "beyond, while the part of the batch shrinks.",
        "",
        f"| recipe | {' | '.join(f'p = {count}' for count in PROCESSES[1:])} |",
        f"|---|{'---|' * len(PROCESSES[1:])}",
    ]
    for workload in WORKLOADS:
        size = results["updates"][workload.recipe]["gradient_bytes"]
        cells = [f"{2 * (count - 1) / count * size / 2**10:,.0f} KiB" for count in PROCESSES[1:]]
        lines.append(f"| {workload.recipe} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Where it stops paying off",
        "",
        "Predicted speed of an update relative to one process, with one core for each process. *Best*: the number of "
        "processes beyond which an update becomes slower.",
        "",
        f"| recipe | network | {' | '.join(f'p = {count}' for count in PROCESSES[1:])} | best |",
        f"|---|---|{'---|' * len(PROCESSES[1:])}---|",
    ]
    for workload in WORKLOADS:
        for network in (machine, *NETWORKS):
            speeds = speeds_of(results, workload, network)
            best = max(speeds, key=lambda count: speeds[count])
            cells = [f"{speeds[count]:.2f}x" if count in speeds else "-" for count in PROCESSES[1:]]
            lines.append(f"| {workload.recipe} | {network.name} | {' | '.join(cells)} | {best} |")
    lines += [
        "",
        "![Speed against the number of processes](cost_model.png)",
        "",
        "The latency of other networks is assumed: 50, 30 and 5 µs. Gradients are not sent while others are computed, "
        "neither here nor by the runner, so nothing hides the exchange.",
        "",
    ]
    TABLE.write_text("\n".join(lines))
    plot(results, machine)


def speeds_of(results: dict[str, Any], workload: Workload, network: Network) -> dict[int, float]:
    """Returns the predicted speed relative to one process, by number of processes."""
    entry = results["updates"][workload.recipe]
    # Every process needs a sample.
    counts = [count for count in PROCESSES if count <= workload.batch_size]
    seconds = {count: update_seconds(entry, workload.batch_size, count, network) for count in counts}
    return {count: seconds[1] / value for count, value in seconds.items()}


def plot(results: dict[str, Any], machine: Network) -> None:
    """Draws the speeds of all workloads."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(WORKLOADS), figsize=(10, 3.4), sharey=True, layout="constrained")
    for axis, workload in zip(axes, WORKLOADS, strict=True):
        for network in (machine, *NETWORKS):
            speeds = speeds_of(results, workload, network)
            axis.plot(list(speeds), list(speeds.values()), marker="o", markersize=3, label=network.name)
        axis.plot(PROCESSES, PROCESSES, color="0.7", linestyle="--", label="as many as processes")
        axis.set(xscale="log", yscale="log", title=workload.recipe, xlabel="processes")
        axis.set_xticks(PROCESSES, [str(count) for count in PROCESSES])
        axis.minorticks_off()
    ticks = [2**power for power in range(-3, round(math.log2(PROCESSES[-1])) + 1, 2)]
    axes[0].set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes[0].set_ylabel("speed of an update")
    axes[0].legend(fontsize=7)
    figure.savefig(PLOT, dpi=110)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        RESULTS.write_text(json.dumps(measure(), indent=1) + "\n")
    write_page(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
