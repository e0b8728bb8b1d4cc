"""Plain scalars by YAML 1.2: what is a number, a boolean or nothing, and what is text."""

import math
import re
from typing import Any

import yaml

Scalar = bool | int | float | str | None

_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_DECIMAL = re.compile(rf"[-+]?{_DIGITS}")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(rf"[-+]?(?:\.{_DIGITS}|{_DIGITS}(?:\.(?:{_DIGITS})?)?)(?:[eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"[-+]?\.(?:inf|Inf|INF)")
_NAN = re.compile(r"\.(?:nan|NaN|NAN)")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_LONGEST_NUMBER = 64
"""Characters; a longer run of digits is text, because reading it would take quadratic time."""


def resolve(text: str) -> Scalar:
    """The value of an unquoted scalar by the core schema of YAML 1.2.

    ``1e-3`` is a number and ``on``, ``off``, ``yes``, ``no`` are text. Beyond the schema, digits may be grouped by
    underscores (``60_000``). A number too large for a float is text.
    """
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _LONGEST_NUMBER:
        return text
    if _DECIMAL.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text) or _HEXADECIMAL.fullmatch(text):
        return int(text, base=0)
    if _FLOAT.fullmatch(text):
        number = float(text)
        return number if math.isfinite(number) else text
    if _INFINITY.fullmatch(text):
        return float(text.replace(".", ""))
    return math.nan if _NAN.fullmatch(text) else text


class _Dumper(yaml.SafeDumper):
    """Quotes what ``resolve`` would not read back as text, and nothing else."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0]:
            return _TAGS[type(resolve(value))]
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]

    def represent_str(self, data: str) -> Any:
        # Line breaks beyond ASCII survive in double quotes only, and these two words mean something to YAML.
        special = data in ("<<", "=") or any(character in data for character in "\x85\u2028\u2029")
        style = '"' if special else None
        return self.represent_scalar(_TAGS[str], data, style=style)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_TAGS: dict[type, str] = {
    type(None): "tag:yaml.org,2002:null",
    bool: "tag:yaml.org,2002:bool",
    int: "tag:yaml.org,2002:int",
    float: "tag:yaml.org,2002:float",
    str: "tag:yaml.org,2002:str",
}


_Dumper.add_representer(str, _Dumper.represent_str)


def dump(values: Any) -> str:
    """Plain values as a YAML document that reads back as the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)


def dump_inline(value: Any) -> str:
    """A plain value as YAML on one line."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")
