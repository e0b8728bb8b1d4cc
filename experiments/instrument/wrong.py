"""Asks the gate about every stage that is wrong on purpose, each in a process of its own.

    python experiments/instrument/wrong.py                       # all, under the contract that each promises
    python experiments/instrument/wrong.py --promise both        # under Exact and under Close
    python experiments/instrument/wrong.py --only mean_acts,alone
    python experiments/instrument/wrong.py --shard 1/2           # the first half

What is asked again replaces what ``wrong.json`` said; ``wrong.md`` is made from that.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from judge import INACTIVE, WRONG_STAGES, in_child, verdict_of

HERE = Path(__file__).parent
RESULTS, TABLE = HERE / "wrong.json", HERE / "wrong.md"
NAMES_A_PLACE = ("slot", "'")


def cases_of(file: Path) -> dict[str, Any]:
    """The stages of one file."""
    import wrong_base
    from runner.plugin.registry import Registry

    Registry([file])
    return {"cases": [case._asdict() | {"file": file.name} for case in wrong_base.CASES.values()]}


def judged(case: dict[str, Any], promise: str) -> dict[str, Any]:
    """The verdict on one of them."""
    import wrong_base

    sets = [*wrong_base.SETTINGS[case["recipe"]], *case["sets"]]
    sets.append(f"optimization.{case['kind']}.promise={promise}")
    return verdict_of(case["kind"], case["recipe"], sets, [WRONG_STAGES / case["file"]])


def every_case() -> list[dict[str, Any]]:
    """All of all files; each file is read in a process of its own, as to import one may be what is wrong with it."""
    files = [file for file in sorted(WRONG_STAGES.glob("wrong_*.py")) if file.name != "wrong_base.py"]
    return [case for file in files for case in in_child(cases_of, file)["cases"]]


def table(results: dict[str, dict[str, Any]]) -> str:
    """What ``wrong.md`` says."""
    import wrong_base

    lines = ["# What the gate says of stages that are wrong on purpose", "", "Made by `wrong.py` from `wrong.json`.", ""]
    columns = ["FAIL", "INCONCLUSIVE", INACTIVE, "PASS", "other"]
    lines += ["| hole | stages | asked | " + " | ".join(columns) + " |", "|---|---|---" + "|---" * len(columns) + "|"]
    rows = list(results.values())
    for hole, name in wrong_base.HOLES.items():
        mine = [row for row in rows if row["hole"] == hole]
        counts = Counter(row["verdict"] if row["verdict"] in columns else "other" for row in mine)
        kinds = len({row["kind"] for row in mine})
        lines.append(f"| {hole}: {name} | {kinds} | {len(mine)} | " + " | ".join(str(counts[c]) for c in columns) + " |")
    counts = Counter(row["verdict"] if row["verdict"] in columns else "other" for row in rows)
    kinds = len({row["kind"] for row in rows})
    lines.append(f"| all | {kinds} | {len(rows)} | " + " | ".join(str(counts[c]) for c in columns) + " |")
    learners = Counter(recipe for _, recipe in {(row["kind"], row["recipe"]) for row in rows})
    lines += ["", "Learners: " + ", ".join(f"{count} on `{name}`" for name, count in sorted(learners.items())) + ".", ""]
    for title, wanted in (
        ("Those that pass", lambda row: row["verdict"] == "PASS"),
        ("Those that fail without the name of a slot or a tensor", lambda row: row["verdict"] == "FAIL" and not _placed(row)),
        ("All", lambda row: True),
    ):
        lines += [f"## {title}", "", "| stage | hole | recipe | promises | verdict | what is wrong | what the gate says |"]
        lines.append("|---|---|---|---|---|---|---|")
        for row in sorted(filter(wanted, rows), key=lambda row: (row["hole"], row["kind"], row["promised"])):
            said = row["summary"].replace("|", "\\|").replace("\n", " ")[:200]
            cells = (f"`{row['kind']}`", row["hole"], row["recipe"], row["promised"], row["verdict"], row["about"], said)
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        lines.append("")
    return "\n".join(lines)


def _placed(row: dict[str, Any]) -> bool:
    """Whether a verdict says where: a slot or a tensor by its name."""
    return bool(row.get("tensor")) or ("'" in row["summary"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kinds, or numbers of holes, with commas")
    parser.add_argument("--shard", default="1/1", help="i/n")
    parser.add_argument("--promise", choices=("declared", "both", "exact", "close"), default="declared")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.shard.split("/"))
    only = set(filter(None, arguments.only.split(",")))
    cases = [case for case in every_case() if not only or {case["kind"], str(case["hole"])} & only]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for case in cases[part - 1 :: parts]:
        promises = {"declared": [case["promise"]], "both": ["exact", "close"]}.get(arguments.promise, [arguments.promise])
        for promise in promises:
            row = case | {"promised": promise} | in_child(judged, case, promise)
            if RESULTS.exists():  # another shard may have written meanwhile
                results = json.loads(RESULTS.read_text())
            results[f"{case['kind']} {promise}"] = row
            RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
            print(f"{case['hole']:2} {case['kind']:28} {promise:6} {row['verdict']:13} {row['seconds']:5} s "
                  f"{row['summary'][:150]}", flush=True)  # fmt: skip
    TABLE.write_text(table(results))


if __name__ == "__main__":
    main()
