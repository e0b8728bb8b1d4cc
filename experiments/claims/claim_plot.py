"""Draws claimed figures next to measured ones."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claim_model import Report

from runner.system.plots import BLUE, GREY, ORANGE, PURPLE, VERMILLION, draw_png, legend

PANELS = {
    "x": "times as fast (logarithmic)",
    "%": "saved memory, bytes or waiting, %",
    "better": "better metric, %",
}
"""Title of the axis, by unit."""
MARKS = {
    "true": (BLUE, "o"),
    "depends on": (PURPLE, "s"),
    "partly": (ORANGE, "D"),
    "undecided": (GREY, "^"),
    "false": (VERMILLION, "X"),
}
"""Colour and marker of each answer."""
ROW_INCHES = 0.2


@dataclass(frozen=True)
class PlotRow:
    """A claim in the plot.

    Attributes:
        name: Report and technique.
        claimed: Ends of the claimed range.
        points: Value and interval ends of each measurement.
        answer: The answer, which decides the colour.
    """

    name: str
    claimed: tuple[float, float]
    points: tuple[tuple[float, float, float], ...]
    answer: str


def plot_rows(reports: Sequence[Report], unit: str) -> list[PlotRow]:
    """Returns the claims of a unit that have a claimed and a measured figure."""
    rows = []
    for report in reports:
        for claim in report.claims:
            pairs = [
                (claim.claimed_for(measurement), measurement)
                for measurement in claim.measurements
                if measurement.unit == unit and measurement.value is not None
            ]
            ranges = [claimed for claimed, _ in pairs if claimed is not None]
            if not ranges:
                continue
            claimed = (min(low for low, _ in ranges), max(high for _, high in ranges))
            points = tuple(
                (measurement.value, *(measurement.interval or (measurement.value, measurement.value)))
                for _, measurement in pairs
            )
            rows.append(PlotRow(f"{claim.technique} ({report.name})", claimed, points, claim.answer))
    return rows


def digest_of(reports: Sequence[Report]) -> str:
    """Returns a digest of all that is drawn."""
    rows = {unit: [vars(line) for line in plot_rows(reports, unit)] for unit in PANELS}
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def draw(reports: Sequence[Report], path: Path) -> None:
    """Draws the plot and writes the digest of its data into the file.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    panels = {unit: plot_rows(reports, unit) for unit in PANELS}
    height = 1.2 + ROW_INCHES * max(map(len, panels.values()))

    def picture(canvas: Any) -> None:
        axes = canvas.subplots(1, len(panels))
        for panel, (unit, rows) in zip(axes, panels.items(), strict=True):
            draw_panel(panel, rows, unit)
        legend(canvas)

    if not draw_png(picture, (15.0, height), path):
        raise RuntimeError("matplotlib is not installed: pip install 'proven-runner[plots]'")
    add_digest(path, digest_of(reports))


def draw_panel(panel: Any, rows: Sequence[PlotRow], unit: str) -> None:
    """Draws the claims of one unit, the first one at the top."""
    neutral = 1.0 if unit == "x" else 0.0
    panel.axvline(neutral, color=GREY, linewidth=0.8)
    # Empty lines put all answers into the legend, in their order.
    for answer, (colour, marker) in MARKS.items():
        panel.plot([], [], marker, color=colour, markersize=4, label=f"measured: {answer}")
    for position, line in enumerate(rows):
        low, high = line.claimed
        # A claim of a single figure is a line of the height of a bar.
        panel.fill_betweenx(
            [position - 0.32, position + 0.32], low, high, color="#bdbdbd", linewidth=1.5, label="claimed"
        )
        colour, marker = MARKS[line.answer]
        for value, start, end in line.points:
            panel.plot([start, end], [position, position], color=colour, linewidth=1.0)
            panel.plot([value], [position], marker, color=colour, markersize=4)
    panel.set_yticks(range(len(rows)), [line.name for line in rows])
    panel.invert_yaxis()
    panel.set_xlabel(PANELS[unit])
    if unit == "x":
        panel.set_xscale("log")
        ticks = (0.5, 1, 2, 4, 8, 16, 32)
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()


def add_digest(path: Path, digest: str) -> None:
    """Writes a digest into the text of a PNG file."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    text = PngInfo()
    text.add_text("Claims", digest)
    with Image.open(path) as image:
        image.load()
        image.save(path, pnginfo=text, dpi=image.info.get("dpi", (144, 144)))


def read_digest(path: Path) -> str:
    """Returns the digest that ``draw`` has written into a file."""
    from PIL import Image

    with Image.open(path) as image:
        return str(image.info.get("Claims", ""))
