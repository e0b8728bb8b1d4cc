"""Display of a comparison of runs on a terminal."""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from rich import box
from rich.table import Table

from runner.system.console import CleanText, Console
from runner.system.synthetic import SMOKE_REMARK, SYNTHETIC_REMARK
from runner.system.text_lines import figure, print_wrapped

_NAME_WIDTH = 28
_RUN_WIDTH = 13
_GAP = 3
"""Columns between two columns of a table."""
_SECTIONS = ("headline", "settings", "tags", "environment", "metrics")
_TITLES = {
    "headline": "primary metrics: last value (ratio or difference to A)",
    "metrics": "metrics: last value (ratio or difference to A)",
}
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28,}\b")
_LIST = re.compile(r",(?=\S)")
_NOISE = ("perf/", "system/", "process.", "resumed.", "source.", "tools.")
"""Beginnings of names that always differ, or that cannot matter because the digest of the code covers them."""


def show(comparison: Mapping[str, Any], everything: bool, console: Console) -> None:
    """Prints a comparison, without noise unless everything is requested.

    Runs have letters, so that columns are narrow. If the columns of all runs do not fit, further tables follow, each
    with the first run again, to which all values are compared.
    """
    runs = comparison["runs"]
    letters = list(itertools.islice(_letters(), len(runs)))
    for letter, run in zip(letters, runs, strict=True):
        status = "" if run["status"] == "FINISHED" else f" ({run['status']})"
        print_wrapped(f"{letter}  {run['name']}{status}", console, hang=3)
    synthetic = [letter for letter, run in zip(letters, runs, strict=True) if run.get("synthetic", False)]
    if synthetic:
        print_wrapped(f"{', '.join(synthetic)}: data {SYNTHETIC_REMARK}", console, style="yellow")
    for letter, run in zip(letters, runs, strict=True):
        if run.get("unsent_bytes", 0):
            advice = f"its last values are not in MLflow yet, and not here: runner sync {run['name']}"
            print_wrapped(f"{letter}: {advice}", console, style="yellow")
    smoke = [letter for letter, run in zip(letters, runs, strict=True) if run.get("smoke", False)]
    if smoke:
        print_wrapped(f"{', '.join(smoke)}: smoke test, {SMOKE_REMARK}", console, style="yellow")

    sections, hidden = _sections(comparison, everything)
    best = _best(comparison)
    for numbers in _blocks(len(runs), console.width):
        for section, rows in sections.items():
            if rows:
                console.print(CleanText(_TITLES.get(section, section), style="bold"), soft_wrap=True)
                _print_rows(
                    rows,
                    letters,
                    numbers,
                    best,
                    console,
                )
            elif section not in ("headline", "tags"):
                console.print(f"{section}: no difference", style="dim")
    if best is not None:
        print_wrapped(f"* best {comparison['objective'][1]}: {comparison['objective'][0]}", console)
    if hidden:
        console.print(f"{hidden} more differences (speed, process): --all", style="dim", highlight=False)
    if comparison.get("served", True):
        console.print(comparison["link"], soft_wrap=True, highlight=False)
    else:
        console.print("learning curves: runner ui", highlight=False)


def _letters() -> Iterator[str]:
    """Yields A to Z, then AA, AB and so on."""
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_uppercase, repeat=length):
            yield "".join(letters)


def _sections(comparison: Mapping[str, Any], everything: bool) -> tuple[dict[str, dict[str, list[Any]]], int]:
    """Returns the rows of every section, and the number of rows that are hidden."""
    sections: dict[str, dict[str, list[Any]]] = {}
    hidden = 0
    for section in _SECTIONS:
        rows = comparison.get(section, {})
        if section != "headline":
            rows = {name: row for name, row in rows.items() if name not in comparison["headline"]}
        sections[section] = {name: row for name, row in rows.items() if everything or not name.startswith(_NOISE)}
        hidden += len(rows) - len(sections[section])
    return sections, hidden


def _blocks(count: int, width: int) -> list[list[int]]:
    """Returns the numbers of the runs in every table."""
    columns = max(2, (width - _NAME_WIDTH) // (_RUN_WIDTH + _GAP))
    # The first run is in every table, because all values are compared to it.
    size = columns - 1
    following = list(range(1, count))
    starts = range(0, max(1, len(following)), size)
    return [[0, *following[start : start + size]] for start in starts]


def _best(comparison: Mapping[str, Any]) -> tuple[str, int] | None:
    """Returns the objective and the number of the run with its best value; None if that is not clear."""
    if not comparison.get("objective"):
        return None
    direction, name = comparison["objective"]
    row = comparison["headline"].get(name, ())
    values = {number: value for number, value in enumerate(row) if isinstance(value, float)}
    choose = max if direction == "maximize" else min
    number = choose(values, key=lambda number: values[number], default=-1)
    # A star on one of several values that are printed alike has no meaning.
    printed = [figure(value) for value in values.values()]
    if number < 0 or printed.count(figure(values[number])) > 1:
        return None
    return (name, number) if len(values) > 1 else None


def _print_rows(
    rows: Mapping[str, list[Any]],
    letters: Sequence[str],
    numbers: Sequence[int],
    best: tuple[str, int] | None,
    console: Console,
) -> None:
    """Prints a row for each name; where a word does not fit its column, a line for each run below the name."""
    cells = {}
    for name, row in rows.items():
        marks = ["*" if best == (name, number) else "" for number in numbers]
        cells[name] = [_cell(row, number) + mark for number, mark in zip(numbers, marks, strict=True)]
    widest = max(_NAME_WIDTH, console.width - len(numbers) * (_RUN_WIDTH + _GAP))
    name_width = max((len(name) for name in cells if len(name) <= widest), default=0)
    cell_width = (console.width - name_width) // len(numbers) - _GAP
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", width=name_width, no_wrap=True)
    for number in numbers:
        table.add_column(letters[number], max_width=cell_width, overflow="fold")

    long_rows = []
    for name, row_cells in cells.items():
        words = (word for cell in row_cells for word in cell.split())
        if len(name) <= name_width and all(len(word) <= cell_width for word in words):
            table.add_row(name, *map(CleanText, row_cells))
        else:
            long_rows.append(name)
    if table.row_count:
        console.print(table)
    for name in long_rows:
        console.print(CleanText(name), soft_wrap=True)
        for number, cell in zip(numbers, cells[name], strict=True):
            print_wrapped(f"    {letters[number]}: {cell}", console, hang=4)


def _cell(row: Sequence[Any], number: int) -> str:
    """Returns a value with its ratio to the first one if all are positive, else with its difference."""
    value = row[number]
    reference = row[0]
    if value is None:
        return "-"
    if not isinstance(value, float):
        # Spaces after commas, so that a list can be wrapped; digests are shortened.
        text = _LIST.sub(", ", str(value))
        return _DIGEST.sub(r"\1", text)
    if number == 0 or value == reference or not isinstance(reference, float):
        return figure(value)
    if all(item > 0 for item in row if isinstance(item, float)) and isfinite(value / reference):
        return f"{figure(value)} ({value / reference:.3g}x)"
    sign = "+" if value > reference else ""
    return f"{figure(value)} ({sign}{figure(value - reference, 3)})"
