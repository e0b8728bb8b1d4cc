"""The memory plan of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.memory.kinds import Kind, Usage, by_kind, by_module
from runner.system.byte_size import format_size

_MODULES = 12
"""Modules that a table shows."""


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted memory of an update at its highest point.

    Attributes:
        recipe: Its name.
        device: Type of the device for which it was planned.
        kernels: Type of the device whose operators were tracked.
        batch_size: Samples of an update.
        usage: Bytes by kind and module.
        largest: Which batch was planned, where batches differ; else empty.
        stages: Stages that are part of the plan.
        left_out: Stages that the recipe switches on and the plan leaves out, each with the reason.
        is_estimate: Whether a compiler will fuse operations that the plan counts one by one.
        is_real: Whether real tensors were used, because the learner needs their numbers.
        seconds: Time that planning took.
    """

    recipe: str
    device: str
    kernels: str
    batch_size: int
    usage: Usage
    largest: str
    stages: tuple[str, ...]
    left_out: Mapping[str, str]
    is_estimate: bool
    is_real: bool
    seconds: float

    @property
    def peak(self) -> int:
        """Bytes at the highest point."""
        return sum(self.usage.values())

    @property
    def resident(self) -> int:
        """Bytes of parameters and of the state of optimizers, which no stage makes smaller."""
        sizes = by_kind(self.usage)
        return sizes[Kind.parameters] + sizes[Kind.optimizer]

    @property
    def tolerance(self) -> float | None:
        """Relative error that the plan stays below; None for an estimate."""
        return None if self.is_estimate or self.kernels != self.device else 0.05

    @property
    def accuracy(self) -> str:
        """What is known about the error of the plan."""
        if self.kernels != self.device:
            return f"an estimate with the operators of a {self.kernels}, because no GPU is here"
        if self.tolerance is None:
            return (
                "an estimate without the compiler; --compiled plans what it generates"
            )
        return f"within {self.tolerance:.0%}"

    def data(self) -> dict[str, Any]:
        """Returns the plan as plain data."""
        modules = {
            name: {kind.value: size for kind, size in sizes.items()}
            for name, sizes in by_module(self.usage).items()
        }
        return {
            "recipe": self.recipe,
            "device": self.device,
            "kernels": self.kernels,
            "batch_size": self.batch_size,
            "largest_batch": self.largest,
            "peak_bytes": self.peak,
            "bytes": {kind.value: size for kind, size in by_kind(self.usage).items()},
            "modules": modules,
            "stages": list(self.stages),
            "left_out": dict(self.left_out),
            "tolerance": self.tolerance,
            "real_tensors": self.is_real,
            "seconds": self.seconds,
        }

    def lines(self) -> list[str]:
        """Returns the plan as text: a table by kind, and one by module."""
        title = f"{self.recipe} on {self.device}, batch size {self.batch_size:,}"
        lines = [
            f"{title}: {format_size(self.peak)} at the peak of an update, {self.accuracy}"
        ]
        if self.largest:
            lines.append(f"planned for the largest batch: {self.largest}")
        kinds = {kind.value: size for kind, size in by_kind(self.usage).items() if size}
        lines += ["", *self._table(kinds)]
        modules = {
            name: sum(sizes.values()) for name, sizes in by_module(self.usage).items()
        }
        largest = dict(list(modules.items())[:_MODULES])
        if len(modules) > len(largest):
            hidden = len(modules) - len(largest)
            largest[f"{hidden} more modules"] = self.peak - sum(largest.values())
        lines += ["", "by module", *self._table(largest)]
        lines += [
            f"{kind} is left out: {reason}" for kind, reason in self.left_out.items()
        ]
        return lines

    def _table(self, rows: Mapping[str, int]) -> list[str]:
        width = max(map(len, rows), default=0)
        peak = max(1, self.peak)
        return [
            f"  {name:{width}}  {format_size(size):>9}  {size / peak:4.0%}"
            for name, size in rows.items()
        ]
