"""Files of tokens, each with a description next to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from runner.api import Config, UsageError, fingerprint_of_files, replacing

from .tokenizers import load

PREPARE = "runner data prepare TEXT.txt --tokenizer tiktoken:gpt2 --out {name}"
CHECKED = 2**31
"""Tokens at each end of a file that are compared with the size of the vocabulary."""
_PART = 2**24
"""Tokens that are read at a time."""


class TokenFileDescription(Config):
    """The JSON next to a file of tokens, with the name of the file and ``.json`` appended."""

    tokenizer: str
    """Name of the tokenizer."""
    vocabulary: Annotated[int, Field(ge=1, le=2**32)]
    """Number of different tokens."""
    dtype: Literal["uint16", "uint32"]
    """Type of the tokens in the file, little-endian."""
    tokens: Annotated[int, Field(ge=0)] | None = None
    """Number of tokens; None is not compared with the file."""
    fingerprint: str | None = None
    """Digest of the file; None is not compared with the file."""
    characters: str | None = None
    """The characters of the tokens, if each is one character."""

    @property
    def item_bytes(self) -> int:
        """Bytes of a token."""
        return np.dtype(self.dtype).itemsize


def description_path(path: Path) -> Path:
    """Returns the path of the description of a file of tokens."""
    return path.with_name(f"{path.name}.json")


def write_tokens(texts: Sequence[Path], tokenizer_name: str, path: Path) -> TokenFileDescription:
    """Converts texts to one file of tokens with its description.

    Args:
        texts: Text files in UTF-8, in this order.
        tokenizer_name: Name of a tokenizer for ``tokenizers.load``.
        path: The file. Each file is replaced only when it is complete.

    Raises:
        UsageError: A text or the tokenizer cannot be used, or the file cannot be written.
    """
    tokenizer = load(tokenizer_name, texts)
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocabulary <= 2**16 else "uint32"
    count = 0
    try:
        with replacing(path) as partial, partial.open("xb") as file:
            for text in texts:
                for tokens in tokenizer.tokens(text):
                    file.write(tokens.astype(f"<{np.dtype(dtype).str[1:]}").tobytes())
                    count += len(tokens)
            if not count:
                raise UsageError(f"{', '.join(map(str, texts))}: there is no text to convert")
        description = TokenFileDescription(
            tokenizer=tokenizer.name,
            vocabulary=tokenizer.vocabulary,
            dtype=dtype,
            tokens=count,
            fingerprint=fingerprint_of_files([path]),
            characters=tokenizer.characters,
        )
        with replacing(description_path(path)) as partial:
            partial.write_text(f"{json.dumps(description.model_dump(), indent=1)}\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out: {path} cannot be written: {error.strerror or error}") from error
    return description


def read_description(path: Path) -> TokenFileDescription:
    """Returns the description of a file of tokens.

    Raises:
        UsageError: There is none, or it has an error. The message names the key and the fix.
    """
    place = description_path(path)
    again = f"prepare the file again ({PREPARE.format(name=path.name)})"
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
        return TokenFileDescription.model_validate(content)
    except FileNotFoundError:
        hint = f"{again}, or write it: {{tokenizer: ..., vocabulary: 50257, dtype: uint16}}"
        raise UsageError(f"data.file: {path} has no description {place.name} next to it: {hint}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the content"
        raise UsageError(f"data.file: {place}: {key}: {first['msg']}; correct it, or {again}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"data.file: {place} cannot be read: {error}; {again}") from error


def read_tokens(path: Path, description: TokenFileDescription) -> NDArray[Any]:
    """Returns the tokens of a file, mapped into memory, as signed numbers of the same size.

    Raises:
        UsageError: The file is not the one that its description describes.
    """
    place = description_path(path).name
    size = path.stat().st_size
    if size % description.item_bytes:
        raise UsageError(
            f"data.file: {path} has {size:,} bytes, no multiple of a {description.dtype}: see dtype in {place}"
        )
    count = size // description.item_bytes
    if description.tokens not in (None, count):
        problem = f"has {count:,} tokens of {description.dtype}, and {place} describes {description.tokens:,}"
        raise UsageError(f"data.file: {path} {problem}: correct tokens or dtype there, or prepare the file again")
    if description.fingerprint not in (None, fingerprint_of_files([path])):
        problem = f"is not the file that {place} describes: its fingerprint is another one"
        raise UsageError(f"data.file: {path} {problem}; prepare the file again")
    if not count:
        raise UsageError(f"data.file: {path} has no tokens; prepare the file again")

    tokens: NDArray[Any] = np.memmap(path, np.dtype(description.dtype), mode="c")
    for start in _checked_parts(count):
        part = tokens[start : start + _PART]
        largest = int(part.max())
        if largest >= description.vocabulary:
            position = start + int(part.argmax())
            limit = f"the vocabulary of {description.vocabulary:,} in {place}"
            raise UsageError(
                f"data.file: {path}: token {largest:,} at position {position:,} is outside of {limit}: "
                "correct vocabulary or dtype there, or prepare the file again"
            )
    signed: NDArray[Any] = tokens.view(np.dtype(description.dtype).str.replace("u", "i"))
    return signed


def _checked_parts(count: int) -> list[int]:
    """Returns the positions of the parts whose tokens are compared with the vocabulary."""
    starts = range(0, count, _PART)
    return [start for start in starts if start < CHECKED or start >= count - CHECKED]
