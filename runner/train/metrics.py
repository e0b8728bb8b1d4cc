"""What updates return, summed and counted by name until it is reported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from runner.plugin.learner import Mean
from runner.plugin.source import State
from runner.system.errors import RunnerError

RESERVED = frozenset({"updates"})
"""Names under ``train/`` that are the runner's own."""


class Means:
    """Sums and counts of scalars by name.

    On a CPU they are numbers; on a GPU, tensors that stay there, so that nothing waits for it.
    """

    def __init__(self, who: str, on_host: bool) -> None:
        """Begins with nothing.

        Args:
            who: returns the scalars, for messages.
            on_host: whether looking at a scalar is free.
        """
        self.who, self.on_host = who, on_host
        self.sums: dict[str, Any] = {}
        self.counts: dict[str, Any] = {}
        self.finite = True
        """Whether all that was looked at so far was finite; on a GPU, nothing is before ``look``."""

    def add(self, output: Mapping[str, Any]) -> None:
        """Adds the scalars and ``Mean``s that an update returned.

        Raises:
            RunnerError: it returned no scalar, or something that is neither a tensor, a float nor a ``Mean``.
        """
        found = False
        for name, value in output.items():
            if isinstance(value, torch.Tensor) and value.dim():
                continue
            total, count = self._sum_and_count(name, value)
            found = True
            if self.on_host:
                total, count = float(total), float(count)
                self.finite = self.finite and math.isfinite(total)
            elif isinstance(total, torch.Tensor):
                total = total.detach().double()
            if name in self.sums:
                self.sums[name] += total
                self.counts[name] += count
            else:
                self._begin(name, total, count)
        if not found:
            raise RunnerError(f"{self.who}.update returns no scalar: there is no loss to watch")

    def look(self) -> bool:
        """Whether all sums are finite; waits for a GPU."""
        if not self.on_host and self.sums:
            self.finite = all(math.isfinite(float(total)) for total in self.sums.values())
        return self.finite

    def take(self) -> dict[str, float]:
        """The means of all that was added since the last time; what was counted as nothing has none."""
        counts = {name: float(count) for name, count in self.counts.items()}
        means = {name: float(total) / counts[name] for name, total in self.sums.items() if counts[name]}
        self.sums, self.counts = {}, {}
        return means

    def state_dict(self) -> State:
        """Sums and counts."""
        return {"sums": dict(self.sums), "counts": dict(self.counts)}

    def load_state_dict(self, state: State, device: torch.device) -> None:
        """Restores what ``state_dict`` returned, where it is added up."""
        for name, mine in (("sums", self.sums), ("counts", self.counts)):
            mine |= {
                key: value.to(device) if isinstance(value, torch.Tensor) else value
                for key, value in state[name].items()
            }

    def _sum_and_count(self, name: str, value: Any) -> tuple[Any, Any]:
        if isinstance(value, Mean) and all(map(_is_number, value)):
            return value
        if isinstance(value, torch.Tensor) or type(value) is float:
            return value, 1
        raise RunnerError(
            f"{self.who}.update returned '{name}' as {_described(value)}; it should be a tensor, a float, or "
            "Mean(sum, count) of numbers or scalar tensors"
        )

    def _begin(self, name: str, total: Any, count: Any) -> None:
        if name in RESERVED:
            raise RunnerError(
                f"{self.who}.update returns a scalar '{name}', which is what the runner calls its own count"
            )
        self.sums[name] = total.clone() if isinstance(total, torch.Tensor) else total
        self.counts[name] = count.clone() if isinstance(count, torch.Tensor) else count


def _is_number(value: Any) -> bool:
    return value.dim() == 0 if isinstance(value, torch.Tensor) else type(value) in (int, float)


def _described(value: Any) -> str:
    parts = f" of {' and '.join(type(each).__name__ for each in value)}" if isinstance(value, Mean) else ""
    return type(value).__name__ + parts
