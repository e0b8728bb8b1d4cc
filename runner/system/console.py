"""Rich output whose text is escaped: what is printed of a recipe, a record or an error cannot command the terminal."""

import sys
from collections.abc import Iterable
from typing import Any, Self, TextIO

import rich.console
import rich.text
from rich.file_proxy import FileProxy
from rich.segment import Segment
from rich.style import Style

from runner.system.escapes import escape
from runner.system.secrets import redact
from runner.system.terminal import Rendered, RenderedOutput, clean


class CleanText(rich.text.Text):
    """Styled text without secrets, whose characters are escaped."""

    def __init__(self, text: str = "", style: str | Style = "", **options: Any) -> None:
        super().__init__(_shown(text), style, **options)

    def append(self, text: rich.text.Text | str, style: str | Style | None = None) -> Self:
        """Appends text, without secrets and escaped."""
        super().append(_shown(text) if isinstance(text, str) else text, style)
        return self


class Console(rich.console.Console):
    """A console that escapes all text which it is given, and takes nothing in it for markup.

    Args:
        file: Receives what is rendered; stdout by default, or stderr.
        stderr: Whether the default is stderr.
        options: As of rich's console.
    """

    def __init__(self, *, file: TextIO | None = None, stderr: bool = False, **options: Any) -> None:
        def stream() -> TextIO:
            return file or (sys.stderr if stderr else sys.stdout)

        output: Any = RenderedOutput(stream)
        super().__init__(file=output, **({"markup": False, "emoji": False} | options))

    def render_str(self, text: str, **options: Any) -> rich.text.Text:
        """Returns a str as styled text."""
        return super().render_str(_shown(text), **options)

    def render(
        self,
        renderable: rich.console.RenderableType,
        options: rich.console.ConsoleOptions | None = None,
    ) -> Iterable[Segment]:
        """Renders anything that can be shown. The text of any segment is escaped, whatever has made it."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else escape(segment.text)
            yield segment if text is segment.text else Segment(text, segment.style)


class PrintedLines(FileProxy):
    """A stream whose lines appear above a live display, without colours."""

    def write(self, text: str) -> int:
        """Prints the lines that the text ends."""
        super().write(text if isinstance(text, Rendered) else clean(text))
        return len(text)


def _shown(text: str) -> str:
    # Before the width is measured, and before the end of a line tears a secret, which is not found any more.
    return escape(redact(text))
