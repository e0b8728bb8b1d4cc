"""What memory is used for in an update."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from runner.system.byte_size import format_size


class Kind(StrEnum):
    """What memory is used for."""

    parameters = "parameters"
    gradients = "gradients"
    optimizer = "optimizer"
    activations = "activations"
    temporaries = "temporaries"
    batch = "batch"
    other = "other"


Usage = Mapping[tuple[Kind, str], int]
"""Bytes by kind and by the module that holds them."""


def by_kind(usage: Usage) -> dict[Kind, int]:
    """Returns the bytes of every kind, in the order of the kinds."""
    totals = dict.fromkeys(Kind, 0)
    for (kind, _), size in usage.items():
        totals[kind] += size
    return totals


def by_module(usage: Usage) -> dict[str, dict[Kind, int]]:
    """Returns the bytes of every module by kind, the largest module first."""
    modules: dict[str, dict[Kind, int]] = {}
    for (kind, holder), size in usage.items():
        sizes = modules.setdefault(holder, {})
        sizes[kind] = sizes.get(kind, 0) + size
    return dict(sorted(modules.items(), key=lambda item: -sum(item[1].values())))


def kinds_text(usage: Usage) -> str:
    """Returns the bytes of every kind in one line."""
    sizes = by_kind(usage).items()
    return ", ".join(f"{kind} {format_size(size)}" for kind, size in sizes if size)
