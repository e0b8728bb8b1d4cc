"""Values of a recipe as lines of YAML, each with its origin."""

from collections.abc import Iterator, Mapping
from typing import Any

from runner.recipe.document import Place, dump_inline


def render(values: Mapping[str, Any], origins: Mapping[str, Place] | None = None) -> list[str]:
    """Lines of YAML that read back as nested mappings; behind every value its origin, if told, is a comment."""
    lines = list(_lines(values, "", ""))
    origins = origins or {}
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
