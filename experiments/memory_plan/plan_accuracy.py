"""Compares the planned memory of an update with the measured one, for every recipe that ships.

    python experiments/memory_plan/plan_accuracy.py --eager          # on a CPU; RUNNER_DATA names the data
    python experiments/memory_plan/plan_accuracy.py --eager gcn_cora # only these recipes, again
    python experiments/memory_plan/plan_accuracy.py marl_phase3      # with its compiler
    python experiments/memory_plan/plan_accuracy.py "conv_classifier optimization.compile=on"

The result, ``plan_accuracy.json`` and ``plan_accuracy.md`` beside this file, grows with every recipe.
What is in it already is not measured again. Measured is what torch's CPU allocator reports to its
profiler: bytes in use at the highest point of an update, less what the source holds.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from runner.plugin.implementation import implementation_of
from runner.plugin.registry import Registry
from runner.plugins.sequences.graph_walks import GraphWalks, Walk
from runner.recipe.loader import load, shipped
from runner.system.byte_size import format_size
from runner.system.tensor_trees import nbytes, tensors
from runner.training.pipeline import Assembly
from runner.training.step import Step

FOLDER = Path(__file__).parent
RESULT, TABLE = FOLDER / "plan_accuracy.json", FOLDER / "plan_accuracy.md"
LIMIT = 0.05
"""Allowed relative error."""
LARGEST_OF = 200
"""Batches of ragged data of which the largest is measured."""
SETTINGS = ["device=cpu", "optimization.batch_autotune=off"]


def measure(name: str, compiled: bool) -> dict[str, Any]:
    """Trains a few updates under torch's profiler and returns the peak of the last one, in bytes."""
    recipe_name, *settings = name.split()
    recipe = load(recipe_name, [*SETTINGS, *settings], Registry())
    stages = {kind: stage for kind, stage in recipe.stages.items() if compiled or not stage.unplanned}
    recipe = replace_stages(recipe, stages)
    source_class = implementation_of(type(recipe.data))

    def build(config: Any, context: Any) -> Any:
        source = source_class(config, context)
        with record_function("source built"):
            return source

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        device = torch.device("cpu")
        pipeline = Assembly(recipe, (), device, recipe.train.batch_size, None, build)
        step = Step(pipeline)
        with record_function("draw"):
            drawn = largest_batch(step, recipe.data.shapes_vary)
        for _ in range(1 + max(pipeline.learner.periods().values(), default=1)):
            step(drawn)
        with record_function("measured update"):
            step(drawn)
        # A graph as a whole is its own batch, and was counted with the source.
        is_shared = next(tensors(drawn.batch)).data_ptr() == next(tensors(step.next().batch)).data_ptr()
    shared = nbytes(drawn.batch) if is_shared else 0
    drawn_bytes = nbytes(drawn.batch) + nbytes(drawn.noise) - shared
    return {"bytes": peak_bytes(profiler, drawn_bytes) + shared}


def replace_stages(recipe: Any, stages: dict[str, Any]) -> Any:
    """Returns the recipe with these stages."""
    from dataclasses import replace

    return replace(recipe, stages=stages)


def largest_batch(step: Step, shapes_vary: bool) -> Any:
    """Returns the largest batch that the source can produce, with its noise.

    Walks of molecules are cut into buckets, so that their lengths count, and no batch of a training
    is likely to have the longest ones. Other ragged batches are padded to their largest sample, and
    the largest of many batches is as large as the largest possible one.
    """
    drawn = step.next()
    source = step.pipeline.source
    if isinstance(source, GraphWalks):
        walks = [walk for walks in walks_of_table(step.pipeline) for walk in walks]
        longest = sorted(walks, key=lambda walk: len(walk.tokens))[-step.pipeline.batch_size :]
        return drawn._replace(batch=source.collate(longest))
    for _ in range(LARGEST_OF if shapes_vary else 0):
        candidate = step.next()
        if nbytes(candidate.batch) > nbytes(drawn.batch):
            drawn = candidate
    return drawn


def walks_of_table(pipeline: Assembly) -> list[list[Walk]]:
    """Returns a walk through every molecule of the table, by the part in which it is."""
    source = pipeline.source
    datasets = [source.train, source.held_out, source.test]
    return [[dataset[number] for number in range(len(dataset))] for dataset in datasets]


def peak_bytes(profiler: profile, drawn_bytes: int) -> int:
    """Returns the bytes in use at the highest point of the measured update, without the source's.

    Args:
        profiler: Has recorded a training.
        drawn_bytes: Of the batch and its noise. What else drawing has left is the source's: the order of an epoch.
    """
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    in_use = source = peak = 0
    end = draw_end = -1
    before_draw = 0
    for event in events:
        if 0 <= draw_end < event.start_ns():
            source += in_use - before_draw - drawn_bytes
            draw_end = -1
        if event.name() == "draw":
            before_draw = in_use
            draw_end = event.start_ns() + event.duration_ns()
        elif event.name() == "source built":
            source = in_use
        elif event.name() == "measured update":
            end = event.start_ns() + event.duration_ns()
            peak = in_use
        elif event.name() == "[memory]":
            in_use += event.nbytes()
            if event.start_ns() <= end:
                peak = max(peak, in_use)
    return peak - source


def compare(name: str, eager: bool) -> dict[str, Any]:
    """Plans a recipe with the command, and measures it, in processes of their own.

    Args:
        name: Recipe, with settings after it.
        eager: Whether compilers are left out.
    """
    command = ["-m", "runner", "plan", *name.split(), *SETTINGS, "--json"]
    plan, seconds = timed_plan(command)
    estimate = None
    if plan["tolerance"] is None and not eager:
        estimate = plan["peak_bytes"]
        plan, seconds = timed_plan([*command, "--compiled"])
    options = ["--eager"] if eager else []
    output = output_of(__file__, "--measure", name, *options)
    measured = json.loads(output.splitlines()[-1])["bytes"]
    row = {
        "planned": plan["peak_bytes"],
        "measured": measured,
        "error": plan["peak_bytes"] / measured - 1,
        "limit": LIMIT,
        "compiled": estimate is not None,
        "plan_cpu_seconds": round(seconds, 2),
        "date": time.strftime("%Y-%m-%d"),
    }
    if estimate is not None:
        row["estimate_error"] = estimate / measured - 1
    return row


def timed_plan(command: list[str]) -> tuple[dict[str, Any], float]:
    """Returns a plan and the processor time that it took."""
    before = cpu_seconds_of_children()
    plan = json.loads(output_of(*command))
    return plan, cpu_seconds_of_children() - before


def output_of(*arguments: str) -> str:
    """Runs Python and returns its output."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def cpu_seconds_of_children() -> float:
    """Returns the processor time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def table(results: dict[str, Any]) -> str:
    """Returns the results as a table in Markdown."""
    lines = [
        "| recipe | planned | measured | error | allowed | CPU seconds | error without --compiled |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in sorted(results.items()):
        cells = [
            name,
            format_size(row["planned"]),
            format_size(row["measured"]),
            f"{row['error']:+.1%}",
            f"{row['limit']:.0%}",
            f"{row['plan_cpu_seconds']:.1f}" if "plan_cpu_seconds" in row else "",
            f"{row['estimate_error']:+.1%}" if "estimate_error" in row else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compares the recipes that are named, or all that are not compared yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--measure", action="store_true", help="measure in this process, and print JSON")
    parser.add_argument("--eager", action="store_true", help="leave the compiler out of what is measured")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.recipes[0], not arguments.eager)))
        return
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in arguments.recipes or [name for name in shipped() if name not in results]:
        try:
            row = compare(name, arguments.eager)
        except subprocess.CalledProcessError as error:
            # A recipe may need a file of the user's, or more memory than there is.
            print(name, "is not measured:", error.stderr.strip().rpartition("\n")[2], flush=True)
            continue
        results[f"{name}, compiled" if row["compiled"] else name] = row
        RESULT.write_text(json.dumps(results, indent=2) + "\n")
        TABLE.write_text(table(results))
        print(name, row, flush=True)


if __name__ == "__main__":
    main()
