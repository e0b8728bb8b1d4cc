"""Measures what random numbers that belong to samples cost a process.

    python experiments/scale/dropout.py

One process trains on half of every batch, as one of two does: its update draws for its rows alone (plain), or for the
entire batch (rows). "plain again" is the same code once more. Variants take turns; times are those of the processor,
so that other programs on the machine change little. Results are written to dropout.json and dropout.md.
"""

import json
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from runner.distributed.random_rows import RandomRows
from runner.plugin.registry import Registry
from runner.proof.ratios import ratio
from runner.recipe.loader import find, load
from runner.training.pipeline import assemble
from runner.training.step import Step

HERE = Path(__file__).parent
ROUNDS = 30
UPDATES = {"digits_classifier": 10, "shakespeare_gpt": 1}
"""Updates of a variant in each round."""
DROPOUT = 0.1
VARIANTS = ("plain", "plain again", "rows")
HEAD = f"""# Dropout on several processes

One process with one thread on a CPU, which trains on half of every batch: `python experiments/scale/dropout.py`.
The speed is a ratio of processor times over {ROUNDS} interleaved rounds, below 1 if slower than without the rows of
an entire batch.

| recipe | variant | ms per update | speed |
|---|---|---|---|
"""


def measure(name):
    """Returns the seconds of an update in every round, by variant."""
    registry = Registry()
    sets = ["device=cpu", f"model.dropout={DROPOUT}"]
    recipe = load(find(name), sets, registry)
    pipeline = assemble(recipe, registry.files)
    step = Step(pipeline)
    random_rows = RandomRows(pipeline.learner.modules(), recipe.model.kind)
    seconds = {variant: [] for variant in VARIANTS}
    for number in range(-2, ROUNDS):
        order = VARIANTS[number % len(VARIANTS) :] + VARIANTS[: number % len(VARIANTS)]
        for variant in order:
            inputs = [halved(step) for _ in range(UPDATES[name])]
            started = time.process_time()
            for part, size, rows in inputs:
                with random_rows.of(size, rows) if variant == "rows" else nullcontext():
                    step.update(part)
            # The first rounds warm up.
            if number >= 0:
                seconds[variant].append((time.process_time() - started) / UPDATES[name])
    return seconds


def halved(step):
    """Returns half of the next batch with its noise, the size of the batch, and the rows."""
    inputs = step.next()
    size = step.source.size(inputs.batch)
    rows = slice(0, size // 2)
    part = step.source.take(inputs.batch, rows)
    noise = step.learner.noise_layout.take(inputs.noise, rows, size)
    return inputs._replace(batch=part, noise=noise), size, rows


def main():
    torch.set_num_threads(1)
    results = {name: measure(name) for name in UPDATES}
    (HERE / "dropout.json").write_text(json.dumps(results, indent=1) + "\n")
    lines = []
    for name, seconds in results.items():
        for variant, values in seconds.items():
            speed = "" if variant == "plain" else str(ratio(seconds["plain"], values))
            lines.append(f"| {name} | {variant} | {1e3 * sorted(values)[len(values) // 2]:.1f} | {speed} |")
    (HERE / "dropout.md").write_text(HEAD + "\n".join(lines) + "\n")
    print((HERE / "dropout.md").read_text())


if __name__ == "__main__":
    main()
