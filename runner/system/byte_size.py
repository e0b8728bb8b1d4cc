"""Sizes in bytes, as text with a unit."""

from __future__ import annotations

import re

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]+)\s*")
_LARGEST = 2**60


def parse_size(text: str) -> int:
    """Returns the bytes of a size such as ``6GiB`` or ``1.5 GB``.

    Raises:
        ValueError: The text has no number, no unit, or is out of range.
    """
    match = _SIZE.fullmatch(text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"should be a number and one of {', '.join(_UNITS)}, such as 6GiB; got {text!r}")
    size = round(float(match[1]) * factor)
    if not 1 <= size <= _LARGEST:
        raise ValueError(f"should be between 1 B and {_LARGEST // 2**40:,} TiB; got {text!r}")
    return size


def format_size(size: float) -> str:
    """Returns a size with three digits and a binary unit: ``5.63 MiB``."""
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1000 or unit == "TiB":
            break
        size /= 1024
    if unit == "B":
        return f"{size:,.0f} B"
    return f"{size:.3g} {unit}" if abs(size) < 1000 else f"{size:,.0f} {unit}"
