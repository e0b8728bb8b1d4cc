"""Kinds and holders of the memory of an update."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from runner.system.byte_size import format_size


class Kind(StrEnum):
    """Use of memory in an update."""

    parameters = "parameters"
    gradients = "gradients"
    optimizer = "optimizer"
    activations = "activations"
    temporaries = "temporaries"
    batch = "batch"
    unattributed = "other"


class Holder(NamedTuple):
    """Slot and module that allocated memory, or saved it for backward."""

    slot: str
    module: str


Usage = Mapping[tuple[Kind, Holder], int]
"""Bytes by kind and by what holds them."""


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
        sizes = modules.setdefault(holder.module, {})
        sizes[kind] = sizes.get(kind, 0) + size
    return dict(sorted(modules.items(), key=lambda item: -sum(item[1].values())))


def kinds_text(usage: Usage) -> str:
    """Returns the bytes of every kind in one line."""
    sizes = by_kind(usage).items()
    return ", ".join(f"{kind} {format_size(size)}" for kind, size in sizes if size)
