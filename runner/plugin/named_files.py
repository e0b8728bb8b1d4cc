"""Files that the attributes of an object name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

_LARGEST_LISTING = 2_000_000
_TRIED_NAMES = 1000
"""If none of these is the name of a file, further ones are not tried."""
_LONGEST_PATH = 4096
_DEEPEST = 4


def files_of_attributes(value: Any) -> list[Path]:
    """Returns the files whose absolute paths are in nested lists, tuples and dictionaries."""
    names = set(_names(value))
    return [
        Path(name) for name in sorted(names) if os.path.isabs(name) and _is_file(name)
    ]


def files_below_folders(attributes: Mapping[str, Any]) -> dict[Path, list[str]]:
    """Returns the names of files that one attribute contains, by folders that others contain.

    A relative path with a folder in it is also searched in the working directory.

    Args:
        attributes: The attributes of an object. Names may be in nested containers.
    """
    working = Path.cwd()
    names_below: dict[Path, list[str]] = {}
    for folder in {working, *_folders(attributes)}:
        names = _names(attributes)
        first = _files(folder, islice(names, _TRIED_NAMES))
        if first:
            names_below[folder] = sorted({*first, *_files(folder, names)})
    names_below[working] = [
        name for name in names_below.get(working, ()) if os.sep in name
    ]
    return {folder: names for folder, names in sorted(names_below.items()) if names}


def _folders(attributes: Mapping[str, Any]) -> Iterator[Path]:
    for value in attributes.values():
        if isinstance(value, str | PurePath) and os.sep in str(value):
            try:
                if os.path.isdir(value):
                    yield Path(value).absolute()
            # A text may contain a null character.
            except ValueError:
                continue


def _names(value: Any, depth: int = 0) -> Iterator[str]:
    """Yields the texts and paths in nested plain containers that may name files."""
    if isinstance(value, str | PurePath):
        if len(name := str(value)) <= _LONGEST_PATH:
            yield name
        return
    # A structure that is deeper or larger is not a listing of files, and takes long to search.
    if depth > _DEEPEST or len(value) > _LARGEST_LISTING:
        return
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, str | PurePath | dict | list | tuple):
            yield from _names(item, depth + 1)


def _files(folder: Path, names: Iterator[str]) -> list[str]:
    return [
        name
        for name in names
        if not os.path.isabs(name) and _is_file(os.path.join(folder, name))
    ]


def _is_file(path: str) -> bool:
    try:
        return os.path.isfile(path)
    # A text may contain a null character.
    except ValueError:
        return False
