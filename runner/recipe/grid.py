"""Grids: assignments with several values, ``optimizer.lr=1e-3,3e-3``, of which every combination is
trained.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from runner.system.errors import UsageError

MOST_RUNS = 1000
"""Largest number of combinations."""
_CLOSING = {"[": "]", "{": "}"}
_FUNCTION = re.compile(r"(range|choice|interval|linspace|logspace)\(.*\)")
"""Functions that other tools offer for several values."""


def grid_of(assignments: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Returns the dotted paths with several values, and the assignments of every combination.

    Values are separated by commas outside of brackets, braces and quotes. Without several values,
    there is no path, and the only combination has the assignments as they are.

    Raises:
        UsageError: A value is empty, or a function of other tools; a setting with several values
            is assigned twice, or there are too many combinations.
    """
    choices = []
    paths: list[str] = []
    assigned: list[str] = []
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if _FUNCTION.fullmatch(value.strip()):
            raise UsageError(
                f"{assignment}: several values are separated by commas, as in {path}=1,2; "
                "a study searches ranges (runner study)"
            )
        values = split_values(value)
        assigned.append(path)
        if len(values) == 1:
            choices.append([assignment])
            continue
        if not all(values):
            raise UsageError(
                f"{assignment}: a value is empty; text with commas needs quotes: "
                f"'{path}=\"{value}\"'"
            )
        paths.append(path)
        choices.append([f"{path}{equals}{item}" for item in values])

    for path in paths:
        if assigned.count(path) > 1:
            raise UsageError(
                f"{path}: has several values, and is assigned more than once"
            )
    combinations = list(itertools.islice(itertools.product(*choices), MOST_RUNS + 1))
    if len(combinations) > MOST_RUNS:
        raise UsageError(f"a grid has at most {MOST_RUNS:,} runs; use a study for more")
    return paths, [list(combination) for combination in combinations]


def split_values(text: str) -> list[str]:
    """Returns the values that commas separate, outside of brackets, braces and quotes."""
    values = [""]
    closing: list[str] = []
    for character in text:
        value = values[-1]
        is_quoted = bool(closing) and closing[-1] in "'\""
        if closing and character == closing[-1]:
            closing.pop()
        elif character in _CLOSING and not is_quoted:
            closing.append(_CLOSING[character])
        elif character in "'\"" and not is_quoted and (closing or not value.strip()):
            # A quote inside of a word is an apostrophe.
            closing.append(character)
        if character == "," and not closing:
            values.append("")
        else:
            values[-1] = value + character
    return [value.strip() for value in values] if len(values) > 1 else [text]
