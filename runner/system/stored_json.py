"""JSON of stored files: limited in size and depth before it is parsed, and sealed by a
SHA-256 of the text.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.system.files import read_regular

MOST_BYTES = 256 * 2**20
"""Largest JSON text of a stored file."""
MOST_SEPARATORS = 10_000_000
"""Largest number of brackets and commas in such a text, which bounds the number of its values."""
SHA256_DIGITS = 64
_HEXADECIMAL = frozenset("0123456789abcdef")


def parse_json(text: str) -> Any:
    """Parses JSON.

    Raises:
        ValueError: The text is not JSON, too large, or nested too deeply.
    """
    check_size(text)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def json_number(value: Any) -> Any:
    """Returns ``NaN``, ``Infinity`` or ``-Infinity`` as text, for which JSON has no number; any
    other value as it is.
    """
    is_number = not isinstance(value, float) or math.isfinite(value)
    return value if is_number else json.dumps(value)


def json_text(values: Any, **options: Any) -> str:
    """Returns values as JSON for other programs: numbers that JSON does not have are text.

    Args:
        values: Mappings, sequences, and what JSON has.
        options: As of ``json.dumps``.
    """
    return json.dumps(json_values(values), allow_nan=False, **options)


def json_values(values: Any) -> Any:
    """Returns a tree of values in which ``json_number`` has replaced every number."""
    if isinstance(values, Mapping):
        return {name: json_values(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [json_values(value) for value in values]
    return json_number(values)


def check_size(text: str) -> None:
    """Raises a ValueError if a JSON text exceeds the limits with which stored files are read."""
    if len(text) > MOST_BYTES:
        raise ValueError(f"is larger than {MOST_BYTES:,} bytes")
    if sum(map(text.count, "{[,")) > MOST_SEPARATORS:
        raise ValueError(f"has more than about {MOST_SEPARATORS:,} values")


def sealed(values: Mapping[str, Any]) -> str:
    """Returns a line of JSON, and one with its SHA-256."""
    text = json.dumps(values)
    return f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n"


def split_sealed(path: Path) -> tuple[dict[str, Any], bool]:
    """Reads a file that ``sealed`` has made.

    Returns:
        Its values, and whether its SHA-256 is right.

    Raises:
        OSError: The file is missing or not a regular file.
        ValueError: It is not a JSON object, or too large.
    """
    text, _, digest = read_regular(path, MOST_BYTES).decode().partition("\n")
    values = parse_json(text)
    if not isinstance(values, dict):
        raise ValueError("is not a mapping")
    return values, digest == f"{hashlib.sha256(text.encode()).hexdigest()}\n"


def is_digest(value: object) -> bool:
    """Returns whether a value is a SHA-256 in hexadecimal digits."""
    return isinstance(value, str) and len(value) == SHA256_DIGITS and _HEXADECIMAL.issuperset(value)


def is_count(value: object) -> bool:
    """Returns whether a value is an integer that is not negative and fits into 64 bits."""
    return type(value) is int and 0 <= value < 2**63


def is_finite_number(value: object) -> bool:
    """Returns whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
