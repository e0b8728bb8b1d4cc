"""Asks the gate about every stage that is wrong on purpose, each in a process of its own.

    python experiments/instrument/wrong.py                       # all, under the contract that each promises
    python experiments/instrument/wrong.py --promise other       # under the contract that each does not promise
    python experiments/instrument/wrong.py --only mean_acts,alone
    python experiments/instrument/wrong.py --shard 1/2           # the first half
    python experiments/instrument/wrong.py --missing             # those without a verdict

A new verdict replaces the earlier one in ``wrong.json``; ``wrong.md`` is written from that file.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from judge import INACTIVE, WRONG_STAGES, in_child, verdict_of

HERE = Path(__file__).parent
RESULTS, TABLE = HERE / "wrong.json", HERE / "wrong.md"
VERDICTS = ("FAIL", "INCONCLUSIVE", INACTIVE, "PASS")
COLUMNS = ("stage", "hole", "family", "recipe", "promises", "verdict", "what is wrong")
OTHER = {"exact": "close", "close": "exact", "statistical": "close"}
EXCLUDED = re.compile(r"(?=errors more frequent than|an error in more than)")
"""Where a verdict begins to state what it excludes."""
PLACE = re.compile(r"'\S+'|the changed step raises")
"""A slot or a tensor by its name, or the line that raises."""


def cases_of(file: Path) -> dict[str, Any]:
    """The stages of one file."""
    import wrong_base

    from runner.plugin.registry import Registry

    Registry([file])
    return {"cases": [case._asdict() | {"file": file.name} for case in wrong_base.CASES.values()]}


def judged(case: dict[str, Any], promise: str) -> dict[str, Any]:
    """The verdict on one of them."""
    import wrong_base

    sets = [*wrong_base.settings_of(case["recipe"]), *case["sets"]]
    sets.append(f"optimization.{case['kind']}.promise={promise}")
    recipe = wrong_base.shipped_recipe(case["recipe"])
    return verdict_of(case["kind"], recipe, sets, [WRONG_STAGES / case["file"]])


def every_case(only: set[str]) -> list[dict[str, Any]]:
    """Returns all stages, or those of the named files, or with one of the other names.

    Each file is read in a process of its own, as to import one may be what is wrong with it.
    """
    files = sorted(WRONG_STAGES.glob("wrong_*.py"))
    files = [file for file in files if file.name != "wrong_base.py"]
    named = {file.name for file in files} & only
    names = only - named
    if named:
        files = [file for file in files if file.name in named]
    cases = [case for file in files for case in in_child(cases_of, file)["cases"]]
    return [case for case in cases if not names or names & {*names_of(case)}]


def names_of(case: dict[str, Any]) -> tuple[str, ...]:
    """Returns the names by which ``--only`` selects a stage of a file."""
    return case["kind"], str(case["hole"]), case["recipe"]


def table(results: dict[str, dict[str, Any]]) -> str:
    """Returns the content of ``wrong.md``."""
    import wrong_base

    rows = sorted(results.values(), key=lambda row: (row["hole"], row["kind"], row["promised"]))
    lines = ["# Verdicts on stages that are wrong on purpose", ""]
    lines += ["Written by `wrong.py` from `wrong.json`, which has the text of every verdict."]
    lines += ["", _row("hole", "stages", "verdicts", *VERDICTS, "other"), "|---" * (len(VERDICTS) + 4) + "|"]
    for hole, name in wrong_base.HOLES.items():
        lines.append(_counts(f"{hole}: {name}", [row for row in rows if row["hole"] == hole]))
    for title, other in (("all, as they promise", False), ("all, under the other contract", True)):
        lines.append(_counts(title, [row for row in rows if (row["promised"] != row["promise"]) == other]))
    lines += ["", *_family_table(rows)]
    passed = [row for row in rows if row["verdict"] == "PASS"]
    unplaced = [row for row in rows if row["verdict"] == "FAIL" and not PLACE.search(row["summary"])]
    lines += ["", f"{len(unplaced)} verdicts name a global side effect instead of a slot and a tensor.", ""]
    lines += [f"## Stages that pass: {len(passed)}", "", _row("stage", "what is wrong", "what the PASS excludes")]
    lines += ["|---" * 3 + "|"]
    for row in passed:
        excluded = EXCLUDED.split(row["summary"], maxsplit=1)[-1]
        excluded = excluded.replace("|", "\\|").replace("\n", " ")
        lines.append(_row(f"`{row['kind']}`", row["about"], excluded))
    lines += ["", f"## All: {len(rows)}", "", _row(*COLUMNS)]
    lines += ["|---" * len(COLUMNS) + "|"]
    for row in rows:
        family = wrong_base.family_of(row["recipe"])
        columns = (row["hole"], family, row["recipe"], row["promised"], row["verdict"], row["about"])
        lines.append(_row(f"`{row['kind']}`", *columns))
    return "\n".join(lines) + "\n"


def _family_table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the lines of the table of verdicts by family and recipe."""
    import wrong_base

    lines = ["## Verdicts by family", ""]
    lines.append(_row("family: recipe", "stages", "verdicts", *VERDICTS, "other"))
    lines.append("|---" * (len(VERDICTS) + 4) + "|")
    for family, recipes in wrong_base.FAMILIES.items():
        for recipe in recipes:
            of_recipe = [row for row in rows if row["recipe"] == recipe]
            lines.append(_counts(f"{family}: `{recipe}`", of_recipe))
    return lines


def _counts(title: str, rows: list[dict[str, Any]]) -> str:
    counts = Counter(row["verdict"] if row["verdict"] in VERDICTS else "other" for row in rows)
    return _row(title, len({row["kind"] for row in rows}), len(rows), *(counts[each] for each in (*VERDICTS, "other")))


def _row(*cells: Any) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def add(name: str, row: dict[str, Any]) -> None:
    """Adds a verdict to those of the file, which another shard may write at the same time."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[name] = row
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="files, and kinds, numbers of holes or recipes, with commas")
    parser.add_argument("--shard", default="1/1", help="i/n")
    parser.add_argument("--promise", choices=("declared", "other"), default="declared")
    parser.add_argument("--missing", action="store_true", help="only stages without a verdict")
    parser.add_argument("--table", action="store_true", help="only make the table anew")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.shard.split("/"))
    only = set(filter(None, arguments.only.split(",")))
    cases = [] if arguments.table else every_case(only)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for case in cases[part - 1 :: parts]:
        promise = OTHER[case["promise"]] if arguments.promise == "other" else case["promise"]
        if arguments.missing and f"{case['kind']} {promise}" in results:
            continue
        row = case | {"promised": promise} | in_child(judged, case, promise)
        add(f"{case['kind']} {promise}", row)
        print(f"{case['hole']:2} {case['kind']:28} {promise:6} {row['verdict']:13} {row['seconds']:5} s "
              f"{row['summary'][:150]}", flush=True)  # fmt: skip
    TABLE.write_text(table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
