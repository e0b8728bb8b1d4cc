"""Times evaluations in the order of the table and in that of the sizes.

python experiments/sorted_evaluation/measure.py

Both pipelines of a case have the same weights and samples, and are evaluated alternately in one
process with one thread. Writes result.json and README.md.
"""

import datetime
import json
import sys
from functools import partial
from pathlib import Path

import torch

from runner.api import Pipeline, nbytes
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.system.hardware import cpu_model
from runner.training.evaluation import evaluated
from runner.training.pipeline import assemble

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from speed import speed  # noqa: E402

CASES = [
    (recipe, size) for recipe in ("gps_esol", "graphgpt_esol", "gps_esol data.file=freesolv.csv") for size in (64, 16)
]
"""Recipe with its settings, and the size of a batch."""


def main() -> None:
    """Measures all cases."""
    torch.set_num_threads(1)
    rows = [measured(recipe, size) for recipe, size in CASES]
    machine = f"{cpu_model()}, 1 thread, torch {torch.__version__}"
    result = {"date": str(datetime.date.today()), "machine": machine, "cases": rows}
    (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "README.md").write_text(page(result))


def measured(words: str, size: int) -> dict[str, object]:
    """Returns how much faster sorted evaluations are, and what their batches need."""
    recipe, *sets = words.split()
    sets += ["seed=0", "device=cpu", f"train.batch_size={size}"]
    natural, ordered = (
        assemble(load(recipe, [*sets, f"optimization.sorted_evaluation={state}"], Registry()))
        for state in ("off", "on")
    )
    ordered.learner.load_complete_state(natural.learner.complete_state())
    result = speed(partial(evaluated, natural), partial(evaluated, ordered))
    row = {
        "recipe": words,
        "batch_size": size,
        "batches": sum(1 for _ in natural.source.held_out_batches()),
        "speed": [result.value, result.low, result.high],
        "bytes": held_out_bytes(ordered) / held_out_bytes(natural),
        "difference": largest_difference(evaluated(natural), evaluated(ordered)),
    }
    print(json.dumps(row), flush=True)
    return row


def held_out_bytes(pipeline: Pipeline) -> int:
    """Returns the bytes of all held-out batches, with their padding."""
    return sum(nbytes(batch) for batch in pipeline.source.held_out_batches())


def largest_difference(metrics: dict[str, float], others: dict[str, float]) -> float:
    """Returns the largest relative difference of two evaluations."""
    return max(abs(others[name] - value) / max(abs(value), 1e-12) for name, value in metrics.items())


def page(result: dict) -> str:
    """Returns the text of README.md."""
    lines = [
        "# What is an evaluation in the order of sizes worth?",
        "",
        "    python experiments/sorted_evaluation/measure.py",
        "",
        "`optimization.sorted_evaluation` evaluates held-out samples in the order of their sizes. Above 1 is",
        "faster than in the order of the table (21 rounds of one process, interleaved, 95 %). Bytes are those",
        "of all held-out batches with their padding, as a share of those in the order of the table.",
        "",
        "| recipe | batch size | batches | speed | bytes | largest relative difference of a metric |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["cases"]:
        value, low, high = row["speed"]
        lines.append(
            f"| `{row['recipe']}` | {row['batch_size']} | {row['batches']} | {value:.2f}x [{low:.2f}, {high:.2f}] "
            f"| {row['bytes']:.2f} | {row['difference']:.0e} |"
        )
    return "\n".join([*lines, "", f"{result['date']}, {result['machine']}.", ""])


if __name__ == "__main__":
    main()
