"""Plots for reports, with a common style, if matplotlib is installed."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from runner.system.files import replacing
from runner.system.secrets import redact

NO_PLOTS = "No plots: matplotlib is not installed here (pip install 'proven-runner[plots]')."
# Distinguishable for the colour-blind (Okabe and Ito 2008); a mark or a word repeats the meaning of
# every colour:
BLUE, VERMILLION, GREEN, ORANGE = "#0072b2", "#d55e00", "#009e73", "#e69f00"
SKY, PURPLE, GREY, BLACK = "#56b4e9", "#cc79a7", "#5a5a5a", "#000000"
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
_INCHES_A_MARK, _INCHES_A_LETTER = 0.45, 0.05  # in a legend, with what is between two labels


def draw_all(pictures: Mapping[str, tuple[Callable[[Any], None], tuple[float, float]]], folder: Path) -> list[Path]:
    """Has every picture drawn on a figure of its size in inches, and keeps it as PNG by its name."""
    files = []
    for name, (picture, size) in pictures.items():
        path = folder / f"{name}.png"
        if draw_png(picture, size, path):
            files.append(path)
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
        if isinstance(formatter := axis.get_major_formatter(), FuncFormatter):
            axis.set_major_formatter(FuncFormatter(partial(_label, formatter)))


def _label(formatter: Callable[[float, int | None], str], value: float, position: int | None = None) -> str:
    """The label of a tick without secrets."""
    return redact(formatter(value, position))


def legend(canvas: Any) -> None:
    """Adds a legend of all panels below them, each label once."""
    handles: dict[str, Any] = {}
    for axes in canvas.axes:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    widths = [_INCHES_A_MARK + _INCHES_A_LETTER * len(label) for label in handles]
    columns = len(handles) if sum(widths) <= canvas.get_figwidth() else int(canvas.get_figwidth() / max(widths))
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
    others = [name for name in names if name not in fixed]
    shown = len(free) if len(others) <= len(free) else len(free) - 1
    colours = dict.fromkeys(names, GREY) | {name: fixed[name] for name in names if name in fixed}
    return colours | dict(zip(others[:shown], free, strict=False))
