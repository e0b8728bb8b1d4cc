"""How fast an update could be at best on this machine: its least work over what the machine was measured to do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runner.child.protocol import Parent
from runner.compare.clock import Stopwatch

SECONDS = 0.3
"""For each shape of product, and for the copy."""
TRUE_FLOAT32 = 1e-5
"""A float32 product is off by some 1e-7 of its size, one of rounded factors by 3e-4 or more."""
_SQUARE = {"cpu": 1024, "cuda": 8192}
_BATCHED = ((8, 128, 256, 256), (8, 256, 256, 256), (32, 256, 256, 256))
"""Products as stacked networks of usual sizes have them: networks, batch, inputs, outputs."""
_COPIED_BYTES = 2**28
_ADAM_BYTES = 28
"""A parameter is read and written with two moments, and its gradient read."""


@dataclass(frozen=True)
class Rates:
    """What a machine was measured to do."""

    default_flops: float
    """Float32 matmul with torch's default kernels, FLOP/s: the best over shapes."""
    relaxed_flops: float
    """The same with ``torch.set_float32_matmul_precision("medium")``."""
    relaxed_error: float
    """Relative error of such a product."""
    copy_bytes: float
    """Bytes read plus bytes written, a second."""

    @property
    def float32_flops(self) -> float:
        """The best rate of true float32, whichever kernels it takes."""
        return max(self.default_flops, self.relaxed_flops if self.relaxed_error < TRUE_FLOAT32 else 0.0)


@dataclass(frozen=True)
class UpdateCost:
    """What one update has to do at least."""

    counted_flop: int
    """As ``torch.utils.flop_counter`` counts the baseline's update."""
    least_flop: int
    """By formula where one is known, else as counted."""
    moved_bytes: int
    """That cannot but be read or written."""

    def limit_s(self, rates: Rates) -> float:
        """Seconds that the update takes at least, in float32."""
        return max(self.least_flop / rates.float32_flops, self.moved_bytes / rates.copy_bytes)


def least_cost(counted: Mapping[str, Any]) -> UpdateCost:
    """The least work of one update.

    Args:
        counted: of the baseline: ``flop`` as torch counts them, ``parameters``, and ``least``, the FLOP and bytes that
            its learner says are the least, or None.
    """
    flop = int(counted["flop"])
    least_flop, moved_bytes = counted["least"] or (flop, _ADAM_BYTES * int(counted["parameters"]))
    return UpdateCost(flop, least_flop, moved_bytes)


def measure(device: torch.device) -> Rates:
    """Measures the rates; takes some seconds."""
    shapes = [(1, *[_SQUARE[device.type]] * 3), *_BATCHED]
    rates, errors = {}, {}
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        measured = [_product(device, *shape) for shape in shapes]
        rates[precision], errors[precision] = max(rate for rate, _ in measured), max(error for _, error in measured)
    torch.set_float32_matmul_precision("highest")
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    copy = 2 * _COPIED_BYTES / _seconds(device, lambda: target.copy_(source))
    return Rates(rates["highest"], rates["medium"], errors["medium"], copy)


def _product(device: torch.device, networks: int, rows: int, inner: int, columns: int) -> tuple[float, float]:
    """Rate and relative error of one batched product."""
    generator = torch.Generator(device).manual_seed(0)
    one = torch.randn(networks, rows, inner, generator=generator, device=device)
    other = torch.randn(networks, inner, columns, generator=generator, device=device)
    seconds = _seconds(device, lambda: torch.bmm(one, other))
    exact = one[0].double() @ other[0].double()
    error = float((torch.bmm(one, other)[0] - exact).norm() / exact.norm())
    return 2 * networks * rows * inner * columns / seconds, error


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Of one call, in the best block: a limit is what the machine can do when nobody disturbs it."""
    stopwatch = Stopwatch(device)
    for _ in range(3):
        once = stopwatch.seconds(work)
    count = max(1, round(SECONDS / 10 / once))

    def block() -> None:
        for _ in range(count):
            work()

    blocks = sorted(stopwatch.seconds(block) / count for _ in range(10))
    return statistics.median(blocks[:3])


def main(parent: Parent) -> None:
    """Tells the rates of a device."""
    parent.tell(**vars(measure(torch.device(parent.options["device"]))))
