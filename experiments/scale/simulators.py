"""Measures how fast one and two processes train in a simulator.

    python experiments/scale/simulators.py          # measures what simulators.jsonl does not have
    python experiments/scale/simulators.py --table  # writes simulators.md

Two processes on two cores train marl_phase2 in turns with one process that has one or two threads. "one thread again"
is the first once more. A round is the steps of all environments that earn some updates, and these updates.
Every block has new processes, because two processes that do the same can differ in speed for their lifetime.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from runner.distributed.process_group import ProcessGroup
from runner.plugin.registry import Registry
from runner.proof.ratios import ratio
from runner.recipe.loader import find, load
from runner.training.pipeline import assemble
from runner.training.step import Step

HERE = Path(__file__).parent
RESULTS = HERE / "simulators.jsonl"
TABLE = HERE / "simulators.md"
PROCESSES = 2
BLOCKS = 4
ROUNDS = 12
UPDATES = 16
VARIANTS = ("one thread", "one thread again", "two threads", "two processes")
SETTINGS = {
    "as it ships": (),
    "batch of 1,024": ("train.batch_size=1024",),
    "2,048 environments": ("data.envs=2048", "data.updates_per_step=0.0078125", "data.warmup=2048"),
}
"""Settings of marl_phase2: 32 environments that earn 8 updates in a step and a batch of 128, and others."""
HEAD = f"""# Simulators on two processes

    python experiments/scale/simulators.py && python experiments/scale/simulators.py --table

`marl_phase2` on a CPU with two cores: one process with one or two threads, and two processes with one thread each,
which take turns. Rounds of {UPDATES} updates, {ROUNDS} in each of {BLOCKS} starts of the processes; medians, and ratios
of times of the same round with 95 % intervals. Above 1, a variant is faster than one thread.

Other programs used both cores meanwhile (load 1 to 6), from which threads and processes that wait for each other suffer
most. On a machine with idle cores they would be faster than here; that was not measured.

| setting | variant | environment steps per second | updates per second | speed |
|---|---|---|---|---|
"""


def step_of(sets, group=None):
    """Returns a training that has passed its warm-up."""
    recipe = load(find("marl_phase2"), ["device=cpu", *sets], Registry())
    step = Step(assemble(recipe, Registry().files, processes=group))
    while step.progress.updates < UPDATES:
        step()
    return step


def measure(rank, sets, folder, file):
    """Measures the rounds of a block; the first process writes them into a file."""
    torch.set_num_threads(1)
    group = ProcessGroup(dist.FileStore(f"{folder}/store", PROCESSES), rank, PROCESSES)
    group.connect("cpu", 600)
    divided = step_of(sets, group)
    steps = {"two processes": divided}
    if not rank:
        steps |= {variant: step_of(sets) for variant in VARIANTS[:-1]}
    rounds = []
    for number in range(-1, ROUNDS):
        start = number % len(VARIANTS)
        result = {}
        for variant in VARIANTS[start:] + VARIANTS[:start]:
            dist.barrier()
            torch.set_num_threads(2 if variant == "two threads" else 1)
            if variant in steps:
                result[variant] = one_round(steps[variant])
        # The first round warms up.
        if number >= 0:
            rounds.append(result)
    dist.barrier()
    if not rank:
        Path(file).write_text(json.dumps(rounds))


def one_round(step):
    """Returns the seconds, environment steps and updates of a round."""
    before = step.progress.state_dict()
    started = time.perf_counter()
    while step.progress.updates < before["updates"] + UPDATES:
        step()
    seconds = time.perf_counter() - started
    after = step.progress.state_dict()
    return [seconds, *(after[unit] - before[unit] for unit in ("env_steps", "updates"))]


def main():
    """Measures the blocks that are missing, or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true")
    if parser.parse_args().table:
        TABLE.write_text(HEAD + "\n".join(table()) + "\n")
        print(TABLE.read_text())
        return
    blocks = {(block["setting"], block["block"]) for block in recorded()}
    for number in range(BLOCKS):
        for setting, sets in SETTINGS.items():
            if (setting, number) in blocks:
                continue
            with tempfile.TemporaryDirectory() as folder:
                file = f"{folder}/rounds.json"
                mp.spawn(measure, (sets, folder, file), nprocs=PROCESSES)
                rounds = json.loads(Path(file).read_text())
            line = json.dumps({"setting": setting, "block": number, "rounds": rounds})
            with RESULTS.open("a") as results:
                results.write(line + "\n")
            print(f"{setting}: block {number + 1} of {BLOCKS}", flush=True)


def recorded():
    """Returns the blocks that have been measured."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def table():
    """Yields the lines of the table."""
    blocks = recorded()
    for setting in SETTINGS:
        rounds = [entry for block in blocks if block["setting"] == setting for entry in block["rounds"]]
        if not rounds:
            continue
        baseline = [entry[VARIANTS[0]][0] for entry in rounds]
        for variant in VARIANTS:
            seconds = [entry[variant][0] for entry in rounds]
            rates = [sorted(entry[variant][index] / entry[variant][0] for entry in rounds) for index in (1, 2)]
            steps, updates = (values[len(values) // 2] for values in rates)
            speed = "" if variant == VARIANTS[0] else str(ratio(baseline, seconds))
            yield f"| {setting} | {variant} | {steps:,.0f} | {updates:.1f} | {speed} |"


if __name__ == "__main__":
    main()
