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
"""Replaces a secret; the text that pydantic's ``SecretStr`` shows."""
REFUSED_NAME = "contains a secret, and names are stored: choose another"
"""The end of a message about a name that is refused."""
VARIABLE = "RUNNER_SECRETS"
"""Names environment variables whose values are secret, with commas between them."""

_SHORTEST = 6
_SHORTEST_NUMBER = 8
"""Shorter texts and numbers are not searched for: they occur in unrelated words and figures."""
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
            spellings = {spelling for line in _known for spelling in _spellings(line)}
            alternatives = "|".join(map(re.escape, sorted(spellings, key=len, reverse=True)))
            # Looks ahead, so that a secret is found too that starts within another one.
            _pattern = re.compile(f"(?=({alternatives}))")


def registered() -> list[str]:
    """Returns the registered secrets, for a process that is started for the same work."""
    return sorted(_known)


def register_environment() -> None:
    """Registers the values of the environment variables that ``RUNNER_SECRETS`` names."""
    for name in os.environ.get(VARIABLE, "").split(","):
        register(os.environ.get(name.strip(), ""))


def redact(text: str) -> str:
    """The text with every registered secret and every password in a URL masked; for what a person or a file gets."""
    if "://" in text:
        text = _URL.sub(rf"\g<1>{MASK}", text)
    if _pattern is None:
        return text
    parts = []
    end = 0
    for match in _pattern.finditer(text):
        # Secrets that overlap have one mask, which hides all of them.
        if match.start() >= end:
            parts += [text[end : match.start()], MASK]
        end = max(end, match.end(1))
    return "".join([*parts, text[end:]]) if parts else text


def redact_values(tree: Any) -> Any:
    """Returns nested mappings and lists with all text in a form that may be stored, keys too.

    Secrets are masked, and halves of surrogate pairs are escaped (``escape_undecodable``). Numbers
    stay as they are. Keys that become alike are numbered, so that no value is lost.
    """
    if isinstance(tree, Mapping):
        clean: dict[str, Any] = {}
        for key, value in tree.items():
            clean[_unused(_storable(str(key)), clean)] = redact_values(value)
        return clean
    if isinstance(tree, list | tuple):
        return [redact_values(value) for value in tree]
    return _storable(tree) if isinstance(tree, str) else tree


def _storable(text: str) -> str:
    # Imported here to keep the chain of imports below this module short.
    from runner.system.escapes import escape_undecodable

    return escape_undecodable(redact(text))


def has_secret(text: str) -> bool:
    """Returns whether ``redact`` changes the text. A mask would turn a name into another one, which
    is refused instead.
    """
    return redact(text) != text


def _unused(key: str, keys: Mapping[str, Any]) -> str:
    """The key, with a number if it is taken."""
    numbered = key
    number = 1
    while numbered in keys:
        number += 1
        numbered = f"{key} ({number})"
    return numbered


def _spellings(value: str) -> set[str]:
    """A secret as it is written in JSON, Python, YAML, URLs, HTML, shells and base64, and as terminals show it."""
    # Only here, because most processes have no secret, and the start of a command should not wait for these.
    import html
    import shlex
    import unicodedata

    from runner.system.escapes import escape, escape_line

    quoted = {
        quote(value, errors="replace"),
        quote(value, safe="", errors="replace"),
        quote_plus(value, errors="replace"),
    }
    composed = {unicodedata.normalize(form, value) for form in ("NFC", "NFD", "NFKC", "NFKD")}
    return {
        value,
        *(form for form in composed if len(form) >= _SHORTEST),
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        json.dumps(json.dumps(value))[3:-3],
        _in_yaml(value),
        repr(value)[1:-1],
        ascii(value)[1:-1],
        value.replace("'", "''"),
        *quoted,
        *(re.sub("%..", lambda octet: octet[0].lower(), form) for form in quoted),
        html.escape(value),
        html.escape(value, quote=False),
        shlex.quote(value).removeprefix("'").removesuffix("'"),
        escape(value),
        escape_line(value),
        *_in_base64(value.encode(errors="replace")),
    }


def _in_yaml(value: str) -> str:
    """Returns the text as libyaml writes it in double quotes, with capital hexadecimal digits."""
    import yaml

    text: str = yaml.dump(value, Dumper=yaml.CSafeDumper, default_style='"', allow_unicode=True, width=2**31 - 1)
    return text.rstrip("\n")[1:-1]


def _in_base64(value: bytes) -> set[str]:
    """Returns the characters that a secret determines in base64 at any offset, in both
    alphabets.
    """
    import base64

    texts = set()
    for offset in range(3):
        encoded = base64.b64encode(bytes(offset) + value).rstrip(b"=").decode()
        # The first and the last character may depend on the neighbouring bytes.
        certain = encoded[-(-offset * 8 // 6) : (offset + len(value)) * 8 // 6]
        if len(certain) >= _SHORTEST_NUMBER:
            texts |= {certain, certain.replace("+", "-").replace("/", "_")}
    return texts


# Once per process, by its first import.
register_environment()
