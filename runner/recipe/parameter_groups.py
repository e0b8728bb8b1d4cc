"""Parameter groups as a recipe writes them: a mapping from patterns of names to settings.

A lock has a list of mappings instead, which keeps the order of the patterns everywhere. Dotted
paths, such as ``optimizer.groups.encoder.*.lr=1e-4``, divide a pattern into nested keys. Both forms
become the mapping from patterns before files are merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from runner.recipe.yaml_nodes import OVERRIDE, Node, Place

if TYPE_CHECKING:
    from collections.abc import Mapping

SECTION = "optimizer"
GROUPS = "groups"


def with_patterns(root: Node) -> Node:
    """Returns a document in which all parameter groups are mappings from patterns."""
    section = root.get(SECTION)
    if section is None or not isinstance(section.value, dict):
        return root
    settings = _with_patterns(section.value)
    for role, node in settings.items():
        if role != GROUPS and isinstance(node.value, dict):
            settings[role] = replace(node, value=_with_patterns(node.value))
    optimizer = replace(section, value=settings)
    return replace(root, value={**root.children, SECTION: optimizer})


def _with_patterns(settings: Mapping[str, Node]) -> dict[str, Node]:
    """Returns the settings of an optimizer, or those by role, with patterns as keys."""
    groups = settings.get(GROUPS)
    if groups is None:
        return dict(settings)
    items = [groups]
    if isinstance(groups.value, list):
        items = groups.value
    # Validation reports anything else with its place.
    if not all(isinstance(item.value, dict) for item in items):
        return dict(settings)
    patterns: dict[str, Node] = {}
    for item in items:
        for pattern, node in _patterns(item, ""):
            patterns.setdefault(pattern, node)
    return {**settings, GROUPS: replace(groups, value=patterns)}


def _patterns(node: Node, prefix: str) -> Iterator[tuple[str, Node]]:
    """Yields patterns with their settings; no setting is a mapping, so a mapping has more keys."""
    for key, child in node.children.items():
        pattern = f"{prefix}{key}"
        nested = {}
        if isinstance(child.value, dict):
            nested = {
                name: value
                for name, value in child.value.items()
                if isinstance(value.value, dict)
            }
        if not nested:
            yield pattern, child
            continue
        settings = {
            name: value for name, value in child.children.items() if name not in nested
        }
        if settings:
            yield pattern, replace(child, value=settings)
        yield from _patterns(replace(child, value=nested), f"{pattern}.")


def group_origins(root: Node) -> dict[str, Place]:
    """Returns where groups and patterns were written, by dotted path."""
    section = root.get(SECTION)
    if section is None:
        return {}
    sections = {SECTION: section}
    for role, node in section.children.items():
        sections[f"{SECTION}.{role}"] = node

    origins: dict[str, Place] = {}
    for path, node in sections.items():
        groups = node.get(GROUPS)
        if groups is None:
            continue
        origins[f"{path}.{GROUPS}"] = _assigned(groups) or groups.place
        for pattern, settings in groups.children.items():
            origins[f"{path}.{GROUPS}.{pattern}"] = settings.anchor
    return origins


def _assigned(node: Node) -> Place | None:
    """Returns the place of a value that the command line has assigned inside of a node, if any."""
    if node.place.source == OVERRIDE:
        return node.place
    assigned = (_assigned(child) for child in node.children.values())
    return next(filter(None, assigned), None)
