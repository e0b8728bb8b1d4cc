"""Pictures beside a report, where matplotlib is installed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

NO_PLOTS = "No plots: matplotlib is not installed here (pip install 'proven-runner[plots]')."


def draw_all(pictures: Mapping[str, tuple[Callable[[Any], None], tuple[float, float]]], folder: Path) -> list[Path]:
    """Has every picture drawn on a figure of its size in inches, and keeps it as PNG by its name."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return []
    files = []
    for name, (picture, size) in pictures.items():
        files.append(folder / f"{name}.png")
        with rc_context({"font.size": 8}):
            canvas = Figure(figsize=size, layout="constrained")
            picture(canvas)
            canvas.savefig(files[-1], dpi=120)
    return files
