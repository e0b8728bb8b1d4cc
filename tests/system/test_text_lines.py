"""Lines of text for a screen."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.system.text_lines import figure, labelled, wrapped

WORDS = st.lists(
    st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=30), max_size=12
)


@given(WORDS, st.integers(20, 90), st.integers(0, 8))
def test_every_word_is_whole_and_in_its_place(words, width, hang):
    lines = list(wrapped(" ".join(words), width, hang))
    assert " ".join(lines).split() == words
    assert all(len(line) <= width or len(line.split()) == 1 for line in lines)


def test_what_is_wrapped_goes_on_beneath_its_beginning_and_a_path_stays_whole():
    path = "/a/" + "long/" * 20 + "path"
    assert list(wrapped(f"  kept in the folder {path}\n\nnext", 24, hang=2)) == [
        "  kept in the folder", f"    {path}", "", "next",
    ]  # fmt: skip


def test_a_command_goes_on_as_a_shell_reads_it_and_what_stands_before_it_does_not():
    command = "runner resume marl_phase2-1437ffb1 --plugin one.py --allow-drift"
    assert list(wrapped(f"it was stopped here; the command is: {command}", 34)) == [
        "it was stopped here; the command",
        "is: runner resume \\",
        "marl_phase2-1437ffb1 --plugin \\",
        "one.py --allow-drift",
    ]
    assert next(wrapped(f"the command is: {command}", 34)) == "the command is: runner resume \\"
    assert list(wrapped(command, len(command))) == [command]
    assert list(wrapped("runner resume: 0 s, reading runs", 28)) == ["runner resume: 0 s, reading", "runs"]


def test_a_label_stands_beside_the_first_line_alone():
    assert list(labelled("run   ", ["one two three four five six", "seven"], 26)) == [
        ("run   ", "one two three four"), ("      ", "five six"), ("      ", "seven"),
    ]  # fmt: skip
    assert list(labelled("run   ", [], 26)) == []


@given(st.floats(-1e14, 1e14), st.integers(1, 6))
def test_a_number_has_no_exponent_that_stands_for_zeros_and_is_right_to_its_last_digit(value, digits):
    text = figure(value, digits)
    assert "e+" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.51 * 10 ** (1 - digits), abs=1e-300)


def test_numbers_are_as_long_as_asked_or_whole():
    numbers = [0.99171, 12345.6, 9999.6, 9999.4, -10090.2, 0.0000123456, math.inf, math.nan]
    assert " ".join(map(figure, numbers)) == "0.9917 12,346 10,000 9,999 -10,090 1.235e-05 inf nan"
    assert (figure(123.4, 2), figure(5100.0, 2), figure(99.7, 2)) == ("123", "5,100", "100")
