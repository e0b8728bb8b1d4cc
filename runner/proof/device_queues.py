"""Queues of a device that computes later than the host submits the work."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

_CALIBRATION_CYCLES = 10_000_000


class DeviceQueues(ABC):
    """The main queue of a device, and the side queues that a training creates."""

    @abstractmethod
    def note_side_queues(self) -> Any:
        """Returns a context in which the side queues that are created are noted."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until all queues are empty."""

    @abstractmethod
    def delay_main(self, seconds: float) -> None:
        """Keeps the main queue busy for this time; returns immediately."""

    @abstractmethod
    def delay_sides(self, seconds: float) -> None:
        """Keeps every side queue busy for this time; returns immediately."""

    def seconds(self, work: Callable[[], object]) -> float:
        """Performs the work, and returns the time until all queues are empty."""
        self.synchronize()
        started = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - started


class CudaQueues(DeviceQueues):
    """The CUDA streams of the current device."""

    def __init__(self) -> None:
        self._sides: dict[int, torch.cuda.Stream] = {}
        self._cycles_per_second = 0.0

    @contextmanager
    def note_side_queues(self) -> Iterator[None]:
        """Notes every stream object that is created inside the ``with``."""
        create: Any = torch.cuda.Stream.__new__

        def create_and_note(cls: Any, *args: Any, **kwargs: Any) -> torch.cuda.Stream:
            stream: torch.cuda.Stream = create(cls, *args, **kwargs)
            self._sides[stream.cuda_stream] = stream
            return stream

        torch.cuda.Stream.__new__ = create_and_note  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.cuda.Stream.__new__ = create  # type: ignore[method-assign]

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize()

    def delay_main(self, seconds: float) -> None:
        """Starts a kernel that only waits, on the current stream."""
        torch.cuda._sleep(self._cycles(seconds))  # type: ignore[no-untyped-call]

    def delay_sides(self, seconds: float) -> None:
        """Starts such a kernel on every other stream."""
        main = torch.cuda.current_stream().cuda_stream
        cycles = self._cycles(seconds)
        # The list is copied because the current stream is an object that is noted, too.
        for handle, stream in list(self._sides.items()):
            if handle != main:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    def _cycles(self, seconds: float) -> int:
        if not self._cycles_per_second:
            # The first kernel is slower than later ones.
            calibrate: Any = partial(torch.cuda._sleep, _CALIBRATION_CYCLES)
            calibrate()
            self._cycles_per_second = _CALIBRATION_CYCLES / self.seconds(calibrate)
        return int(seconds * self._cycles_per_second)


def device_queues() -> DeviceQueues | None:
    """Returns the queues of this machine's accelerator; None without one."""
    return CudaQueues() if torch.cuda.is_available() else None
