"""Nodes of plain values, such as those that another process has sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.recipe.yaml_nodes import Node, Place


def plain_node(values: Any, place: Place) -> Node:
    """Returns plain values as a node; no text between them can change them.

    Args:
        values: Dictionaries, lists and scalars, with text as keys.
        place: The place of all values.
    """
    if isinstance(values, Mapping):
        children = {str(key): plain_node(child, place) for key, child in values.items()}
        return Node(children, place)
    if isinstance(values, list | tuple):
        return Node([plain_node(item, place) for item in values], place)
    # Secrets are recognized among scalars that have a spelling.
    return Node(values, place, spelled=values if isinstance(values, str) else "")
