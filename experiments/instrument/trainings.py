"""How often ``runner verify`` is wrong about a stage that only trainings can judge, by real trainings.

    python experiments/instrument/trainings.py               # what trainings.json does not have yet
    python experiments/instrument/trainings.py --calls 3     # no more than three calls of the verb about every stage

A stage spoils a share of the labels (``harmed.py``): none, so many that the mean loss of accuracy is about the margin,
and more. What it truly loses is measured by pairs of trainings in this process, and experiments drawn from these pairs
say how often the test is wrong. The verb itself is called as users call it, with other seeds, to see that it says the
same: the gates before the trainings, a process for each training, the looks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from runner.plugin.registry import Registry
from runner.proof.noninferiority import NonInferiority
from runner.recipe.loader import load
from runner.system import generators
from runner.training.loop import Loop
from runner.training.outputs import NoOutput
from runner.training.pipeline import assemble
from runner.training.signals import Stop

HERE = Path(__file__).parent
RESULTS, TABLE, PLUGIN = HERE / "trainings.json", HERE / "trainings.md", HERE / "harmed.py"
SETS = ["device=cpu", "model.widths=[8]", "train={epochs: 12, batch_size: 64, evaluate_every: 12}"]
MARGIN = 0.01  # of accuracy, the classifier's own
STAGES = {"loses nothing": 0.0, "loses about the margin": 0.17, "loses several margins": 0.3}  # labels that are spoilt
CALLS = 2  # of the verb, about each
PAIRS = 24
SEED = 1000  # by which calls are apart, so that no training is in two of them
PLANS = (8, 12, 20)
DRAWS = 4_000  # experiments that are drawn from all pairs
OUTCOMES = ("PASS", "FAIL", "INCONCLUSIVE")


def learnt(seed: int, share: float | None) -> float:
    """The accuracy of one training, with the stage unless ``share`` is None."""
    stage = [] if share is None else [f"optimization.harmed.share={share}"]
    recipe = load("digits_classifier", [*SETS, *stage, f"seed={seed}"], Registry([PLUGIN]))
    generators.seed(recipe.seed)
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(assemble(recipe, [PLUGIN]), Path(folder), NoOutput(), NoOutput(), Stop())
        loop.run()
    return loop.metrics["eval/accuracy"]


def asked(share: float, seed: int) -> dict[str, Any]:
    """What the verb says, and the pairs that it saw."""
    sets = [*SETS, f"optimization.harmed.share={share}", f"seed={seed}"]
    command = ["runner", "verify", "digits_classifier", "--plugin", str(PLUGIN), "--stage", "harmed"]
    command += [part for each in sets for part in ("--set", each)] + ["--horizon", "0", "--json"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", *command], capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if not done.stdout:
        raise SystemExit(done.stderr)
    report = json.loads(done.stdout)
    (row,) = report["stages"]
    return {
        "verdict": row["verdict"], "exit_code": done.returncode, "seconds": round(report["seconds"], 1),
        "pairs": row["evidence"]["values"],
    }  # fmt: skip


def drawn(gains: list[float], lost: float, most: int) -> dict[str, float]:
    """Shares of verdicts of experiments drawn from these differences, moved so that ``lost`` is their mean loss."""
    values = torch.tensor(gains, dtype=torch.float64)
    values += -lost - values.mean()
    draw = torch.Generator().manual_seed(most)
    count = Counter[str]()
    for _ in range(DRAWS):
        test = NonInferiority(margin=MARGIN, most=most)
        for gain in values[torch.randint(len(values), (most,), generator=draw)].tolist():
            test.add(0.0, gain)
        count[test.conclude()] += 1
    return {name: number / DRAWS for name, number in count.items()}


def table(results: dict[str, Any]) -> str:
    """What ``trainings.md`` says."""
    lines = [
        "# Verdicts of `runner verify` with trainings",
        "",
        "Made by `trainings.py` from `trainings.json`.",
        "",
        f"A small classifier of digits learns for 12 epochs; the margin is {MARGIN:g} of accuracy.",
        "",
        "## The verb",
        "",
        _row("the stage", "labels spoilt", "mean loss, in margins", "calls", *OUTCOMES),
        "|---" * 7 + "|",
    ]
    gains = {
        name: [each - without for each, without in zip(of, results["without"], strict=False)]
        for name, of in results["trained"].items()
    }
    for name, share in STAGES.items():
        margins = [gain / MARGIN for gain in gains[name]]
        error = 1.96 * stdev(margins) / len(margins) ** 0.5
        count = Counter(call["verdict"] for call in results["calls"][name])
        told = (count[each] for each in OUTCOMES)
        loss = f"{-fmean(margins):.2f} ± {error:.2f}, deviation {stdev(margins):.2f}"
        lines.append(_row(name, f"{share:.0%}", loss, count.total(), *told))
    rates = (f"loses {what}: {each}" for what in ("the margin", "nothing") for each in OUTCOMES[:2])
    lines += [
        "",
        f"Losses are those of {len(results['without'])} pairs, with 95 %; a call takes eight pairs at most.",
        "",
        "## The test",
        "",
        f"{DRAWS:,} experiments each, drawn from the pairs of a stage after their mean was moved to the margin, or to "
        "nothing:",
        "",
        _row("pairs of the stage that", "pairs of an experiment", *rates),
        "|---" * 6 + "|",
    ]
    for name in STAGES:
        for most in PLANS:
            shares = [drawn(gains[name], lost, most) for lost in (MARGIN, 0.0)]
            told = (f"{100 * each.get(outcome, 0):.1f} %" for each in shares for outcome in OUTCOMES[:2])
            lines.append(_row(name, most, *told))
    return "\n".join(lines) + "\n"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=CALLS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"without": [], "trained": {}, "calls": {}}
    if RESULTS.exists():
        results |= json.loads(RESULTS.read_text())
    variants = {None: results["without"]} | {
        share: results["trained"].setdefault(name, []) for name, share in STAGES.items()
    }
    for number in range(PAIRS):
        for share, trained in variants.items():
            if number >= len(trained):
                trained.append(learnt(number, share))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for number in range(options.calls):
        for index, (name, share) in enumerate(STAGES.items()):
            if number >= len(calls := results["calls"].setdefault(name, [])):
                calls.append(asked(share, SEED * (1 + number * len(STAGES) + index)))
                print(name, number, calls[-1]["verdict"], f"{calls[-1]['seconds']} s", flush=True)
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    TABLE.write_text(table(results))


if __name__ == "__main__":
    main()
