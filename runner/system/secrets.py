"""Keeps secrets inside the process: masks them in whatever leaves it.

A secret is known in one of three ways: somebody registered its value, it stands in a URL in the place of the password,
or it is the value of a key whose name says so (``api_token: ...``).
"""

import json
import os
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus, unquote, urlsplit

MASK = "**********"
"""Stands in place of a secret; the text that pydantic's ``SecretStr`` shows."""

_SHORTEST = 6
"""A shorter secret is masked only behind its key: it would be found in words that have nothing to do with it."""
_SHORTEST_NUMBER = 8
_SHORTEST_VARIABLE = 8
"""Environment variables are not ours; short ones hold a word (``on``, ``basic``) rather than a secret."""


# --- names ------------------------------------------------------------------------------------------------------------

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET = re.compile(
    r"_[a-z]*(?:passw(?:or)?d|passphrase|secret)s?_|_credentials?_"
    r"|_(?:api|access|private|account|signing|encryption)_?keys?_|_auth(?:orization)?_(?:[0-9]+_)?$"
)
_TOKEN = re.compile(r"_(?:access|api|auth)?tokens?_(?:[0-9]+_)?$")
_OF_TEXT = {"bos", "cls", "eos", "mask", "max", "min", "n", "num", "pad", "sep", "special", "start", "stop", "unk"}
"""``eos_token`` and ``max_tokens`` are about words."""
_ABOUT = {
    "count",
    "dir",
    "endpoint",
    "env",
    "file",
    "folder",
    "kind",
    "length",
    "method",
    "mode",
    "name",
    "path",
    "size",
}
_ABOUT |= {"sock", "type", "uri", "url"}
"""Last words of what is said about a secret: ``password_file``, ``auth.kind``."""


@lru_cache(maxsize=4096)
def looks_secret(key: str) -> bool:
    """Whether a key is the name of a secret: ``api_token``, ``dbPassword``, ``AWS_SECRET_ACCESS_KEY``.

    Args:
        key: in snake, camel or kebab case; in a dotted path every part counts, so what lies below ``credentials`` is
            secret too.
    """
    parts = [[word.lower() for word in _WORD.findall(part)] for part in re.split(r"[./]", key)]
    is_about = bool(parts[-1]) and parts[-1][-1] in _ABOUT
    return not is_about and any(_name_secret(words) for words in parts)


def _name_secret(words: list[str]) -> bool:
    name = f"_{'_'.join(words)}_"
    return bool(_SECRET.search(name)) or (bool(_TOKEN.search(name)) and _OF_TEXT.isdisjoint(words))


# --- values -----------------------------------------------------------------------------------------------------------

_PUBLIC = re.compile(
    rf"|{re.escape(MASK)}|on|off|yes|no|true|false|null|none|nil|~|default|auto|value|passw(?:or)?d|secret|token|example"
    r"|[+-]?(?:nan|inf)|[0-9]+(?:\.[0-9]+)+(?:(?:a|b|rc|\.post|\.dev)[0-9]+)*(?:\+[\w.]+)?",
    re.IGNORECASE,
)
"""What is no secret whatever its key: nothing, switches, placeholders, a metric's ``nan``, a version."""
_NUMBER = re.compile(r"[+-]?[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class _Known:
    """The secrets of this process; replaced as a whole, so that readers need no lock."""

    values: frozenset[tuple[str, str]] = frozenset()
    """What was registered, with its key."""
    spellings: tuple[str, ...] = ()
    """Masked wherever they stand; the longest first, because one may lie in another."""
    patterns: tuple[re.Pattern[str], ...] = ()
    """Masked behind what the first group holds."""


_known = _Known()
_lock = threading.Lock()


def register(value: str, key: str = "") -> None:
    """Remembers a secret, which ``redact`` masks from now on.

    A value of fewer than 6 characters, or a number of fewer than 8 digits, is masked behind its key only. Of a text of
    several lines each line is a secret.

    Args:
        value: the secret; nothing, ``MASK`` and words such as ``none`` or ``password`` are passed over.
        key: the last part of its key.
    """
    global _known
    lines = [line.strip() for line in value.splitlines()]
    with _lock:
        new = {(line, key) for line in lines if _is_secret(line)} - _known.values
        if not new:
            return
        spellings, patterns = set(_known.spellings), list(_known.patterns)
        for line, name in new:
            if len(line) >= _SHORTEST and not line.isdecimal():
                spellings |= {each for each in _spellings(line) if len(each) >= _SHORTEST and each.strip("*")}
            elif len(line) >= _SHORTEST_NUMBER:
                patterns.append(re.compile(rf"()(?<!\w)(?<!\d\.){line}(?!\w|\.\d)"))
            elif name:
                behind = rf"((?<![\w-]){re.escape(name)}[\"']?[ \t]*[:=][ \t]*[\"']?)"
                patterns.append(re.compile(rf"{behind}{re.escape(line)}(?![\w-])"))
        _known = _Known(_known.values | new, tuple(sorted(spellings, key=len, reverse=True)), tuple(patterns))


def register_environment() -> None:
    """Registers what environment variables hold: URL passwords, and the values of names that look secret."""
    for name, value in os.environ.items():
        register_url(value)
        shortest = _SHORTEST if name.startswith("MLFLOW_TRACKING_") else _SHORTEST_VARIABLE
        if looks_secret(name) and len(value) >= shortest and "://" not in value and not os.path.exists(value):
            register(value)


def register_url(text: str) -> None:
    """Registers the passwords of the URLs in a text."""
    if "://" not in text:
        return
    passwords = [match["password"] for match in _URL.finditer(text)]
    with suppress(ValueError):  # no URL as a whole
        passwords.append(urlsplit(text).password or "")
    for password in passwords:
        register(password)
        register(unquote(password))


def _is_secret(line: str) -> bool:
    return not _PUBLIC.fullmatch(line) and MASK not in line and line.strip("*") != ""


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


# --- texts ------------------------------------------------------------------------------------------------------------

_HINTS = ("token", "secret", "passw", "passphrase", "credential", "auth", "key")
"""Every name that looks secret holds one of these."""
_URL = re.compile(
    r"(?P<head>://[^\s/?#:@\"']*+:)"
    # Up to the last @ of the authority; or else what has a bare / in it, as database drivers take it, but no port.
    r"(?P<password>[^\s/?#\"']*|(?!\d*[/?#])(?:(?!://)[^\s@\"'])*)(?=@)"
)
_KEY = r"(?P<key>\w[\w.-]*+)(?:\\?[\"'])?[ \t]*+"
_QUOTED = r"(?P<mark>\\?[\"'])(?:''|(?!(?P=mark))(?:\\.|[^\\\n]))*+(?P=mark)"
_BARE = r"(?![{\[\\])(?:[^\s,;&)}\]\"']|[;&](?=\S)(?![\w.-]++=))++"
_Form = tuple[re.Pattern[str], re.Pattern[str]]
"""How a name stands before its value, and what is the value."""
_LINE: _Form = (
    # In YAML and in files of settings a bare value goes on to the end of the line; - and + stand there in a patch.
    re.compile(rf"^[ \t+-]*+{_KEY}[:=][ \t]++", re.MULTILINE),
    re.compile(r"[\"'][^\"'\r\n]*+$|[^\s\"'\[{|>#](?:(?![ \t]\#)[^\r\n])*+", re.MULTILINE),
)
_FLOW: _Form = (
    # In a mapping on one line it goes on to the next comma.
    re.compile(rf"[{{,][ \t]*+{_KEY}:[ \t]++"),
    re.compile(r"[^\s\"'\[{}][^,}\]\r\n]*+"),
)
_PAIR: _Form = (
    # A name behind "3:7: " is the path in a message about a recipe, followed by prose.
    re.compile(rf"(?<![\w.])(?<!\d:[ ]){_KEY}(?:=>|=(?!=)|:(?!//|[:=]))[ \t]*+"),
    re.compile(
        rf"{_QUOTED}|[\"'](?:{_BARE})?|\[[^\[\]\n]*+\]|(?:(?i:Bearer|Basic|Token)[ ]+)?{_BARE}"
        r"(?:(?<=\()(?:'[^'\n]*'|\"[^\"\n]*\"))?"
    ),
)
_CODE: _Form = (
    # token = "...", "token": "...", token: str = "..."
    re.compile(rf"(?<![\w.]){_KEY}(?:=>|=(?!=)|:(?:[\w.\[\]| \t]*+=(?!=))?)[ \t]*+[rbufRBUF]{{0,2}}"),
    re.compile(_QUOTED),
)
_ITEM = re.compile(rf"{_QUOTED}|(?<![^\s,\[])[^\s,\[\]\"'&*][^\s,\[\]\"']*+")
"""Of a list; no anchor and no alias of YAML."""


def may_hold_secret(text: str) -> bool:
    """Whether ``redact`` has to look closer; a few microseconds."""
    known = _known
    if any(spelling in text for spelling in known.spellings) or ("://" in text and "@" in text):
        return True
    lowered = text.lower()
    return any(hint in lowered for hint in _HINTS) or any(pattern.search(text) for pattern in known.patterns)


def redact(text: str, *, code: bool = False) -> str:
    """The text with every secret in it masked; the text itself if there is none.

    Args:
        text: anything that a person or a file is about to receive.
        code: it is source code, where a bare word behind a key is no value but a name; only quoted ones are masked.
    """
    while may_hold_secret(text):
        clean = _redact_once(text, code)
        if clean == text:
            break
        text = clean  # again, because what is masked now may have hidden the beginning of a name
    return text


def redact_known(text: str) -> str:
    """The text with registered secrets and the passwords of URLs masked, whatever the names in it."""
    if "://" in text:
        text = _URL.sub(lambda match: match["head"] + (match["password"] and MASK), text)
    known = _known
    for spelling in known.spellings:
        if spelling in text:
            text = text.replace(spelling, MASK)
    for pattern in known.patterns:
        text = pattern.sub(rf"\g<1>{MASK}", text)
    return text


def redact_values(value: Any, key: str = "") -> Any:
    """Nested plain values with every secret masked: texts as by ``redact``, and those whose key looks secret.

    Args:
        value: mappings, lists and scalars; numbers stay as they are.
        key: the dotted path of the value.
    """
    if isinstance(value, Mapping):
        return {redact_known(str(name)): redact_values(each, f"{key}.{name}") for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [redact_values(each, key) for each in value]
    if not isinstance(value, str):
        return value
    return MASK if looks_secret(key) and not _PUBLIC.fullmatch(value) else redact(value)


def _redact_once(text: str, code: bool) -> str:
    text = redact_known(text)  # first: of several words, a name may give away the first alone
    lowered = text.lower()
    if any(hint in lowered for hint in _HINTS):
        for form in (_CODE,) if code else (_LINE, _FLOW, _PAIR):
            text = _redact_named(text, form)
    return text


def _redact_named(text: str, form: _Form) -> str:
    """The text with the values of names that look secret masked."""
    name, value = form
    parts, end = [], 0
    while head := name.search(text, end):
        parts.append(text[end : head.end()])
        end = head.end()  # another name may stand in the value of this one
        # A path with a colon behind it is cited in a message, or says in a lock where a value came from.
        is_path = "." in head["key"] and ":" in head[0]
        if looks_secret(head["key"]) and not is_path and (found := value.match(text, end)):
            # An asterisk begins an alias in YAML.
            parts.append(_masked(found[0], f"'{MASK}'" if re.search(r":[ \t]+$", head[0]) else MASK))
            end = found.end()
    return "".join(parts) + text[end:]


def _masked(value: str, mask: str) -> str:
    """A value as it is written, masked: within its quotes, or else by ``mask``; a list, item by item."""
    if value.startswith("["):
        return _ITEM.sub(lambda item: _masked(item[0], mask), value)
    bare = value.rstrip()
    mark = bare[: 2 if bare.startswith("\\") else 1]
    if mark[-1] not in "\"'":
        is_public = bare != MASK and (_PUBLIC.fullmatch(bare) or _NUMBER.fullmatch(bare))
        return value if is_public else mask
    inner = bare[len(mark) :].removesuffix(mark)
    closing = mark if bare[len(mark) :].endswith(mark) else ""
    return value if _PUBLIC.fullmatch(inner) else mark + MASK + closing
