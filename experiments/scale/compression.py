"""Measures what compressed gradients save, and what they cost.

    python experiments/scale/compression.py speed    # bytes on the wire and seconds per update
    python experiments/scale/compression.py results  # paired trainings
    python experiments/scale/compression.py table    # writes compression.md

Two processes exchange gradients with gloo over the loopback interface, whose counters give the bytes on the wire;
nothing else should use the network meanwhile. Variants take turns. Results are appended to compression.jsonl; what it
has is not measured again.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from runner.distributed.process_group import ProcessGroup
from runner.plugin.registry import Registry
from runner.plugins.stages.compressed_gradients import bytes_of_powersgd
from runner.proof import NonInferiority
from runner.proof.ratios import ratio
from runner.recipe.loader import find, load
from runner.training.pipeline import assemble
from runner.training.step import Step

HERE = Path(__file__).parent
RESULTS, TABLE = HERE / "compression.jsonl", HERE / "compression.md"
PROCESSES = 2
ROUNDS = 30
UPDATES = 4
"""Updates of a variant in each round."""
PAIRS = {"digits_classifier": 32, "shakespeare_gpt": 12}
"""Largest number of pairs of trainings, by recipe."""
FORMATS = {
    "off": "off",
    "off again": "off",
    "fp16": "{format: fp16}",
    "bf16": "{format: bf16}",
    "powersgd, rank 1": "{format: powersgd, rank: 1}",
    "powersgd, rank 4": "{format: powersgd, rank: 4}",
}
MEASURED = {"shakespeare_gpt": (), "digits_classifier": (), "grasp_diffusion": ("data.synthetic=true",)}
TRAINED = {
    "digits_classifier": ("train={epochs: 8, batch_size: 64, log_every: 8, evaluate_every: 8}",),
    "shakespeare_gpt": (
        *("model.layers=2", "model.width=64", "model.heads=4", "data.context=64"),
        "train={tokens: 1000000, batch_size: 16, log_every: 1000000, evaluate_every: 1000000}",
    ),
}
"""Trainings that are long enough to learn, and short enough to be repeated."""


HEAD = """# Compressed gradients

Two processes on one machine with two cores, one thread each: `python experiments/scale/compression.py speed`, then
`results` and `table`. The speed is a ratio of times over interleaved rounds, above 1 if faster than without
compression; *off again* is the same code once more.

## Bytes and seconds per update

*Added up*: bytes of the gradients in each process, computed from their shapes. *On the wire*: what the loopback
interface received from both processes, with the headers of packets, counts and results. A ring of p processes sends
2 (p - 1) times what is added up.

| recipe | format | added up (computed) | on the wire | wire / added up | ms per update | speed |
|---|---|---|---|---|---|---|"""
MIDDLE = f"""
## What is learned

Up to {" and ".join(map(str, PAIRS.values()))} pairs of trainings with the same seed, judged like a stage with the
contract Statistical; a format that has a verdict is not trained again.

| recipe | format | metric | verdict | pairs | mean gain (below 0 is worse) |
|---|---|---|---|---|---|"""


def done():
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def note(entry):
    with RESULTS.open("a") as file:
        file.write(json.dumps(entry) + "\n")
    print(entry, flush=True)


def received_bytes():
    """Returns the bytes that the loopback interface has received since the machine started."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise RuntimeError("no loopback interface")


def measure(rank, recipe_name, folder):
    """Measures all variants of a recipe; the first process notes the result."""
    torch.set_num_threads(1)
    group = ProcessGroup(dist.FileStore(f"{folder}/store", PROCESSES), rank, PROCESSES)
    group.connect("cpu", 300)
    registry = Registry()
    steps = {}
    for name, value in FORMATS.items():
        sets = ["device=cpu", *MEASURED[recipe_name], f"optimization.compressed_gradients={value}"]
        recipe = load(find(recipe_name), sets, registry)
        torch.manual_seed(recipe.seed)
        steps[name] = Step(assemble(recipe, registry.files, processes=group))
    shapes = [parameter.shape for _, parameter in steps["off"].learner.named_parameters()]
    # The first updates of PowerSGD are exact, and those of all others are slow.
    for step in steps.values():
        for _ in range(UPDATES):
            step()
    seconds = {name: [] for name in steps}
    sent = {name: [] for name in steps}
    for number in range(ROUNDS):
        names = list(steps)
        start = number % len(names)
        for name in names[start:] + names[:start]:
            dist.barrier()
            before = received_bytes()
            started = time.perf_counter()
            for _ in range(UPDATES):
                steps[name]()
            dist.barrier()
            seconds[name].append((time.perf_counter() - started) / UPDATES)
            sent[name].append((received_bytes() - before) / UPDATES)
    if rank:
        return
    gradient = 4 * sum(shape.numel() for shape in shapes)
    for name in steps:
        note(
            {
                "kind": "speed",
                "recipe": recipe_name,
                "variant": name,
                "seconds": seconds[name],
                "bytes": sorted(sent[name])[ROUNDS // 2],
                "gradient": gradient,
                "computed": computed_bytes(name, shapes),
            }
        )


def computed_bytes(name, shapes):
    """Returns the bytes of an update's gradients after compression, before they are added up."""
    numbers = sum(shape.numel() for shape in shapes)
    if name in ("fp16", "bf16"):
        return 2 * numbers
    if name.startswith("powersgd"):
        return bytes_of_powersgd(shapes, 4, int(name.split()[-1]))
    return 4 * numbers


def speed():
    known = {entry["recipe"] for entry in done() if entry["kind"] == "speed"}
    for name in MEASURED.keys() - known:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (name, folder), PROCESSES)


def results():
    """Trains pairs of one seed each, with and without compression."""
    known = {(entry["recipe"], entry["variant"], entry["seed"]) for entry in done() if entry["kind"] == "result"}
    variants = [name for name in FORMATS if name != "off again"]
    for recipe_name, settings in TRAINED.items():
        for seed in range(PAIRS[recipe_name]):
            decided = {name for name, _, outcome, *_ in verdicts(done(), recipe_name) if outcome != "INCONCLUSIVE"}
            undecided = [name for name in variants if name not in decided]
            # Without another format, the baseline needs no more pairs.
            if undecided == ["off"]:
                break
            for name in undecided:
                if (recipe_name, name, seed) in known:
                    continue
                sets = [*settings, f"seed={seed}", f"optimization.compressed_gradients={FORMATS[name]}"]
                note(
                    {"kind": "result", "recipe": recipe_name, "variant": name, "seed": seed}
                    | trained(recipe_name, sets)
                )


def trained(recipe_name, sets):
    """Returns the metrics of a training on two processes."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", recipe_name, "--nproc", str(PROCESSES), "--json", "--quiet", "device=cpu", *sets]
        child = subprocess.run(
            [sys.executable, "-m", "runner", *words, "tracking.system_metrics=false"],
            env=os.environ | {"RUNNER_WORKSPACE": folder},
            stdout=subprocess.PIPE,
            check=True,
        )
    metrics = json.loads(child.stdout)["metrics"]
    return {"metrics": {name: value for name, value in metrics.items() if name.startswith("eval/")}}


def verdicts(entries, recipe_name):
    """Yields each format with the verdict on its trainings."""
    recipe = load(find(recipe_name), [], Registry())
    objective = recipe.objective
    values = {
        (entry["variant"], entry["seed"]): entry["metrics"][f"eval/{objective.name}"]
        for entry in entries
        if entry["kind"] == "result" and entry["recipe"] == recipe_name
    }
    for name in FORMATS:
        seeds = [seed for seed in range(PAIRS[recipe_name]) if (name, seed) in values and ("off", seed) in values]
        if name.startswith("off") or not seeds:
            continue
        test = NonInferiority(
            objective.margin,
            PAIRS[recipe_name],
            larger_is_better=objective.direction == "maximize",
            relative=objective.unit is None,
        )
        for seed in seeds:
            test.add(values["off", seed], values[name, seed])
        gains = [test.sign * (values[name, seed] - values["off", seed]) for seed in seeds]
        yield name, objective.name, test.conclude(), len(test), sum(gains) / len(gains), test.summary()


def table():
    entries = done()
    lines = [HEAD]
    for entry in (entry for entry in entries if entry["kind"] == "speed"):
        baseline = next(
            other
            for other in entries
            if other["kind"] == "speed" and other["recipe"] == entry["recipe"] and other["variant"] == "off"
        )
        times = "" if entry is baseline else str(ratio(baseline["seconds"], entry["seconds"]))
        milliseconds = 1e3 * sorted(entry["seconds"])[len(entry["seconds"]) // 2]
        sizes = [f"{entry[key] / 2**10:,.1f} KiB" for key in ("computed", "bytes")]
        share = f"{entry['bytes'] / entry['computed']:.2f}"
        cells = [entry["recipe"], entry["variant"], *sizes, share, f"{milliseconds:.1f}", times]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(MIDDLE)
    for recipe_name in TRAINED:
        for name, metric, outcome, pairs, gain, _ in verdicts(entries, recipe_name):
            lines.append(f"| {recipe_name} | {name} | {metric} | {outcome} | {pairs} | {gain:+.4f} |")
    TABLE.write_text("\n".join(lines) + "\n")
    print(TABLE.read_text())


if __name__ == "__main__":
    {"speed": speed, "results": results, "table": table}[sys.argv[1]]()
