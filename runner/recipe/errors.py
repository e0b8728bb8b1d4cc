"""Problems in a recipe, each with its place in a file or on the command line."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from runner.system.errors import UsageError
from runner.system.secrets import redact

_EXCERPT = 120
"""Characters of a source line that are shown around the caret."""


@dataclass(frozen=True)
class Place:
    """Where a value was written."""

    source: Path | str
    """A file; or, for what stands in no file, its name (``--set #1``, ``default``)."""
    line: int = 0
    """Counted from 1; 0 if the place is the source as a whole."""
    column: int = 0
    """Counted from 1, in characters."""
    text: str = ""
    """The whole line."""

    def __str__(self) -> str:
        if isinstance(self.source, str):
            return self.source
        return f"{shown_path(self.source)}:{self.line}:{self.column}" if self.line else shown_path(self.source)

    def cited(self) -> str:
        """The place in the middle of a sentence, where no excerpt follows."""
        return f"{self} {self.text}" if isinstance(self.source, str) and self.text else str(self)

    def excerpt(self) -> str:
        """The line and below it a caret; empty if the place has no line."""
        if not self.text.strip():
            return ""
        text, before = redact(self.text), redact(self.text[: self.column - 1])  # before a cut hides half of one
        column = min(len(before), len(text))  # what is masked before it moves it
        start = max(0, column - _EXCERPT // 2) if len(text) > _EXCERPT else 0
        line = text[start : start + _EXCERPT].rstrip()
        # Tabs stay tabs, so that the caret stands where a terminal puts the character above it.
        margin = "".join("\t" if character == "\t" else " " for character in text[start:column])
        return f"    {line}\n    {margin}^"


DEFAULT = Place("default")
"""The origin of a value that nobody wrote."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a recipe."""

    place: Place
    path: str
    """Dotted path of the key; empty for the document as a whole."""
    message: str

    def __str__(self) -> str:
        headline = ": ".join(part for part in (str(self.place), self.path, self.message) if part)
        return "\n".join(part for part in (headline, self.place.excerpt()) if part)


class RecipeError(UsageError):
    """Everything that is wrong with a recipe, in the order of the files' lines."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(dict.fromkeys(problems), key=_position))
        super().__init__("\n".join(map(str, self.problems)))


def _position(problem: Problem) -> tuple[bool, str, int, int]:
    place = problem.place
    return isinstance(place.source, str), str(place.source), place.line, place.column


def shown_path(path: Path) -> str:
    """The path as a person would type it: relative if it lies below the current folder, absolute otherwise."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, or None if none is like the word."""
    matches = get_close_matches(word.lower().replace("-", "_"), list(names), n=1)
    return matches[0] if matches else None


def suggestion(word: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown word: the nearest name, or all of them if none is near."""
    known = sorted(names)
    near = nearest(word, known)
    if near is not None:
        return f" - did you mean '{near}'?"
    return f" - known: {', '.join(known)}" if known else " - none is known"
