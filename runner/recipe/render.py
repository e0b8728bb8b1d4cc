"""A resolved recipe as YAML for people."""

from collections.abc import Iterator, Mapping
from typing import Any

from runner.recipe.document import Place, dump_inline


def render(values: Mapping[str, Any], origins: Mapping[str, Place] | None = None) -> list[str]:
    """Lines of YAML that read back as the values; lists stand on one line.

    Args:
        values: nested mappings.
        origins: places by dotted path, to be written as a comment behind every value.
    """
    lines = list(_lines(values, "", ""))
    if origins is None:
        return [line for line, _ in lines]
    width = max((len(line) for line, _ in lines), default=0)
    return [f"{line:{width}}  # {origins[path].cited()}" if path in origins else line for line, path in lines]


def _lines(values: Mapping[str, Any], prefix: str, indent: str) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        path = prefix + key
        if isinstance(value, Mapping) and value:
            yield f"{indent}{dump_inline(key)}:", path
            yield from _lines(value, f"{path}.", indent + "  ")
        else:
            yield f"{indent}{dump_inline(key)}: {dump_inline(value)}", path
