"""Sizes in bytes, as text with a unit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.system.byte_size import _SIZE as SIZE
from runner.system.byte_size import _UNITS, format_size, parse_size


@given(st.integers(1, 10**6), st.sampled_from(sorted(_UNITS)), st.sampled_from(["", " ", "  "]))
def test_a_number_and_a_unit_are_read(number, unit, gap):
    size = number * _UNITS[unit]
    for spelled in (unit, unit.lower(), unit.upper()):
        assert parse_size(f"{number}{gap}{spelled}") == size


@given(st.floats(0.001, 999), st.sampled_from(["KiB", "MiB", "GiB"]))
def test_what_is_printed_is_read_back(number, unit):
    size = max(1, round(number * _UNITS[unit]))
    assert parse_size(format_size(size).replace(",", "")) == pytest.approx(size, rel=0.006)


@given(st.text(max_size=12))
def test_anything_else_is_refused_with_a_reason(text):
    if SIZE.fullmatch(text) is None:
        with pytest.raises(ValueError, match="6GiB"):
            parse_size(text)


@pytest.mark.parametrize("text", ["6", "GiB", "-1GiB", "0GiB", "1e3GiB", "6 gigs", "", "6GiB6", "9999999999TiB"])
def test_a_wrong_size_is_refused(text):
    with pytest.raises(ValueError, match="should be"):
        parse_size(text)
