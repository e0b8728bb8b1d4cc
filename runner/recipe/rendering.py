"""Values of a recipe as lines of YAML, each with its origin."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.recipe.dumping import dump_inline
from runner.recipe.yaml_nodes import Place
from runner.system.escapes import escape_line
from runner.system.suggestions import shown_path


def render(
    values: Mapping[str, Any], origins: Mapping[str, Place] | None = None
) -> list[str]:
    """Returns lines of YAML that read back as nested mappings.

    Args:
        values: Nested mappings.
        origins: Where values were written, by dotted path. A comment behind every value names its
            origin; comments at the top give the paths of the files.
    """
    lines = list(_lines(values, "", ""))
    if not origins:
        return [line for line, _ in lines]
    names = _short_names(origin.source for origin in origins.values())
    width = max((len(line) for line, _ in lines), default=0)
    rendered = [
        f"# {name}: {escape_line(shown_path(path))}" for path, name in names.items()
    ]
    for line, path in lines:
        origin = origins.get(path)
        rendered.append(
            line if origin is None else f"{line:{width}}  # {_cited(origin, names)}"
        )
    return rendered


def _short_names(sources: Iterable[Path | str]) -> dict[Path, str]:
    """Returns a short unique name for every file: its name, with folders if necessary."""
    paths = list(
        dict.fromkeys(source for source in sources if isinstance(source, Path))
    )
    names: dict[Path, str] = {}
    for path in paths:
        parts_of_others = [candidate.parts for candidate in paths if candidate != path]
        parts = path.parts
        count = 1
        while count < len(parts) and any(
            candidate[-count:] == parts[-count:] for candidate in parts_of_others
        ):
            count += 1
        names[path] = escape_line("/".join(parts[-count:]))
    return names


def _cited(place: Place, names: Mapping[Path, str]) -> str:
    """Returns an origin with the short name of its file."""
    if not isinstance(place.source, Path):
        return place.cited()
    return (
        f"{names[place.source]}:{place.line}:{place.column}"
        if place.line
        else names[place.source]
    )


def _lines(
    values: Mapping[str, Any], prefix: str, indent: str
) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        path = prefix + key
        if isinstance(value, Mapping) and value:
            yield f"{indent}{dump_inline(key)}:", path
            yield from _lines(value, f"{path}.", indent + "  ")
        else:
            yield f"{indent}{dump_inline(key)}: {dump_inline(value)}", path
