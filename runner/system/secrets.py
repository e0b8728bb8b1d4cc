"""Keeps secrets inside the process: masks them in whatever is printed or stored.

Three things are secret, and nothing is guessed from the name of a key: what a config declares as ``SecretStr`` or
``SecretBytes``, what the environment variables hold that ``RUNNER_SECRETS`` names, and the passwords in URLs.
"""

import json
import os
import re
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, quote_plus

MASK = "**********"
"""Stands in place of a secret; the text that pydantic's ``SecretStr`` shows."""
VARIABLE = "RUNNER_SECRETS"
"""Names environment variables whose values are secret, with commas between them."""

_SHORTEST, _SHORTEST_NUMBER = 6, 8
"""Shorter texts and numbers are not looked for: they stand in words and figures that have nothing to do with them."""
_URL = re.compile(
    r"(://[^\s/?#:@\"']*:)"
    # Up to the last @ of the authority; or else what has a bare / in it, as database drivers take it, but no port.
    r"(?:[^\s/?#\"']+|(?!\d*[/?#])(?:(?!://)[^\s@\"'])+)(?=@)"
)

_known: frozenset[str] = frozenset()
_pattern: re.Pattern[str] | None = None
_lock = threading.Lock()


def register(*values: str) -> None:
    """Makes texts known as secret, which ``redact`` masks from now on; of several lines each is one."""
    global _known, _pattern
    lines = {line.strip() for value in values for line in value.splitlines() if line.strip(" *")}
    new = {line for line in lines if len(line) >= (_SHORTEST_NUMBER if line.isdecimal() else _SHORTEST)}
    with _lock:
        if not new <= _known:
            _known |= new
            # The longest first, because one may be the beginning of another.
            spellings = sorted({each for line in _known for each in _spellings(line)}, key=len, reverse=True)
            _pattern = re.compile("|".join(map(re.escape, spellings)))


def registered() -> list[str]:
    """What is known as secret, for a process that is started to work on the same."""
    return sorted(_known)


def register_environment() -> None:
    """Registers the values of the environment variables that ``RUNNER_SECRETS`` names."""
    for name in os.environ.get(VARIABLE, "").split(","):
        register(os.environ.get(name.strip(), ""))


def redact(text: str) -> str:
    """The text with every registered secret and every password in a URL masked; for what a person or a file gets."""
    if "://" in text:
        text = _URL.sub(rf"\g<1>{MASK}", text)
    return _pattern.sub(MASK, text) if _pattern is not None else text


def redact_values(tree: Any) -> Any:
    """Nested mappings and lists with every text in them redacted; keys and numbers stay as they are."""
    if isinstance(tree, Mapping):
        return {str(key): redact_values(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [redact_values(value) for value in tree]
    return redact(tree) if isinstance(tree, str) else tree


def _spellings(value: str) -> set[str]:
    """A secret as it is written in JSON, Python, YAML and URLs."""
    return {
        value,
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        repr(value)[1:-1],
        value.replace("'", "''"),
        quote(value, errors="replace"),
        quote(value, safe="", errors="replace"),
        quote_plus(value, errors="replace"),
    }


register_environment()  # once for a process, whoever starts it
