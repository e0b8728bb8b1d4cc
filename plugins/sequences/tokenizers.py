"""Tokenizers, which convert texts to numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.api import UsageError

PIECE = 2**20
"""Characters of a text that are read at a time."""
LONGEST = 2**24
"""Characters after which a piece ends without the end of a line."""
EXTRA = "pip install 'proven-runner[tokens]'"
END_OF_TEXT = "<|endoftext|>"
"""Token that tokenizers of the GPT family have between two texts."""
NAMES = "bytes, characters, tiktoken:ENCODING (such as tiktoken:gpt2), or a tokenizer.json"

Tokens = NDArray[Any]


class Tokenizer:
    """Converts texts to numbers below ``vocabulary``.

    Args:
        name: Name under which ``load`` finds it.
        vocabulary: Number of different tokens.
        encode: Returns the tokens of a text.
        end_of_text: Token after every text; None if the vocabulary has none.
        characters: The characters of the tokens, in their order, if each is one character.
    """

    def __init__(
        self,
        name: str,
        vocabulary: int,
        encode: Callable[[str], Sequence[int] | Tokens],
        end_of_text: int | None = None,
        characters: str | None = None,
    ) -> None:
        self.name = name
        self.vocabulary = vocabulary
        self.encode = encode
        self.end_of_text = end_of_text
        self.characters = characters

    def tokens(self, path: Path) -> Iterator[Tokens]:
        """Yields the tokens of a text file, piece by piece."""
        for piece in pieces(path):
            yield np.asarray(self.encode(piece), np.int64)
        if self.end_of_text is not None:
            yield np.asarray([self.end_of_text], np.int64)


def load(name: str, texts: Sequence[Path]) -> Tokenizer:
    """Returns a tokenizer.

    Args:
        name: One of ``NAMES``.
        texts: Files whose characters the tokenizer ``characters`` has.

    Raises:
        UsageError: The tokenizer is unknown, or its library is not installed.
    """
    if name == "bytes":
        return Tokenizer(name, 256, _utf8)
    if name == "characters":
        return _characters(texts)
    if name.startswith("tiktoken:"):
        return _tiktoken(name)
    if name.endswith(".json"):
        return _hugging_face(name)
    raise UsageError(f"--tokenizer: no tokenizer '{name}'; use {NAMES}")


def pieces(path: Path) -> Iterator[str]:
    """Yields a text in pieces of about ``PIECE`` characters.

    A piece ends after a line feed between two characters that are not white space. There, the
    tokens of GPT-2's family are the same whether the text is cut or not.

    Raises:
        UsageError: The file cannot be read, or is not text in UTF-8.
    """
    remainder = ""
    try:
        # Line ends are read as they are, because they are tokens, too.
        with path.open(encoding="utf-8", newline="") as file:
            while block := file.read(PIECE):
                remainder += block
                if end := _last_end(remainder):
                    yield remainder[:end]
                    remainder = remainder[end:]
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not text in UTF-8: {error.reason}"
        ) from error
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}"
        ) from error
    if remainder:
        yield remainder


def _last_end(text: str) -> int:
    """Returns the number of characters before the last position where a text may be cut."""
    end = len(text) - 1
    while (position := text.rfind("\n", 1, end)) > 0:
        last_of_line = text[position - 1]
        first_of_next = text[position + 1]
        if not last_of_line.isspace() and not first_of_next.isspace():
            return position + 1
        end = position
    return len(text) if len(text) >= LONGEST else 0


def _utf8(text: str) -> Tokens:
    return np.frombuffer(text.encode(), np.uint8)


def _code_points(text: str) -> Tokens:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _characters(texts: Iterable[Path]) -> Tokenizer:
    table = np.empty(0, np.uint32)
    for path in texts:
        for piece in pieces(path):
            table = np.union1d(table, _code_points(piece))

    def encode(text: str) -> Tokens:
        return np.searchsorted(table, _code_points(text))

    characters = "".join(map(chr, table.tolist()))
    return Tokenizer("characters", len(table), encode, characters=characters)


def _tiktoken(name: str) -> Tokenizer:
    try:
        import tiktoken
    except ImportError:
        raise _missing_library(name, "tiktoken") from None
    encoding_name = name.removeprefix("tiktoken:")
    try:
        encoding = tiktoken.get_encoding(encoding_name)
    except ValueError:
        problem = f"tiktoken has no encoding '{encoding_name}'"
        available = ", ".join(tiktoken.list_encoding_names())
        raise UsageError(
            f"--tokenizer: {problem}; it has {available}"
        ) from None
    except OSError as error:
        # The first use of an encoding downloads it.
        problem = f"'{name}' could not be downloaded ({error})"
        hint = "connect to the network once, or set TIKTOKEN_CACHE_DIR to a folder that has it"
        raise UsageError(f"--tokenizer: {problem}; {hint}") from error
    return Tokenizer(
        name, encoding.n_vocab, encoding.encode_ordinary, encoding.eot_token
    )


def _missing_library(name: str, library: str) -> UsageError:
    return UsageError(
        f"--tokenizer: '{name}' needs the library {library}: {EXTRA}"
    )


def _hugging_face(name: str) -> Tokenizer:
    try:
        import tokenizers
    except ImportError:
        raise _missing_library(name, "tokenizers") from None
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"--tokenizer: no such file: {path}")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        problem = f"{path} is not the file of a tokenizer: {error}"
        raise UsageError(f"--tokenizer: {problem}") from error

    def encode(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer.encode(
            text, add_special_tokens=False
        ).ids
        return ids

    # Numbers may have gaps, so the largest one counts.
    vocabulary = 1 + max(tokenizer.get_vocab().values(), default=-1)
    return Tokenizer(
        path.name, vocabulary, encode, tokenizer.token_to_id(END_OF_TEXT)
    )
