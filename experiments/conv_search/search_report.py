"""Writes the summary of ``conv_search.py``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest, bootstrap

NATIVE = "native"


def write_report(results: Any, path: Path) -> None:
    """Writes tables and figures of everything that was measured."""
    lines = ["# What the search selects, and what that is worth", ""]
    machine = results.of("machine").get("machine", {})
    if machine:
        lines += [f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}.", ""]
    lines += [*_of_aa(results.of("aa")), *_of_shapes(results.of("search"), results.of("again"))]
    lines += _of_calls(results.of("calls"))
    path.write_text("\n".join(lines).rstrip() + "\n")


def _of_aa(rows: dict[str, dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    natives = sum(row["is_native"] for row in rows.values())
    low, high = binomtest(natives, len(rows)).proportion_ci(method="wilson")
    share = f"{natives} of {len(rows)} searches between identical backends selected `native`"
    return [f"A/A: {share} (95 % interval of the share {low:.2f} to {high:.2f}; at least 95 of 100).", ""]


def _of_shapes(searched: dict[str, dict[str, Any]], again: dict[str, dict[str, Any]]) -> list[str]:
    if not again:
        return []
    gains = [row["gain"] for row in again.values()]
    logs = np.log([gain[0] for gain in gains])
    mean = math.exp(logs.mean())
    text = f"Geometric mean of the gain over {len(gains)} shapes: {mean:.3f}"
    if len(gains) > 1 and logs.std() > 0:
        interval = bootstrap((logs,), np.mean, rng=0).confidence_interval
        text += f" [{math.exp(interval.low):.3f}, {math.exp(interval.high):.3f}] (bootstrap over shapes)"
    slower = [name for name, row in again.items() if row["gain"][2] < 1]
    others = sum(set(row["plan"]) != {NATIVE} for row in again.values())
    share = 1 - len(slower) / len(gains)
    lines = [
        f"{text}. {others} plans are not `native`.", "",
        f"Timed again by an independent clock, {share:.0%} of the shapes are not slower than `native` beyond the "
        f"interval (at least 95 %){': slower are ' + ', '.join(slower) if slower else ''}.", "",
        "| shape | forward / data / weight | gain in the search | gain again | share of the roofline | search, s |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in again.items():
        first = searched[name]
        roofline = "-"
        if row["native_ms"]:
            roofline = f"{first['least_ms'] * row['gain'][0] / row['native_ms']:.0%}"
        cells = [name, " / ".join(row["plan"]), _gain(first["gain"]), _gain(row["gain"]), roofline]
        lines.append(f"| {' | '.join(cells)} | {first['seconds']:.1f} |")
    return [*lines, ""]


def _of_calls(rows: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"A search at each call against a plan that is kept, `{name}`: {_gain(row['ratio'])} "
        f"({row['every_call_ms']:.1f} ms and {row['cached_ms']:.2f} ms for a training step)."
        for name, row in rows.items()
    ]


def _gain(gain: list[float] | None) -> str:
    return "-" if gain is None else f"{gain[0]:.2f} [{gain[1]:.2f}, {gain[2]:.2f}]"
