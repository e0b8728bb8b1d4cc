"""Plots for reports, with a common style, if matplotlib is installed."""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from runner.system.files import remove, replacing
from runner.system.secrets import redact

NO_PLOTS = "No plots: matplotlib is not installed here (pip install 'proven-runner[plots]')."
# Distinguishable for the colour-blind (Okabe and Ito 2008); a mark or a word repeats the meaning of
# every colour:
BLUE = "#0072b2"
VERMILLION = "#d55e00"
GREEN = "#009e73"
ORANGE = "#e69f00"
SKY = "#56b4e9"
PURPLE = "#cc79a7"
GREY = "#5a5a5a"
BLACK = "#000000"
VERDICT_MARKERS: dict[str | None, tuple[str, dict[str, Any]]] = {
    "PASS": ("PASS", {"marker": "o"}),
    "INCONCLUSIVE": ("INCONCLUSIVE", {"marker": "o", "markerfacecolor": "white"}),
    "FAIL": ("FAIL", {"marker": "X", "markersize": 7}),
    None: ("not judged", {"marker": "|", "markersize": 8, "markeredgewidth": 2}),
}
"""Label and marker of each verdict of the gate."""
PALETTE = (BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, BLACK)
"""Colours of categories, in this order."""
_LOOK: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "legend.columnspacing": 1.2,
    "savefig.facecolor": "white",  # also where the page is dark: black on nothing could not be read there
}
_DPI = 144
_log = logging.getLogger(__name__)
_INCHES_A_MARK = 0.45  # in a legend, with the space between two labels
_INCHES_A_LETTER = 0.05


def draw_all(pictures: Mapping[str, tuple[Callable[[Any], None], tuple[float, float]]], folder: Path) -> list[Path]:
    """Has every picture drawn on a figure of its size in inches, and keeps it as PNG by its name.

    A picture that matplotlib cannot draw, for instance of numbers next to the largest float, is a
    warning, because results do not depend on it.
    """
    files = []
    for name, (picture, size) in pictures.items():
        path = folder / f"{name}.png"
        try:
            if draw_png(picture, size, path):
                files.append(path)
        except (ValueError, OverflowError) as error:
            remove(path)
            _log.warning("%s could not be drawn: %s", path, error)
    return files


def draw_png(picture: Callable[[Any], None], size: tuple[float, float], path: Path) -> bool:
    """Draws a figure and writes it as PNG.

    Args:
        picture: Draws on the empty matplotlib figure that it is given.
        size: Width and height of the figure in inches.
        path: File to write. It is replaced when the picture is complete.

    Returns:
        False if matplotlib is not installed, and nothing was written.

    Raises:
        OSError: The file cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return False
    with rc_context(_LOOK):
        canvas = Figure(figsize=size, layout="constrained")
        picture(canvas)
        _redact_texts(canvas)
        with replacing(path) as unfinished:
            canvas.savefig(unfinished, dpi=_DPI, format="png")
    return True


def _redact_texts(canvas: Any) -> None:
    """Removes secrets from all texts of a figure."""
    from matplotlib.axis import Axis
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter

    for text in canvas.findobj(Text):
        text.set_text(redact(text.get_text()))
    # Labels of ticks are written again when the picture is drawn.
    for axis in canvas.findobj(Axis):
        formatter = axis.get_major_formatter()
        if isinstance(formatter, FuncFormatter):
            axis.set_major_formatter(FuncFormatter(partial(_label, formatter)))


def _label(formatter: Callable[[float, int | None], str], value: float, position: int | None = None) -> str:
    """The label of a tick without secrets."""
    return redact(formatter(value, position))


def legend(canvas: Any) -> None:
    """Adds a legend of all panels below them, each label once."""
    handles: dict[str, Any] = {}
    for axes in canvas.axes:
        axes_handles, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, axes_handles, strict=True))
    widths = [_INCHES_A_MARK + _INCHES_A_LETTER * len(label) for label in handles]
    columns = len(handles)
    if sum(widths) > canvas.get_figwidth():
        columns = int(canvas.get_figwidth() / max(widths))
    canvas.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=max(1, columns))


def colours_by_name(names: Iterable[str], fixed: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Returns a colour for each category of a plot.

    Args:
        names: Names of the categories.
        fixed: Colours of some names, which no other name receives.

    Returns:
        Colours by name, those of ``PALETTE`` in their order. If there are too few, the last names are all grey.
    """
    names = [*names]
    free = [colour for colour in PALETTE if colour not in fixed.values()]
    unassigned = [name for name in names if name not in fixed]
    count = len(free) if len(unassigned) <= len(free) else len(free) - 1
    colours = dict.fromkeys(names, GREY)
    colours |= {name: fixed[name] for name in names if name in fixed}
    return colours | dict(zip(unassigned[:count], free, strict=False))
