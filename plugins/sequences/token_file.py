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
_BLOCK = 2**24
"""Tokens that are read at a time."""

TokenType = Literal["uint16", "uint32"]


class TokenFileDescription(Config):
    """The JSON next to a file of tokens, with the name of the file and ``.json`` appended."""

    tokenizer: str
    """Name of the tokenizer."""
    vocabulary: Annotated[int, Field(ge=1, le=2**32)]
    """Number of different tokens."""
    dtype: TokenType
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


def write_tokens(
    texts: Sequence[Path], tokenizer_name: str, path: Path
) -> TokenFileDescription:
    """Converts texts to one file of tokens with its description.

    Args:
        texts: Text files in UTF-8, in this order.
        tokenizer_name: Name of a tokenizer for ``tokenizers.load``.
        path: The file. Each file is replaced only when it is complete.

    Raises:
        UsageError: A text or the tokenizer cannot be used, or the file cannot be written.
    """
    tokenizer = load(tokenizer_name, texts)
    dtype: TokenType = "uint16" if tokenizer.vocabulary <= 2**16 else "uint32"
    little_endian = np.dtype(dtype).newbyteorder("<")
    count = 0
    try:
        with replacing(path) as partial, partial.open("xb") as file:
            for text in texts:
                for tokens in tokenizer.tokens(text):
                    file.write(tokens.astype(little_endian).tobytes())
                    count += len(tokens)
            if not count:
                names = ", ".join(map(str, texts))
                raise UsageError(f"{names}: there is no text to convert")
        description = TokenFileDescription(
            tokenizer=tokenizer.name,
            vocabulary=tokenizer.vocabulary,
            dtype=dtype,
            tokens=count,
            fingerprint=fingerprint_of_files([path]),
            characters=tokenizer.characters,
        )
        with replacing(description_path(path)) as partial:
            content = json.dumps(description.model_dump(), indent=1)
            partial.write_text(f"{content}\n", encoding="utf-8")
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        raise UsageError(f"--out: {path} {problem}") from error
    return description


def read_description(path: Path) -> TokenFileDescription:
    """Returns the description of a file of tokens.

    Raises:
        UsageError: It is missing, or it has an error. The message names the key and the fix.
    """
    json_path = description_path(path)
    hint = f"prepare the file again ({PREPARE.format(name=path.name)})"
    try:
        content = json.loads(json_path.read_text(encoding="utf-8"))
        return TokenFileDescription.model_validate(content)
    except FileNotFoundError:
        problem = f"has no description {json_path.name} next to it"
        example = "{tokenizer: ..., vocabulary: 50257, dtype: uint16}"
        raise UsageError(
            f"data.file: {path} {problem}: {hint}, or write it: {example}"
        ) from None
    except ValidationError as error:
        details = error.errors()[0]
        key = ".".join(map(str, details["loc"])) or "the content"
        problem = f"{key}: {details['msg']}"
        raise UsageError(
            f"data.file: {json_path}: {problem}; correct it, or {hint}"
        ) from None
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {error}"
        raise UsageError(f"data.file: {json_path} {problem}; {hint}") from error


def read_tokens(path: Path, description: TokenFileDescription) -> NDArray[Any]:
    """Returns the tokens of a file, mapped into memory, as signed numbers of the same size.

    Raises:
        UsageError: The file is not the one that its description describes.
    """
    _check_size(path, description)
    json_name = description_path(path).name
    if description.fingerprint not in (None, fingerprint_of_files([path])):
        problem = f"is not the file that {json_name} describes"
        raise UsageError(
            f"data.file: {path} {problem}: its fingerprint is another one; "
            "prepare the file again"
        )
    # An empty file cannot be mapped.
    if not path.stat().st_size:
        raise UsageError(
            f"data.file: {path} has no tokens; prepare the file again"
        )
    tokens: NDArray[Any] = np.memmap(
        path, np.dtype(description.dtype), mode="c"
    )
    _check_vocabulary(path, tokens, description.vocabulary)
    # torch has few functions for unsigned types. A signed view needs no copy.
    signed_dtype = np.dtype(description.dtype.replace("u", ""))
    signed: NDArray[Any] = tokens.view(signed_dtype)
    return signed


def _check_size(path: Path, description: TokenFileDescription) -> None:
    """Raises an error if the size of a file does not fit its description."""
    json_name = description_path(path).name
    dtype = description.dtype
    size = path.stat().st_size
    if size % description.item_bytes:
        problem = f"has {size:,} bytes, no multiple of a {dtype}"
        raise UsageError(
            f"data.file: {path} {problem}: see dtype in {json_name}"
        )
    count = size // description.item_bytes
    if description.tokens not in (None, count):
        expected = f"{json_name} describes {description.tokens:,}"
        raise UsageError(
            f"data.file: {path} has {count:,} tokens of {dtype}, and {expected}: "
            "correct tokens or dtype there, or prepare the file again"
        )


def _check_vocabulary(
    path: Path, tokens: NDArray[Any], vocabulary: int
) -> None:
    """Raises an error if a token is outside of the vocabulary."""
    for start in _checked_starts(len(tokens)):
        block = tokens[start : start + _BLOCK]
        largest = int(block.max())
        if largest < vocabulary:
            continue
        position = start + int(block.argmax())
        token = f"token {largest:,} at position {position:,}"
        limit = (
            f"the vocabulary of {vocabulary:,} in {description_path(path).name}"
        )
        raise UsageError(
            f"data.file: {path}: {token} is outside of {limit}: "
            "correct vocabulary or dtype there, or prepare the file again"
        )


def _checked_starts(count: int) -> list[int]:
    """Returns the starts of the blocks whose tokens are compared with the vocabulary."""
    starts = range(0, count, _BLOCK)
    # Only the ends of very large files are read, so that a training starts soon.
    return [
        start for start in starts if start < CHECKED or start >= count - CHECKED
    ]
