"""Sizes to which graphs of molecules are padded."""

from __future__ import annotations

import math

FEATURES = 34
"""Numbers that describe an atom."""
NODES = (16, 24, 32, 56)
"""Sizes to which graphs are padded; larger ones are padded to multiples of the last."""
EDGES = 2.5
"""Directed edges for each of these nodes."""


def padded_nodes(nodes: int, edges: int) -> int:
    """Returns the number of nodes to which a graph is padded: the first size with room for it."""
    required = max(nodes, math.ceil(edges / EDGES))
    for size in NODES:
        if size >= required:
            return size
    return math.ceil(required / NODES[-1]) * NODES[-1]
