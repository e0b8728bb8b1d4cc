"""Result of an ablation by memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from runner.ablation.update_memory import UpdateMemory
from runner.system.errors import ExitCode
from runner.verify.variants import ALL, BASELINE

LARGEST_DISAGREEMENT = 0.1
"""Relative difference up to which the two CPU measurements confirm each other."""


@dataclass(frozen=True)
class VariantMemory:
    """Memory of one set of stages.

    Attributes:
        name: Name of the variant.
        also: Other names of the same set.
        stages: The stages that are on.
        memory: Memory of its largest update.
        process: Most bytes that its process held, or that torch reserved on a CUDA device.
        remaining: Update memory relative to the baseline's.
        remaining_saved: Bytes held for backward relative to the baseline's.
        adds: The same as ``remaining``, but relative to the stages that this one requires.
        adds_saved: The same for bytes held for backward.
        notes: Remarks of the stages.
    """

    name: str
    also: tuple[str, ...]
    stages: tuple[str, ...]
    memory: UpdateMemory
    process: int
    remaining: float
    remaining_saved: float
    adds: float
    adds_saved: float
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Returns all names of the variant."""
        return ", ".join([self.name, *self.also])


@dataclass(frozen=True)
class CaseMemory:
    """Memory of all variants of one case.

    Attributes:
        name: Name of the case; empty if there is only one.
        device: Device of the updates.
        threads: Number of threads.
        batch_size: Samples of the baseline's batches.
        updates: Number of measured updates.
        variants: The measured variants, the baseline first.
        product: Product of the shares of the update memory that remain with each stage.
        product_saved: The same for the bytes held for backward.
        inactive: Stages without effect on this machine, with the reason.
        refused: Variants that cannot exist, with the reason.
        failed: Variants that were not measured, with the reason.
        synthetic: Whether the data are synthetic.
    """

    name: str
    device: str
    threads: int
    batch_size: int
    updates: int
    variants: tuple[VariantMemory, ...]
    product: float
    product_saved: float
    inactive: Mapping[str, str]
    refused: Mapping[str, str]
    failed: Mapping[str, str]
    synthetic: bool = False

    def named(self, name: str) -> VariantMemory | None:
        """Returns the variant of that name, if it was measured."""
        matching = (item for item in self.variants if name in (item.name, *item.also))
        return next(matching, None)

    @property
    def disagreement(self) -> float | None:
        """Largest difference between the two CPU measurements; None if there are not both."""
        values = (variant.memory.disagreement for variant in self.variants)
        return max((value for value in values if value is not None), default=None)


@dataclass(frozen=True)
class MemoryResult:
    """Result of one ablation by memory."""

    name: str
    digest: str
    command: str
    machine: Mapping[str, str | int]
    cases: tuple[CaseMemory, ...]
    seconds: float
    folder: str
    interrupted: bool
    signal: int = 0

    @property
    def exit_code(self) -> ExitCode:
        """Exit code: 128 plus the signal, or 4 if all stages together were not measured."""
        if self.signal:
            return ExitCode(128 + self.signal)
        complete = all(case.named(ALL) is not None for case in self.cases)
        return ExitCode.DONE if complete else ExitCode.INCONCLUSIVE

    def data(self) -> dict[str, Any]:
        """Returns the result as one JSON object; ``variants`` lists those of all cases."""
        tree = asdict(self) | {"metric": "memory", "variants": []}
        for case in tree["cases"]:
            for variant in case.pop("variants"):
                tree["variants"].append({"case": case["name"], **variant})
        data: dict[str, Any] = without_nan(tree)
        return data

    def metrics(self) -> Iterator[tuple[str, str, float]]:
        """Yields a name, the variant and what remains of its update memory."""
        for case in self.cases:
            for variant in case.variants:
                if variant.name != BASELINE and math.isfinite(variant.remaining):
                    name = " ".join(filter(None, (case.name, variant.name)))
                    yield name, variant.name, variant.remaining


def without_nan(tree: Any) -> Any:
    """Returns a tree of JSON in which None replaces what is not a number."""
    if isinstance(tree, dict):
        return {name: without_nan(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_nan(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def remaining(memory: UpdateMemory, baseline: UpdateMemory) -> float:
    """Returns the share of a baseline's update memory, both measured in the same way."""
    # Tracked bytes and growth of the process differ, so only like is compared with like.
    if (
        memory.tracked is not None
        and baseline.tracked is not None
        and memory.update == memory.tracked
    ):
        return share(memory.tracked, baseline.tracked)
    if memory.grown is not None and baseline.grown is not None:
        return share(memory.grown, baseline.grown)
    return share(memory.update, baseline.update)


def share(size: float, total: float) -> float:
    """Returns the share of a total; 1 if both are zero, not a number if only the total is."""
    if not total:
        return math.nan if size else 1.0
    return size / total
