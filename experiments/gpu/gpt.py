"""GPT-2 small on a GPU: an update of the product beside one of a plain loop, for two vocabularies.

    python experiments/gpu/gpt.py [--rounds 8] [--updates 20]

Both variants of a vocabulary are in one process and take turns. All of them compile at the same
time; then one process after the other measures. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parent / "gpt_loss"))

import update  # noqa: E402

VOCABULARIES = (65, 50_304)
BATCH_SIZES = {65: 16, 50_304: 8}
PEAK_FLOPS = 989e12
"""Dense bfloat16 of an H100 and an H200 (data sheets, November 2023)."""


def flop(args: argparse.Namespace) -> float:
    """Returns the FLOP of an update: 6 for each parameter and token, and those of attention (Chowdhery
    et al. 2022, appendix B).
    """
    parameters = 12 * args.layers * args.width**2 + args.vocabulary * args.width
    attention = 12 * args.layers * args.width * args.context
    return (6.0 * parameters + attention) * args.batch * args.context


def settings(vocabulary: int) -> argparse.Namespace:
    """Returns the settings of both variants."""
    return argparse.Namespace(
        layers=12, width=768, heads=12, context=1024, batch=BATCH_SIZES[vocabulary], vocabulary=vocabulary,
        device="cuda", bf16=True,
    )  # fmt: skip


def built(args: argparse.Namespace) -> dict[str, tuple[Callable[[], Any], float]]:
    """Returns the compiled updates of both variants, each with the peak of memory that it takes in GiB."""
    builds = {"plain": update.plain, "product": lambda args: update.product(args, ("forward", "loss"))}
    variants = {}
    for name, build in builds.items():
        torch.manual_seed(0)
        before = torch.cuda.memory_allocated()
        step = build(args)
        for _ in range(update.WARM_UP):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        variants[name] = step, (torch.cuda.max_memory_allocated() - before) / 2**30
    return variants


def in_turns(steps: Mapping[str, Callable[[], Any]], rounds: int, updates: int) -> dict[str, list[float]]:
    """Returns the milliseconds of a step in each round, in which every function has a turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        order = list(steps) if number % 2 == 0 else list(steps)[::-1]
        for name in order:
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(updates):
                steps[name]()
            torch.cuda.synchronize()
            times[name].append(1e3 * (time.perf_counter() - started) / updates)
    return times


def measure(vocabulary: int, rounds: int, updates: int) -> dict[str, Any]:
    """Returns times of both variants, once the parent process allows it."""
    torch.set_float32_matmul_precision("high")
    args = settings(vocabulary)
    variants = built(args)
    print("ready", flush=True)
    sys.stdin.readline()
    times = in_turns({name: step for name, (step, _) in variants.items()}, rounds, updates)
    ratios = [ours / plain for ours, plain in zip(times["product"], times["plain"], strict=True)]
    row: dict[str, Any] = {"vocabulary": vocabulary, "batch": args.batch, "rounds": rounds, "updates": updates}
    for name, (_, peak) in variants.items():
        milliseconds = statistics.median(times[name])
        row[name] = {
            "ms": round(milliseconds, 2),
            "tokens_per_s": round(1e3 * args.batch * args.context / milliseconds),
            "mfu": round(flop(args) / (1e-3 * milliseconds) / PEAK_FLOPS, 3),
            "peak_gib": round(peak, 2),
        }
    row["time"] = [round(value, 3) for value in (statistics.median(ratios), min(ratios), max(ratios))]
    row["memory"] = round(variants["product"][1] / variants["plain"][1], 3)
    return row


def main() -> None:
    """Measures every vocabulary in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--vocabulary", type=int)
    options = parser.parse_args()
    if options.vocabulary:
        print(json.dumps(measure(options.vocabulary, options.rounds, options.updates)))
        return
    children = {}
    for vocabulary in VOCABULARIES:
        command = [sys.executable, __file__, *sys.argv[1:], "--vocabulary", str(vocabulary)]
        children[vocabulary] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for child in children.values():
        assert child.stdout is not None
        while child.stdout.readline().strip() not in {"ready", ""}:
            pass
    rows = {}
    for vocabulary, child in children.items():
        output, _ = child.communicate("go\n")
        rows[str(vocabulary)] = json.loads(output.splitlines()[-1])
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
