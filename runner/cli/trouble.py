"""Errors and warnings on stderr: each has a word and, on a terminal, a colour."""

import logging
import re
import sys
from typing import Any

from runner.cli.option_hints import option_hint
from runner.system.errors import RunnerError
from runner.system.escapes import escape
from runner.system.secrets import redact
from runner.system.terminal import Rendered
from runner.system.text_lines import wrapped

_PLACE = re.compile(r"(.+?:\d+:\d+: )")
"""File, line and column at the start of a message about a recipe."""
_EXCERPT = "    "
"""Indentation of an excerpt from a file, and of the caret below it."""
_YELLOW = "\x1b[33m"
_RED = "\x1b[31m"
_RESET = "\x1b[0m"


def report(error: RunnerError) -> None:
    """Prints an error on stderr, without secrets. On a terminal no word is split at its edge."""
    from runner.system.console import CleanText, Console

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for number, line in enumerate(redact(str(error)).split("\n")):
        is_excerpt = line.startswith(_EXCERPT)
        text = line if is_excerpt else _with_word(line, is_first=number == 0)
        # A caret below an excerpt points into it, so excerpts are not wrapped.
        is_wrapped = console.is_terminal and not is_excerpt
        pieces = wrapped(text, console.width) if is_wrapped else [text]
        for piece in pieces:
            console.print(CleanText(piece, style="dim" if is_excerpt else "red"))


def _with_word(line: str, *, is_first: bool) -> str:
    """Returns a line with the word error: after a place, in the format of compilers, or at the
    start of the message.
    """
    match = _PLACE.match(line)
    if match:
        return f"{match[1]}error: {line[match.end() :]}"
    return f"error: {line}" if is_first else line


def report_usage(error: Any) -> int:
    """Reports an error of the command line, and returns its exit code."""
    from typer.rich_utils import rich_format_error

    from runner.cli.help import use_own_console

    use_own_console()
    # Masked before it is wrapped, which would split a secret in two.
    message = error.message.replace("Value error, ", "")
    # Only an error about an unknown option has this attribute.
    hint = option_hint(getattr(error, "option_name", ""))
    if hint:
        error.possibilities = None
    error.message = redact(f"{message}; {hint}" if hint else message)
    rich_format_error(error)
    return int(error.exit_code)


class WarningHandler(logging.Handler):
    """Prints warnings of the runner and of libraries on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one warning."""
        word = "error" if record.levelno >= logging.ERROR else "warning"
        text = f"{word}: {self.format(record)}"
        stream = sys.stderr
        if stream is None:
            return
        if not stream.isatty():
            stream.write(f"{text}\n")
            return
        from runner.system.console import Console

        console = Console(stderr=True)
        lines = "\n".join(wrapped(text, console.width))
        if console.color_system is not None:
            colour = _RED if word == "error" else _YELLOW
            lines = f"{colour}{word}:{_RESET}{escape(redact(lines[len(word) + 1 :]))}"
        stream.write(Rendered(f"{lines}\n"))


def show_warnings() -> None:
    """Prints log records of this process that no other handler processes."""
    logging.lastResort = WarningHandler(logging.WARNING)
