"""Lines of text for a screen."""

import textwrap
from collections.abc import Iterable, Iterator
from itertools import chain, repeat

_NARROWEST = 20


def wrapped(text: str, width: int, hang: int = 0) -> Iterator[str]:
    """The lines of a text, none longer than the width unless a word is: a path or a command stays whole, to be copied.

    What does not fit goes on ``hang`` columns further than its line began.
    """
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + hang)
        parts = textwrap.wrap(
            line, max(_NARROWEST, width), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        yield from parts or [""]


def labelled(label: str, lines: Iterable[str], width: int) -> Iterator[tuple[str, str]]:
    """The same beside a label: pairs of what stands on the left, blanks in every line but the first, and a part."""
    parts = (part for line in lines for part in wrapped(line, width - len(label)))
    return zip(chain([label], repeat(" " * len(label))), parts, strict=False)
