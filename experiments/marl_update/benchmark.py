"""What an update costs with every phase of stages, against the baseline, in one process and interleaved.

    python experiments/marl_update/benchmark.py

Every round times every variant once, in an order that turns round every time; the figure is the median over rounds of
baseline / variant, with a bootstrap interval.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

from runner.pipeline import Pipeline, assemble
from runner.recipe import load
from runner.registry import Registry

VARIANTS = {
    "marl_baseline": ("marl_baseline", ()),
    "marl_phase1": ("marl_phase1", ()),
    "marl_phase2, amp off": ("marl_phase2", ("optimization.amp=off",)),
    "marl_phase2": ("marl_phase2", ()),
    "marl_phase3, amp and float32_matmul off": (
        "marl_phase3",
        ("optimization.amp=off", "optimization.float32_matmul=off"),
    ),
    "marl_phase3, amp off": ("marl_phase3", ("optimization.amp=off",)),
    "marl_phase3": ("marl_phase3", ()),
}


def build(name: str, sets: tuple[str, ...], followers: int, batch_size: int) -> Pipeline:
    """A pipeline whose replay buffer holds some transitions."""
    common = (
        f"data.followers={followers}",
        f"train.batch_size={batch_size}",
        "data.replay.capacity=20_000",
        "device=cpu",
    )
    pipeline = assemble(load(name, [*sets, *common], Registry()))
    while not pipeline.source.ready(10 * batch_size):
        pipeline.source.collect(None)
    return pipeline


def updates(pipeline: Pipeline, count: int) -> float:
    """Milliseconds per update, without drawing its batch and noise."""
    noise = pipeline.learner.noise(pipeline.batch_size, pipeline.context.generator("noise"))
    batch = pipeline.slots.next_batch(pipeline.batch_size, 0.5, 0)
    started = time.perf_counter()
    for _ in range(count):
        pipeline.slots.update(batch, noise)
    return 1e3 * (time.perf_counter() - started) / count


def interval(values: list[float]) -> tuple[float, float]:
    """A 95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--followers", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pipelines = {
        label: build(name, sets, arguments.followers, arguments.batch_size) for label, (name, sets) in VARIANTS.items()
    }
    first = {label: updates(pipeline, 1) for label, pipeline in pipelines.items()}
    for pipeline in pipelines.values():
        updates(pipeline, 5)
    times: dict[str, list[float]] = {label: [] for label in pipelines}
    for turn in range(arguments.rounds):
        for label in list(pipelines) if turn % 2 else reversed(pipelines):
            times[label].append(updates(pipelines[label], arguments.updates))
    rows = {}
    for label, measured in times.items():
        ratios = [base / own for base, own in zip(times["marl_baseline"], measured, strict=True)]
        low, high = interval(ratios)
        rows[label] = {"ms": statistics.median(measured), "ratio": statistics.median(ratios), "low": low, "high": high}
        rows[label] |= {"first_update_ms": first[label]}
        print(
            f"{label:40} {rows[label]['ms']:7.2f} ms  {rows[label]['ratio']:5.2f}x [{low:.2f}, {high:.2f}]", flush=True
        )
    setting = {"agents": arguments.followers + 1, "batch_size": arguments.batch_size, "threads": arguments.threads}
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    results[f"{setting['agents']} agents, batch {arguments.batch_size}"] = {
        **setting,
        "torch": torch.__version__,
        "variants": rows,
    }
    arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
