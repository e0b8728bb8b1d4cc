"""Foreign text in a form that a terminal cannot take for commands."""

import re

_UNPRINTABLE = re.compile(
    # Control characters except tab and line feed: sequences that command a terminal
    # start with them.
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"
    # Marks that reverse the direction of writing, or make it depend on what is near.
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"
    # Line separators beyond ASCII.
    r"\u2028\u2029"
    # Halves of surrogate pairs, which represent bytes of file names that are not UTF-8 and which no
    # stream can encode.
    r"\ud800-\udfff]"
)
_UNDECODABLE = re.compile(r"[\ud800-\udfff]")
_ESCAPED_HALF = re.compile(r"\\u(d[89a-f][0-9a-f]{2})")
_UNPRINTABLE_IN_LINE = re.compile(rf"[\t\n]|{_UNPRINTABLE.pattern}")


def escape(text: str) -> str:
    r"""Returns the text with everything that commands a terminal or hides text written as ``\u001b``.

    JSON, YAML and Python read this form in quotes as the same character, so that printed data stay data. Tabs and line
    feeds stay. Text without such characters is returned as it is.
    """
    return _UNPRINTABLE.sub(_written, text)


def escape_line(text: str) -> str:
    r"""Returns the text as ``escape`` does, with tabs and line feeds escaped too: a name is one line."""
    return _UNPRINTABLE_IN_LINE.sub(_written, text)


def escape_undecodable(text: str) -> str:
    r"""Returns the text with each half of a surrogate pair written as ``\udce9``.

    Python decodes a byte of a file name that is not UTF-8 to such a half. Databases and strict
    readers of JSON refuse it. Other text is returned as it is.
    """
    return _UNDECODABLE.sub(_written, text)


def restore_undecodable(text: str) -> str:
    """Returns the text that ``escape_undecodable`` has made this one of."""
    return _ESCAPED_HALF.sub(lambda match: chr(int(match[1], 16)), text)


def is_printable(text: str) -> bool:
    """Returns whether ``escape`` returns the text as it is."""
    return _UNPRINTABLE.search(text) is None


def _written(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
