"""How fast an update could be at best on this machine: its least work over what the machine was measured to do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

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
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of 16 bits by the names that stages give them."""


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
    half_flops: Mapping[str, float] = field(default_factory=dict)
    """Matmul in types of 16 bits, by name; those that the device has."""

    @property
    def float32_flops(self) -> float:
        """The best rate of true float32, whichever kernels it takes."""
        return max(self.default_flops, self.relaxed_flops if self.relaxed_error < TRUE_FLOAT32 else 0.0)

    def flops(self, dtype: str | None = None) -> float:
        """The best rate for stages that may use this type beside float32."""
        return max(self.float32_flops, self.half_flops.get(dtype or "", 0.0))


@dataclass(frozen=True)
class UpdateCost:
    """What one update has to do at least."""

    counted_flop: int
    """As ``torch.utils.flop_counter`` counts the baseline's update."""
    least_flop: int
    """By formula where one is known, else as counted."""
    moved_bytes: int
    """That cannot but be read or written."""

    def limit_s(self, rates: Rates, dtype: str | None = None) -> float:
        """Seconds that the update takes at least, in float32 and the type that its stages may use."""
        return max(self.least_flop / rates.flops(dtype), self.moved_bytes / rates.copy_bytes)


def least_cost(counted: Mapping[str, Any]) -> UpdateCost:
    """The least work of one update.

    Args:
        counted: of the baseline: ``flop`` as torch counts them, ``optimizer_bytes``, and ``least``, the FLOP and bytes
            that its learner says are the least, or None.
    """
    flop = int(counted["flop"])
    least_flop, moved_bytes = counted["least"] or (flop, int(counted["optimizer_bytes"]))
    return UpdateCost(flop, least_flop, moved_bytes)


def optimizer_bytes(optimizers: Iterable[Optimizer]) -> int:
    """What their steps read and write: parameters and tensors of their state twice, gradients once."""
    moved = 0
    for optimizer in optimizers:
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        parameters = [each for each in own if each.grad is not None or each in optimizer.state]
        gradients = [each if each.grad is None else each.grad for each in parameters]  # some loops forget them
        state = [value for each in parameters for value in optimizer.state.get(each, {}).values()]
        moved += 2 * sum(map(_bytes, [*parameters, *state])) + sum(map(_bytes, gradients))
    return moved


def _bytes(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    if value.layout == torch.sparse_coo:
        return value._values().nbytes + value._indices().nbytes
    return value.nbytes


def measure(device: torch.device) -> Rates:
    """Measures the rates; takes some seconds."""
    shapes = [(1, *[_SQUARE[device.type]] * 3), *_BATCHED]
    rates, errors = {}, {}
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        measured = [_product(device, shape) for shape in shapes]
        rates[precision], errors[precision] = max(rate for rate, _ in measured), max(error for _, error in measured)
    torch.set_float32_matmul_precision("highest")
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    copy = 2 * _COPIED_BYTES / _seconds(device, lambda: target.copy_(source))
    half = {
        name: max(_product(device, shape, dtype)[0] for shape in shapes)
        for name, dtype in HALF.items()
        if _has(device, name)
    }
    return Rates(rates["highest"], rates["medium"], errors["medium"], copy, half)


def _has(device: torch.device, name: str) -> bool:
    """Whether a device computes in a type of 16 bits itself; what is emulated is slower than float32."""
    if device.type == "cuda":
        return name == "fp16" or torch.cuda.is_bf16_supported(including_emulation=False)
    return name == "bf16" and bool(torch.cpu.get_capabilities().get("avx512_bf16", False))


def _product(device: torch.device, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[float, float]:
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
