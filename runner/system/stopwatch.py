"""Seconds that work takes on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Stopwatch:
    """Seconds that work takes on a device: by device events on a GPU, by the wall clock on a CPU."""

    device: torch.device

    def seconds(self, work: Callable[[], object]) -> float:
        """Performs the work and returns its duration, including that of the device."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        # Events belong to the current device's stream.
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            work()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3
