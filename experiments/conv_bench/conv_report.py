"""Tables and plot of what ``conv_bench.py`` measured."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

Row = dict[str, Any]
DIRECTIONS = ("forward", "backward_data", "backward_weight")
CONTROL = "native again"
BRIGHT = 60
"""Percent from which a cell is so bright that its text is black."""
COLUMNS = ("shape", "backend", "ms", "interval", "gain", "nominal GFLOPS", "of the roofline", "workspace bytes")


def write_report(errors: list[Row], times: list[Row], machine: dict[str, Any] | None, folder: Path) -> None:
    """Writes ``summary.md``, and of times ``table.md`` and ``roofline.png``."""
    parts = ["# Summary", error_table(errors)]
    if machine is not None and times:
        parts += [described(machine), time_summary(times)]
        (folder / "table.md").write_text(f"# All times\n\n{described(machine)}\n\n{time_table(times)}\n")
        draw(times, folder / "roofline.png")
    (folder / "summary.md").write_text("\n\n".join(parts) + "\n")


def described(machine: dict[str, Any]) -> str:
    """Returns a sentence about the machine."""
    rates = f"{machine['flops'] / 1e9:.0f} GFLOP/s of products, {machine['copy_bytes'] / 1e9:.1f} GB/s of copies"
    return (
        f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}; in float32 {rates}.\n"
        "Gains are relative to `native`, with 95 % intervals over rounds; above 1 is faster. GFLOPS are nominal: the\n"
        "products of the definition by the time."
    )


def table(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown."""
    names = list(header)
    rows = [names, ["---"] * len(names), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def error_table(rows: list[Row]) -> str:
    """Returns errors by backend, and how often the original's metric raises a false alarm."""
    lines = []
    for name in _backends(rows):
        group = [row for row in rows if row["backend"] == name]
        worst = max(group, key=lambda row: row["error"])
        beyond = sorted({row["shape"] for row in group if row["error"] > row["tolerance"]})
        alarms = sum(row["alarms"] for row in group)
        seeds = sum(row["seeds"] for row in group)
        lines.append(
            [
                f"`{name}`",
                f"{worst['error']:.1e} ({worst['shape']}, {worst['direction']})",
                f"{worst['tolerance']:.0e}",
                ", ".join(beyond) or "none",
                f"{100 * alarms / seeds:.0f} % of {seeds:,}",
            ]
        )
    return table(("backend", "largest error", "tolerance", "shapes beyond it", "original's metric above 1e-6"), lines)


def time_table(rows: list[Row]) -> str:
    """Returns one table for each direction."""
    parts = []
    for direction in DIRECTIONS:
        lines = [_cells(row) for row in rows if row["direction"] == direction]
        parts.append(f"## {direction}\n\n{table(COLUMNS, lines)}")
    return "\n\n".join(parts)


def _cells(row: Row) -> list[str]:
    low, high = row["ms_interval"]
    return [
        row["shape"],
        f"`{row['backend']}`",
        f"{row['ms']:.3g}",
        f"{low:.3g} to {high:.3g}",
        _interval(row["gain"]),
        f"{row['nominal_gflops']:.1f}",
        _percent(row),
        f"{row['workspace_bytes']:,}",
    ]


def _interval(gain: Iterable[float]) -> str:
    value, low, high = gain
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _percent(row: Row) -> str:
    return f"{100 * row['roofline']:.0f} %"


def time_summary(rows: list[Row]) -> str:
    """Returns where a backend is faster than torch's choice, by how much, and the machine's noise."""
    groups = _groups(rows)
    means = [_mean_cells([group for group in groups if group[0]["direction"] == name], name) for name in DIRECTIONS]
    header = ("direction", "shapes", "faster than `native`", "geometric mean of the fastest", "A/A beyond its interval")
    faster = [_fastest_cells(group) for group in groups if _fastest(group)["backend"] != "native"]
    names = ("shape", "direction", "fastest", "gain", "of the roofline", "`native` of the roofline")
    return f"{table(header, means)}\n\n{table(names, faster)}"


def _groups(rows: list[Row]) -> list[list[Row]]:
    """Returns the rows of each shape and direction."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["shape"], row["direction"]), []).append(row)
    return list(groups.values())


def _native(group: list[Row]) -> Row:
    return next(row for row in group if row["backend"] == "native")


def _fastest(group: list[Row]) -> Row:
    """Returns the fastest backend whose interval lies above 1, or else ``native``."""
    faster = [row for row in group if row["backend"] != CONTROL and row["gain"][1] > 1]
    return max(faster, key=lambda row: row["gain"][0], default=_native(group))


def _mean_cells(groups: list[list[Row]], direction: str) -> list[str]:
    fastest = [_fastest(group) for group in groups]
    mean = math.exp(np.mean([math.log(row["gain"][0]) for row in fastest]))
    controls = [row["gain"] for group in groups for row in group if row["backend"] == CONTROL]
    beyond = sum(not low <= 1 <= high for _, low, high in controls)
    count = sum(row["backend"] != "native" for row in fastest)
    return [direction, str(len(groups)), str(count), f"{mean:.2f}", f"{beyond} of {len(controls)}"]


def _fastest_cells(group: list[Row]) -> list[str]:
    row = _fastest(group)
    share = _percent(_native(group))
    return [row["shape"], row["direction"], f"`{row['backend']}`", _interval(row["gain"]), _percent(row), share]


def _backends(rows: list[Row]) -> list[str]:
    return [name for name in dict.fromkeys(row["backend"] for row in rows) if name != CONTROL]


def draw(rows: list[Row], path: Path) -> None:
    """Draws the fraction of the roofline by shape and backend, one panel for each direction."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    backends = _backends(rows)
    figure, panels = plt.subplots(1, 3, figsize=(15, 2 + 0.24 * len(shapes)), sharey=True, layout="constrained")
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        shares = np.full((len(shapes), len(backends)), np.nan)
        for row in rows:
            if row["direction"] == direction and row["backend"] in backends:
                shares[shapes.index(row["shape"]), backends.index(row["backend"])] = 100 * row["roofline"]
        image = axes.imshow(shares, aspect="auto", cmap="viridis", vmin=0, vmax=100)
        for (line, column), share in np.ndenumerate(shares):
            if not np.isnan(share):
                color = "white" if share < BRIGHT else "black"
                axes.text(column, line, f"{share:.0f}", ha="center", va="center", fontsize=7, color=color)
        axes.set_title(direction)
        axes.set_xticks(range(len(backends)), backends, rotation=45, ha="right", fontsize=8)
        axes.set_yticks(range(len(shapes)), shapes, fontsize=7)
    figure.colorbar(image, ax=panels, label="% of the roofline", shrink=0.5)
    figure.savefig(path, dpi=110)
    plt.close(figure)
