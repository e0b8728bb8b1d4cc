"""Writes the report of refused techniques from their results."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
INTRODUCTION = """# Techniques that are refused, or need no stage

Reports recommend these techniques; this repository does not offer them as stages, for the reasons measured
here, or has them without a switch. [docs/claims.md](../../docs/claims.md) compares them with what the reports claim.

Speeds are ratios with a 95 % interval over rounds of one process; above 1 is faster. Other programs used the
two cores of the machine (load average), and two identical functions may differ by some percent, which such an
interval does not contain. Each script takes less than two minutes and writes its result to `results/` and this
page.
"""


def write_report() -> None:
    """Writes the page from all results."""
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    sections = [INTRODUCTION, *(section(name, result) for name, result in results.items())]
    (FOLDER / "README.md").write_text("\n".join(sections), encoding="utf-8")


def section(name: str, result: dict[str, Any]) -> str:
    """Returns the section of one result."""
    rows = [f"| {figure['label']} | {shown(figure)} | {figure['method']} |" for figure in result["figures"]]
    plot = [f"![{result['plot']}]({name}.png)", ""] if result.get("plot") else []
    lines = [
        f"## {result['title']}",
        "",
        f"    {result['command']}",
        "",
        f"**{result['conclusion']}**",
        "",
        "| case | result | method |",
        "|---|---|---|",
        *rows,
        "",
        *plot,
        f"{result['date']}; {result['machine']}; load average {result['load']}.",
        "",
    ]
    return "\n".join(lines)


def shown(figure: dict[str, Any]) -> str:
    """Returns a figure with its interval."""
    if figure["text"]:
        return str(figure["text"])
    if figure["unit"] == "%":
        saved = round(figure["value"])
        return f"{saved + 0} % less" if saved >= 0 else f"{-saved} % more"
    return "{:.2f}x [{:.2f}, {:.2f}]".format(figure["value"], *figure["interval"])
