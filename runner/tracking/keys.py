"""Names of metrics, settings and tags as MLflow accepts them."""

import re
import unicodedata
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any

MAX_LENGTH = 250
"""The longest key that MLflow stores, in characters."""
_DIGEST_LENGTH = 8
_REFUSED = re.compile(r"[^\w.\- :/]")


@lru_cache(1024)
def mlflow_key(name: str) -> str:
    """Returns the key under which MLflow stores a name. Different names have different keys.

    A name that MLflow accepts is its key. In any other name, refused characters become words
    (``err<5`` becomes ``err_less-than_5``), and a digest of the name follows, because two names
    could become the same words.
    """
    readable = "/".join(_readable_segment(segment) for segment in name.split("/"))
    if readable == name and len(name) <= MAX_LENGTH:
        return name
    return _with_digest(readable, name)


def interval_keys(metric: str) -> tuple[str, str]:
    """Returns the keys of the bounds of a metric's 95 % interval, in sections that no metric of a run has.

    Args:
        metric: The key of an evaluation metric, ``eval/<name>``, or of one of a test, ``test/<name>``.
    """
    section = "test" if metric.startswith("test/") else "eval"
    name = metric.removeprefix(f"{section}/")
    return mlflow_key(f"{section}_low/{name}"), mlflow_key(f"{section}_high/{name}")


def setting_keys(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the MLflow key and the value of every leaf of nested settings; an empty mapping is a leaf.

    Names are joined by dots. A name that contains a dot is distinguished from
    nested ones by a digest.
    """
    for path, value in _leaves(settings, ()):
        key = mlflow_key(".".join(path))
        # A path of one name may contain dots: overrides are keyed by complete paths.
        if len(path) > 1 and any("." in name for name in path):
            key = _with_digest(key, repr(path))
        yield key, value


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(value, Mapping) or (path and not value):
        yield path, value
        return
    for name, item in value.items():
        yield from _leaves(item, (*path, str(name)))


def _readable_segment(segment: str) -> str:
    # MLflow refuses what a path would normalize: empty segments, ``.`` and ``..``.
    if not segment.strip("."):
        return "_" * max(1, len(segment))
    return _REFUSED.sub(_word, segment)


def _word(match: re.Match[str]) -> str:
    character = match[0]
    name = unicodedata.name(character, f"u{ord(character):04x}")
    word = re.sub(r" (sign|mark)$", "", name.lower()).replace(" ", "-")
    return f"_{word}_"


def _with_digest(readable: str, name: str) -> str:
    digest = sha256(name.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_LENGTH]
    shortened = readable[: MAX_LENGTH - _DIGEST_LENGTH - 1].rstrip("/")
    return f"{shortened}-{digest}"
