"""Names and paths as a person would type them."""

import inspect
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any


def shown_path(path: Path) -> str:
    """The path as a person would type it: relative if it lies below the current folder, absolute otherwise."""
    absolute = path.absolute()
    if absolute.is_relative_to(Path.cwd()):
        return str(absolute.relative_to(Path.cwd()))
    return str(absolute)


def method_named(owner: Any, name: str) -> str:
    """Returns the name of a method with its place: ``Net.loss in mine.py:37``."""
    code = inspect.unwrap(getattr(type(owner), name)).__code__
    return f"{type(owner).__name__}.{name} in {shown_path(Path(code.co_filename))}:{code.co_firstlineno}"


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, or None if none is like the word."""
    word = word.lower().replace("-", "_")
    candidates = list(names)
    matches = get_close_matches(word, candidates, n=1)
    if not matches:
        matches = [name for name in candidates if _abbreviates(word, name)]
    return matches[0] if matches else None


def _abbreviates(word: str, name: str) -> bool:
    """Returns whether one starts with the other, or consists of the other's initials (``lr``)."""
    shorter, longer = sorted((word, name.lower()), key=len)
    initials = "".join(segment[:1] for segment in longer.split("_"))
    return len(shorter) > 1 and (longer.startswith(shorter) or shorter == initials)


def suggestion(word: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown word: the nearest name, or all of them if none is near."""
    candidates = sorted(set(names))
    near = nearest(word, candidates)
    if near is not None:
        return f" - did you mean '{near}'?"
    return f" - known: {', '.join(candidates)}" if candidates else " - none is known"
