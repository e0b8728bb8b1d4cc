"""Sizes to which graphs of molecules are padded."""

from __future__ import annotations

import math

FEATURES = 34
"""Numbers that describe an atom."""
NODES = (16, 24, 32, 56)
"""What graphs are padded to; larger ones to multiples of the last."""
EDGES = 2.5
"""Directed edges for each of those nodes."""


def padded_nodes(nodes: int, edges: int) -> int:
    """To how many nodes a graph is padded: the first size with room for it."""
    larger = max(nodes, math.ceil(edges / EDGES))
    return next((size for size in NODES if size >= larger), -(-larger // NODES[-1]) * NODES[-1])
