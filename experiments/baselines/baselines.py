"""Baselines without a network for what the recipes learn, on the same data and split.

    python experiments/baselines/baselines.py
    python experiments/baselines/baselines.py molecules citations
    python experiments/baselines/baselines.py --table

The first line measures all families, the second one some of them, and the third one writes the table again. It needs
scikit-learn (``pip install 'proven-runner[vision]'``) and the files of ``docs/data.md``; descriptors of RDKit are
measured if it is installed (``pip install 'proven-runner[reference]'``).
"""

import argparse
import importlib
import json
import platform
import statistics
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
RESULT = FOLDER / "result.json"
TABLE = FOLDER / "table.md"
FAMILIES = {
    "characters": "characters", "recall": "recall", "walks": "walks", "molecules": "molecules",
    "citations": "citations", "grasps": "retrieval", "shapes": "shape_retrieval", "flights": "flights",
}  # fmt: skip
"""Modules by family."""
SEEDS = (0, 1, 2)


def measure(family, seeds=SEEDS):
    """Returns the results of a family as JSON, and prints them."""
    module = importlib.import_module(FAMILIES[family])
    rows = []
    for result in module.measure(seeds):
        row = result._asdict()
        row["values"] = {"none" if seed is None else str(seed): value for seed, value in result.values.items()}
        rows.append(row)
        print(f"{family}: {result.recipes}: {result.baseline}: {result.metric} {row['values']}", flush=True)
    return rows


def ordered(results):
    """Returns the results in the order of the families, with the versions that measured them."""
    families = {family: results["families"][family] for family in FAMILIES if family in results["families"]}
    return {"python": platform.python_version(), "torch": torch.__version__, "families": families}


def table(results):
    """Returns the table of all results."""
    lines = [
        "| recipes | baseline | metric | mean | seeds 0, 1, 2 | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for rows in results["families"].values():
        for row in rows:
            values = list(row["values"].values())
            by_seed = ", ".join(f"{value:.4g}" for value in values) if len(values) > 1 else "the same"
            cells = (row["recipes"], row["baseline"], f"`{row['metric']}`", f"{statistics.fmean(values):.4g}", by_seed)
            lines.append(f"| {' | '.join(cells)} | {row['seconds']:.1f} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], help="all by default")
    parser.add_argument("--table", action="store_true", help="write the table from stored results")
    parser.add_argument("--seeds", type=int, nargs="+", help="other seeds, whose results are printed only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.seeds:
        for family in arguments.families or FAMILIES:
            measure(family, arguments.seeds)
        return
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {"families": {}}
    if not arguments.table:
        for family in arguments.families or FAMILIES:
            results["families"][family] = measure(family)
            # An interrupted measurement keeps the families before it.
            RESULT.write_text(json.dumps(ordered(results), indent=1) + "\n")
    TABLE.write_text(table(ordered(results)))


if __name__ == "__main__":
    main()
