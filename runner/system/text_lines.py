"""Lines of text for a screen."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, repeat
from typing import TYPE_CHECKING

from runner.system.escapes import escape
from runner.system.secrets import redact

if TYPE_CHECKING:
    from runner.system.console import Console

_NARROWEST = 20
_COMMAND = re.compile(r"(?:^ *|: )(?=(?:[A-Z_]+=\S+ )?(?:runner|mlflow|optuna-dashboard) [^ ]*[^ :](?: |$))")
_CONTINUATION = " \\"


def wrapped(text: str, width: int, hang: int = 0) -> Iterator[str]:
    """Yields the clean lines of a text, none longer than the width unless a word is: a path is not
    broken, so that it can be copied.

    Continuation lines are indented by ``hang`` columns more than their line. A command at the start
    or end of a line, after a colon, continues with a backslash like in a shell.
    """
    # A secret that is torn is not found any more, and escapes have a width.
    for line in escape(redact(text)).split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + hang)
        command = _COMMAND.search(line)
        columns = width
        if command and len(line) > width:
            columns = width - len(_CONTINUATION)
        pieces = textwrap.wrap(
            line,
            max(_NARROWEST, columns),
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        if not pieces:
            yield ""
        words_before_command = len(line[: command.end()].split()) if command else 0
        word_count = 0
        for number, piece in enumerate(pieces, start=1):
            word_count += len(piece.split())
            is_continued = command and number < len(pieces) and word_count > words_before_command
            yield piece + _CONTINUATION if is_continued else piece


def figure(value: float, digits: int = 4) -> str:
    """Formats a number with the given digits, or all before the decimal point instead of an
    exponent: 12,345 and not 1.234e+04.
    """
    if 10**digits - 0.5 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.{digits}g}"


def duration(seconds: float) -> str:
    """Returns a length of time for a person: ``1.4 s``, ``23 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    total = round(seconds)
    if total < 120:
        return f"{total} s"
    if total < 7200:
        minutes, remainder = divmod(total, 60)
        return f"{minutes} min {remainder} s" if remainder else f"{minutes} min"
    hours, minutes = divmod(round(total / 60), 60)
    return f"{hours:,} h {minutes} min" if minutes else f"{hours:,} h"


def amount(count: int, unit: str) -> str:
    """Formats a count with its unit: ``1 epoch``, ``20 epochs``."""
    return f"{count:,} {unit.removesuffix('s') if count == 1 else unit}"


def processor(device: str, threads: int) -> str:
    """Returns where something is computed: ``the CPU, 2 threads``."""
    return f"{'the CPU' if device == 'cpu' else device}, {amount(threads, 'threads')}"


def figures(values: Mapping[str, float]) -> str:
    """Numbers by name: ``return 874.4, success_rate 0.5``."""
    return ", ".join(f"{name} {figure(value)}" for name, value in values.items())


def print_wrapped(text: str, console: "Console", hang: int = 0, style: str | None = None) -> None:
    """Prints a text in the form of ``wrapped``; nothing in it is interpreted as markup."""
    for line in wrapped(text, console.width, hang):
        console.print(line, style=style, soft_wrap=True, highlight=False)


def labelled(label: str, lines: Iterable[str], width: int) -> Iterator[tuple[str, str]]:
    """Yields pairs for lines with a label: the label, or blanks for all lines but the first, and a
    part of a line.
    """
    pieces = (piece for line in lines for piece in wrapped(line, width - len(label)))
    labels = chain([label], repeat(" " * len(label)))
    return zip(labels, pieces, strict=False)
