"""Text that commands a terminal, hides what follows, or turns its direction round."""

import re
from itertools import chain

from hypothesis import strategies as st

from runner.system.console import Console

CONTROLS = [chr(code) for code in chain(range(9), range(11, 32), range(127, 160))]
MARKS = [*"\u061c\u200e\u200f\u2028\u2029", *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))]
SEQUENCES = [
    "\x1b]0;OWNED\x07", "\x1b]52;c;b3duZWQ=\x07", "\x1b]8;;http://evil.example\x1b\\", "\x1b[8m", "\x1b[2J", "\x1b[1A",
    "\x1bc", "\x1b[?1049h", "\x9b8m", "\x9d0;OWNED\x9c", "\x1bP+q\x1b\\", "\x1b[6n", "\x1b(0", "\r", "\x1b[30;40m",
]  # fmt: skip
MARKUP = ["[conceal]", "[link=http://evil.example]", "[/]", "[bold]", ":skull:", "[black on black]"]
NAME = "it\x1b]0;OWNED\x07\x1b]52;c;b3duZWQ=\x07\x1b[8m\x9b8m\x7f\x85\u202e\u2066\u200f\u061c\u2028\rIS[conceal]"
"""One name with all that no terminal should get."""
OF_CONSOLES = re.compile(r"\x1b\[(?:[01234579]|[1-9][0-9]|;)*m|\x1b\[\?25[lh]|\x1b\[[12]?K|\x1b\[[0-9]*A|\r")
"""Colours, and what a live display draws itself with; hidden text (8) is none of it."""

parts = st.sampled_from([*CONTROLS, *MARKS, *SEQUENCES, *MARKUP, "a", "é", "模", "\t", "\n", "\\", '"', "'", ": ", "#"])
texts = st.lists(parts, min_size=1, max_size=12).map("".join)


def commands_in(printed, of_consoles=False):
    """Everything in a text that a terminal would obey.

    Args:
        printed: the text.
        of_consoles: whether colours are no such thing, nor what a live display needs.
    """
    text = OF_CONSOLES.sub("", printed) if of_consoles else printed
    return sorted({character for character in text if character in CONTROLS or character in MARKS})


def console_on(file, **options):
    """A console that takes a file for a terminal with colours."""
    return Console(file=file, force_terminal=True, color_system="truecolor", width=60, **options)
