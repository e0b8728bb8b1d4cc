"""What pictures have on them before they are a file."""

from pathlib import Path

from matplotlib.figure import Figure

ROUNDING = 1e-6
"""Pixels by which a line that ends at the border of its panel may be off."""


def kept(monkeypatch):
    """Every figure that is saved from now on, by the name of its file."""
    found, save = {}, Figure.savefig

    def keep(figure, path, **how):
        save(figure, path, **how)
        figure.set_dpi(how["dpi"])  # so that what is measured of it is as it was saved
        # It is written beside its place first, as .NAME.PROCESS.partial.
        name = Path(path).name.removeprefix(".").removesuffix(".partial")
        found[name.partition(".png")[0]] = figure

    monkeypatch.setattr(Figure, "savefig", keep)
    return found


def told(figure):
    """The words of its legend."""
    (legend,) = figure.legends
    return {text.get_text() for text in legend.get_texts()}


def written(axes):
    """What stands at points and bars, from first to last."""
    return [text.get_text() for text in axes.texts]


def cut(figure):
    """The points and bars of which a part lies behind the border of their panel."""
    found = []
    for axes in figure.axes:
        box = axes.get_window_extent()
        for line in axes.lines:
            radius = line.get_markersize() / 2 * figure.dpi / 72 if line.get_marker() != "None" else 0
            for x, y in line.get_transform().transform(line.get_xydata()):
                within_width = box.x0 - ROUNDING <= x - radius and x + radius <= box.x1 + ROUNDING
                within_height = box.y0 - ROUNDING <= y - radius and y + radius <= box.y1 + ROUNDING
                inside = within_width and within_height
                found += [] if inside else [(line.get_label(), x, y)]
        found += [bar for bar in axes.patches if bar.get_window_extent().x1 > box.x1 + 1]
    return found


def beneath(figure):
    """The numbers at the lowest panel's horizontal axis, each with where it begins and ends, from left to right."""
    axes = figure.axes[-1]
    low, high = axes.get_xlim()
    shown = [text for text in axes.get_xticklabels(which="both") if low <= text.get_position()[0] <= high]
    boxes = [(text.get_window_extent(), text.get_text()) for text in shown if text.get_text()]
    return sorted((box.x0, box.x1, text) for box, text in boxes)
