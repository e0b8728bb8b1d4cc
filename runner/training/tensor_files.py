"""Headers of safetensors files, which are checked before the tensors are read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from runner.system.files import open_file
from runner.system.stored_json import is_count, parse_json

ROWS = "rows"
"""Name of the tensor in a file with rows of a ring."""
# Names of tensors in a checkpoint: a number, then the entry of the state in ASCII.
_NAME = re.compile(r"[0-9][\x00-\x7f]*")
_LENGTH_BYTES = 8
_HEADER_BYTES = 4096
_ENTRY_BYTES = 1024
_MOST_DIMENSIONS = 64
_DTYPES = frozenset(
    {"F64", "F32", "F16", "BF16", "BOOL", "I64", "I32", "I16", "I8", "U8"}
)
_METADATA = "__metadata__"


class TensorHeader(NamedTuple):
    """Type of a tensor as safetensors spells it, and its shape."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path, most_tensors: int) -> dict[str, TensorHeader]:
    """Reads the header of a safetensors file.

    Args:
        path: The file.
        most_tensors: Largest number of tensors in it; a longer header is refused before it is
            parsed.

    Returns:
        Type and shape of every tensor by name.

    Raises:
        OSError: The file is missing or no regular file.
        ValueError: It has more tensors, or tensors that no checkpoint has.
    """
    most_bytes = _HEADER_BYTES + _ENTRY_BYTES * most_tensors
    with open(open_file(path, os.O_RDONLY), "rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        # The length is compared before memory is allocated for the header.
        if length > most_bytes:
            raise ValueError(
                f"its header of {length:,} bytes is too long "
                f"for {most_tensors:,} tensors"
            )
        header = parse_json(file.read(length).decode())
    if not isinstance(header, dict):
        raise ValueError("its header is not a mapping")
    # Metadata of safetensors are not tensors.
    entries = {name: entry for name, entry in header.items() if name != _METADATA}
    if len(entries) > most_tensors:
        raise ValueError(
            f"has {len(entries):,} tensors, "
            f"and its checkpoint refers to {most_tensors:,}"
        )
    return {name: _header(name, entry) for name, entry in entries.items()}


def check_rows(header: Mapping[str, TensorHeader], rows: int) -> TensorHeader:
    """Returns the header of a file with the given number of rows of a ring.

    Raises:
        ValueError: It is another file.
    """
    if header.keys() != {ROWS} or header[ROWS].shape[:1] != (rows,):
        raise ValueError(f"should have {rows:,} rows of a ring, and nothing else")
    return header[ROWS]


def _header(name: str, entry: Any) -> TensorHeader:
    if name != ROWS and _NAME.fullmatch(name) is None:
        raise ValueError(f"names a tensor that no checkpoint has: {name!r:.80}")
    fields = entry if isinstance(entry, dict) else {}
    dtype = fields.get("dtype")
    shape = fields.get("shape")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(
            f"tensor {name!r:.80} has a type that no checkpoint has: {dtype!r:.40}"
        )
    if (
        not isinstance(shape, list)
        or len(shape) > _MOST_DIMENSIONS
        or not all(map(is_count, shape))
    ):
        raise ValueError(
            f"tensor {name!r:.80} has a shape that no checkpoint has: {shape!r:.80}"
        )
    return TensorHeader(dtype, tuple(shape))
