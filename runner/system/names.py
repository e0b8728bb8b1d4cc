"""Names and paths as a person would type them."""

import inspect
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any


def shown_path(path: Path) -> str:
    """The path as a person would type it: relative if it lies below the current folder, absolute otherwise."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def method_named(owner: Any, name: str) -> str:
    """Returns the name of a method with its place: ``Net.loss in mine.py:37``."""
    code = inspect.unwrap(getattr(type(owner), name)).__code__
    return f"{type(owner).__name__}.{name} in {shown_path(Path(code.co_filename))}:{code.co_firstlineno}"


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, or None if none is like the word."""
    matches = get_close_matches(word.lower().replace("-", "_"), list(names), n=1)
    return matches[0] if matches else None


def suggestion(word: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown word: the nearest name, or all of them if none is near."""
    known = sorted(set(names))
    near = nearest(word, known)
    if near is not None:
        return f" - did you mean '{near}'?"
    return f" - known: {', '.join(known)}" if known else " - none is known"
