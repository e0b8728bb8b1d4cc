"""The child process that measures what this machine can do at best, which limits how fast an update can be."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from runner.child.protocol import Parent
from runner.compare.clock import Stopwatch
from runner.measure.analysis import Rates

SECONDS = 0.3  # for each shape of product, and for the copy
_SQUARE = {"cpu": 1024, "cuda": 8192}
_BATCHED = ((8, 128, 256, 256), (8, 256, 256, 256), (32, 256, 256, 256))
"""Products as stacked networks of usual sizes have them: networks, batch, inputs, outputs."""
_COPIED_BYTES = 2**28


def measure(device: torch.device) -> Rates:
    """Measures the rates; takes some seconds."""
    shapes = [(1, *[_SQUARE[device.type]] * 3), *_BATCHED]
    rates, errors = {}, {}
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        measured = [_product(device, shape, torch.float32) for shape in shapes]
        rates[precision], errors[precision] = max(rate for rate, _ in measured), max(error for _, error in measured)
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
