"""Params, tags and names in the form that MLflow accepts."""

import json
import posixpath
import re
from collections.abc import Mapping
from functools import lru_cache

from runner.recipe.recipe import flatten
from runner.system.secrets import redact

_TEXT_LENGTH = 6000
_KEY_LENGTH = 250


def params_of(settings: Mapping[str, object]) -> dict[str, str]:
    """Nested settings as MLflow params: ``{"model": {"hidden": [64, 64]}}`` becomes ``{"model.hidden": "[64, 64]"}``.

    Values are spelled as in JSON, strings without quotes.
    """
    return {key(path): text(value) for path, value in flatten(settings)}


def text(value: object) -> str:
    """A param's or tag's value, shortened with a mark where MLflow would cut it without a word."""
    spelled = redact(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
    if len(spelled) <= _TEXT_LENGTH:
        return spelled
    mark = f" ... [shortened from {len(spelled)} characters]"
    return spelled[: _TEXT_LENGTH - len(mark)] + mark


@lru_cache(1024)
def key(name: str) -> str:
    """The name with every character that MLflow refuses in a key replaced by ``_``."""
    path = posixpath.normpath(re.sub(r"[^\w.\- :/]", "_", name))
    return path.lstrip("./")[:_KEY_LENGTH] or "_"
