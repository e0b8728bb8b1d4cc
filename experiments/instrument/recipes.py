"""Runs ``runner verify`` on every shipped recipe, as a user calls it, and records its seconds.

    python experiments/instrument/recipes.py                      # all recipes with stages
    python experiments/instrument/recipes.py mlp gcn_cora         # these
    python experiments/instrument/recipes.py --missing            # those without a result
    python experiments/instrument/recipes.py --budget 240         # another budget than the default
    python experiments/instrument/recipes.py --table              # only write the table again

A result replaces the earlier one in ``recipes.json``; ``recipes.md`` is written from that file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECIPES = HERE.parent.parent / "recipes"
RESULTS = HERE / "recipes.json"
TABLE = HERE / "recipes.md"
CALL = (sys.executable, "-m", "runner", "verify")
LEFT_OUT = ("grasp_serve", "gpt2_small")
"""Recipes whose stages need a trained model, or a prepared file of tokens and a GPU."""
COLUMNS = ("recipe", "stages", "contract", "verdict", "summary")
SUMMARY = 160
"""Characters of a summary in the table."""


def verify(recipe: str, budget: float | None) -> dict[str, Any]:
    """Verifies a recipe on the CPU in a child process.

    Args:
        recipe: The recipe.
        budget: Seconds; None leaves the command's default.
    """
    command = [*CALL, recipe, "device=cpu", "--json", "--quiet"]
    if budget is not None:
        command += ["--budget", f"{budget:g}"]
    child = subprocess.run(command, capture_output=True, text=True)
    try:
        report = json.loads(child.stdout)
    except ValueError:
        last = (child.stderr or child.stdout).strip().splitlines()
        return {"recipe": recipe, "verdict": "none", "stages": [], "reason": last[-1] if last else ""}
    rows = [_short(row) for row in report["stages"]]
    return report | {"recipe": recipe, "exit_code": child.returncode, "stages": rows}


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of a set of stages without its evidence."""
    return {name: row[name] for name in ("name", "contract", "verdict", "summary")}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Returns the content of ``recipes.md``."""
    lines = [
        "# `runner verify` of the shipped recipes",
        "",
        "Written by `recipes.py` from `recipes.json`: one after the other, on the CPU, with the budget of",
        "the column. Seconds depend on the machine, and on what else it computes.",
        "",
        "| recipe | verdict | seconds | budget | seconds beyond it | inactive stages |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in sorted(results.items()):
        lines.append(_recipe_row(name, result))
    lines += ["", "## Stages", "", _row(*COLUMNS), "|---" * len(COLUMNS) + "|"]
    for name, result in sorted(results.items()):
        lines.extend(_stage_rows(name, result))
    return "\n".join(lines) + "\n"


def _recipe_row(name: str, result: dict[str, Any]) -> str:
    inactive = ", ".join(result.get("inactive", {}))
    if "seconds" not in result:
        return _row(f"`{name}`", result["verdict"], "", "", "", result["reason"])
    seconds = (result[key] for key in ("seconds", "budget", "seconds_beyond_budget"))
    cells = [f"{value or 0.0:.0f}" for value in seconds]
    return _row(f"`{name}`", result["verdict"], *cells, inactive)


def _stage_rows(name: str, result: dict[str, Any]) -> Iterator[str]:
    for row in result["stages"]:
        summary = row["summary"].replace("|", "\\|").replace("\n", " ")
        if len(summary) > SUMMARY:
            summary = f"{summary[:SUMMARY]}..."
        yield _row(f"`{name}`", row["name"], row["contract"], row["verdict"], summary)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Verifies the recipes that the command line selects."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("recipes", nargs="*", help="names; all by default")
    parser.add_argument("--missing", action="store_true", help="only recipes without a result")
    parser.add_argument("--budget", type=float, help="seconds for each recipe; the default of verify")
    parser.add_argument("--table", action="store_true", help="only write the table again")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    names = options.recipes or [file.stem for file in sorted(RECIPES.glob("*.yaml"))]
    if options.table:
        names = []
    for name in names:
        if name in LEFT_OUT or (options.missing and name in results):
            continue
        results[name] = verify(name, options.budget)
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
        print(name, results[name]["verdict"], results[name].get("seconds", ""), flush=True)
    TABLE.write_text(table(results))


if __name__ == "__main__":
    main()
