"""Writes the speed-ups of stages in these ablations to ``plugins/stages/measured.json``, for their cards.

python experiments/cards.py
"""

import json
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MEASURED = HERE.parent / "plugins" / "stages" / "measured.json"


def measured() -> dict[str, list[dict[str, Any]]]:
    """Returns the speed-ups by stage: alone and with all others, with case, machine, method and date."""
    before = json.loads(MEASURED.read_text())
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(HERE.glob("*/result.json")):
        ablation = path.with_name("ablation.json")
        # Other experiments have results of another form.
        if not ablation.exists():
            continue
        result = json.loads(path.read_text())
        machine, torch = result["machine"]["cpu"], json.loads(ablation.read_text())["torch"]
        for case in result["cases"]:
            threads = "1 thread" if case["threads"] == 1 else f"{case['threads']} threads"
            where = {
                "experiment": f"experiments/{path.parent.name}",
                "case": case["name"],
                "machine": f"{case['device']}, {machine}, {threads}, torch {torch}",
            }
            for worth in case["worth"]:
                ratios = {name: worth[name] for name in ("alone", "together") if worth[name]}
                if ratios:
                    figures = {name: _rounded(ratio) for name, ratio in ratios.items()}
                    method = _method(next(iter(ratios.values())), case.get("processes", 1))
                    entry = where | {"method": method} | figures
                    dates = [old["date"] for old in before.get(worth["stage"], ()) if entry.items() <= old.items()]
                    # An old result keeps its date also in a copy without history; a new one has none before its commit.
                    date = next(filter(None, dates), "") or _date(path)
                    found.setdefault(worth["stage"], []).append(entry | {"date": date})
    return found


def _method(ratio: dict[str, float], count: int) -> str:
    """Returns what the interval is about: several processes, or the rounds of one; and how many train together."""
    processes = ratio.get("processes", 1)
    if count > 1:
        return f"{processes} starts of {count} processes"
    return f"{processes} processes" if processes > 1 else f"{ratio['rounds']} rounds of one process"


def _date(path: Path) -> str:
    """Returns when a result was committed."""
    command = ["git", "log", "-1", "--format=%as", "--", path.name]
    return subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=True).stdout.strip()


def _rounded(ratio: dict[str, float]) -> list[float]:
    return [round(ratio[name], 3) for name in ("value", "low", "high")]


if __name__ == "__main__":
    MEASURED.write_text(json.dumps(measured(), indent=1) + "\n")
