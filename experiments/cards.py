"""Writes what the ablations here measured of every stage to where its card looks: ``plugins/stages/measured.json``.

python experiments/cards.py
"""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MEASURED = HERE.parent / "plugins" / "stages" / "measured.json"


def measured() -> dict[str, list[dict[str, Any]]]:
    """What every stage was worth, by stage: in which experiment and case, on what, alone and beside all others."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(HERE.glob("*/result.json")):
        result = json.loads(path.read_text())
        machine, torch = result["machine"]["cpu"], json.loads(path.with_name("ablation.json").read_text())["torch"]
        for case in result["cases"]:
            where = {
                "experiment": f"experiments/{path.parent.name}",
                "case": case["name"],
                "machine": f"{case['device']}, {machine}, {case['threads']} threads, torch {torch}",
            }
            for worth in case["worth"]:
                each = {name: _rounded(worth[name]) for name in ("alone", "together") if worth[name]}
                if each:
                    found.setdefault(worth["stage"], []).append(where | each)
    return found


def _rounded(ratio: dict[str, float]) -> list[float]:
    return [round(ratio[name], 3) for name in ("value", "low", "high")]


if __name__ == "__main__":
    MEASURED.write_text(json.dumps(measured(), indent=1) + "\n")
