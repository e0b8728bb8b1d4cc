"""How fast an update can be at best, by what this machine was measured to do in a child process of its own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from runner.child.protocol import Parent
from runner.compare.stopwatch import Stopwatch

SECONDS = 0.3  # for each shape of product, and for the copy
TRUE_FLOAT32 = 1e-5  # a float32 product is off by some 1e-7 of its size, one of rounded factors by 3e-4 or more
_SQUARE = {"cpu": 1024, "cuda": 8192}
_BATCHED = ((8, 128, 256, 256), (8, 256, 256, 256), (32, 256, 256, 256))
"""Products as stacked networks of usual sizes have them: networks, batch, inputs, outputs."""
_COPIED_BYTES = 2**28


@dataclass(frozen=True)
class Rates:
    """What a machine was measured to do."""

    default_flops: float  # float32 matmul with torch's default kernels, FLOP/s: the best over shapes
    relaxed_flops: float  # the same with ``torch.set_float32_matmul_precision("medium")``
    relaxed_error: float  # relative error of such a product
    copy_bytes: float  # bytes read plus bytes written, a second
    half_flops: Mapping[str, float] = field(default_factory=dict)  # matmul in the types of 16 bits that it has

    @property
    def float32_flops(self) -> float:
        """The best rate of true float32, whichever kernels it takes."""
        return max(self.default_flops, self.relaxed_flops if self.relaxed_error < TRUE_FLOAT32 else 0.0)


@dataclass(frozen=True)
class UpdateCost:
    """What one update has to do at least."""

    counted_flop: int  # as torch counts the baseline's update
    least_flop: int  # by the learner's formula where it has one, else as counted
    moved_bytes: int  # that cannot but be read or written

    @classmethod
    def of(cls, counted: Mapping[str, Any]) -> UpdateCost:
        """From what the baseline counted, whose learner may have no formula of the least."""
        return cls(counted["flop"], *(counted["least"] or (counted["flop"], counted["optimizer_bytes"])))

    def limit_s(self, rates: Rates, dtype: str | None = None) -> float:
        """Seconds that the update takes at least, in float32 and the type of 16 bits that its stages may use."""
        flops = max(rates.float32_flops, rates.half_flops.get(dtype or "", 0.0))
        return max(self.least_flop / flops, self.moved_bytes / rates.copy_bytes)


def measure(device: torch.device) -> Rates:
    """Measures the rates; takes some seconds."""
    shapes = [(1, *[_SQUARE[device.type]] * 3), *_BATCHED]
    rates, errors = {}, {}
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        measured = [_product(device, shape, torch.float32) for shape in shapes]
        rates[precision], errors[precision] = map(max, zip(*measured, strict=True))
    torch.set_float32_matmul_precision("highest")
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    copy = 2 * _COPIED_BYTES / _seconds(device, lambda: target.copy_(source))
    # Types that the device computes in itself; what is emulated is slower than float32.
    if device.type == "cuda":
        has = {"bf16": torch.cuda.is_bf16_supported(including_emulation=False), "fp16": True}
    else:
        has = {"bf16": bool(torch.cpu.get_capabilities().get("avx512_bf16", False)), "fp16": False}
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    half = {name: max(_product(device, shape, dtypes[name])[0] for shape in shapes) for name in dtypes if has[name]}
    return Rates(rates["highest"], rates["medium"], errors["medium"], copy, half)


def _product(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> tuple[float, float]:
    """Rate and relative error of one batched product."""
    networks, rows, inner, columns = shape
    generator = torch.Generator(device).manual_seed(0)
    one = torch.randn(networks, rows, inner, generator=generator, device=device).to(dtype)
    other = torch.randn(networks, inner, columns, generator=generator, device=device).to(dtype)
    seconds = _seconds(device, lambda: torch.bmm(one, other))
    exact = one[0].double() @ other[0].double()
    error = float((torch.bmm(one, other)[0] - exact).norm() / exact.norm())
    return 2 * networks * rows * inner * columns / seconds, error


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Of one call, in the best blocks: a limit is what the machine can do when nobody disturbs it."""
    stopwatch = Stopwatch(device)
    for _ in range(3):
        once = stopwatch.seconds(work)
    count = max(1, round(SECONDS / 10 / once))

    def block() -> None:
        for _ in range(count):
            work()

    return statistics.median(sorted(stopwatch.seconds(block) / count for _ in range(10))[:3])


def main(parent: Parent) -> None:
    """Tells the rates of a device."""
    parent.tell(**vars(measure(torch.device(parent.options["device"]))))
