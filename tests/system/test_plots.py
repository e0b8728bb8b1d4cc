import itertools
import string
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from runner.system import plots
from runner.system.plots import BLUE, GREY, ORANGE, PALETTE, colours_by_name

COLOURS = {name: value for name, value in vars(plots).items() if str(value).startswith("#")}
SIGHT = {
    "all": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "no green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "no blue": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""What is seen of linear red, green and blue by whom (Machado, Oliveira and Fernandes 2009)."""
FAR = 15
"""In CIE Lab, in which 2.3 is the least difference that is noticed."""


def seen(colour, sight):
    """A colour in CIE Lab."""
    linear = np.array([each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in to_rgb(colour)])
    seen = np.clip(sight @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ seen
    scaled = xyz / (0.9505, 1, 1.089)
    x, y, z = np.where(scaled > 0.008856, np.cbrt(scaled), 7.787 * scaled + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("who", SIGHT)
def test_any_two_colours_are_told_apart_by_everybody(who):
    assert len(COLOURS) == 8
    found = {name: seen(colour, np.array(SIGHT[who])) for name, colour in COLOURS.items()}
    alike = [pair for pair in itertools.combinations(found, 2) if np.linalg.norm(found[pair[0]] - found[pair[1]]) < FAR]
    assert alike == []


@given(
    st.lists(st.text(string.ascii_lowercase, min_size=1, max_size=3), unique=True, max_size=12),
    st.dictionaries(st.sampled_from(["draw", "update", "other"]), st.sampled_from([BLUE, ORANGE, GREY])),
)
def test_categories_have_colours_of_their_own_and_the_last_ones_are_grey_if_there_are_too_few(names, fixed):
    names += [name for name in fixed if name not in names]
    colours = colours_by_name(names, fixed)
    assert list(colours) == names
    assert all(colours[name] == colour for name, colour in fixed.items())

    free = [colour for colour in PALETTE if colour not in fixed.values()]
    others = [colours[name] for name in names if name not in fixed]
    if len(others) <= len(free):
        assert others == free[: len(others)]
    else:
        assert others == [*free[:-1], *[GREY] * (len(others) - len(free) + 1)]


def _draw_line(values, canvas):
    canvas.subplots().plot(values)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_picture_that_cannot_be_drawn_is_a_warning_and_the_others_are_drawn(tmp_path, caplog):
    pictures = {
        "largest": (partial(_draw_line, [0.0, 1.7e308, -1.7e308]), (3, 2)),
        "usual": (partial(_draw_line, [0.0, 1.0]), (3, 2)),
    }
    (tmp_path / "largest.png").write_bytes(b"of an earlier report")
    assert plots.draw_all(pictures, tmp_path) == [tmp_path / "usual.png"]
    assert not (tmp_path / "largest.png").exists()
    assert "largest.png could not be drawn: " in caplog.text
