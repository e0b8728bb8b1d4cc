"""The shortest possible time of an update: its minimal work, divided by the
measured rates of this machine.

The roofline is that of Williams et al. 2009: the larger of FLOP / (FLOP/s of products) and bytes / (bytes/s of copies).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from runner.child.protocol import Parent
from runner.system.stopwatch import Stopwatch
from runner.training.step import Drawn

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from runner.training.step import Step

SECONDS = 0.3  # for each shape of product, and for the copy
TRUE_FLOAT32 = 1e-5  # a float32 product is off by some 1e-7 of its size, one of rounded factors by 3e-4 or more
_SQUARE = {"cpu": 1024, "cuda": 8192}
_BATCHED = ((8, 128, 256, 256), (8, 256, 256, 256), (32, 256, 256, 256))
"""Products as stacked networks of usual sizes have them: networks, batch, inputs, outputs."""
_COPIED_BYTES = 2**28


@dataclass(frozen=True)
class Rates:
    """Measured rates of a machine."""

    default_flops: float  # float32 matmul with torch's default kernels, FLOP/s: the best over shapes
    relaxed_flops: (
        float  # the same with ``torch.set_float32_matmul_precision("medium")``
    )
    relaxed_error: float  # relative error of such a product
    copy_bytes: float  # bytes read plus bytes written, a second
    half_flops: Mapping[str, float] = field(
        default_factory=dict
    )  # matmul in the types of 16 bits that it has

    @property
    def float32_flops(self) -> float:
        """The best rate of true float32, whichever kernels it takes."""
        return max(
            self.default_flops,
            self.relaxed_flops if self.relaxed_error < TRUE_FLOAT32 else 0.0,
        )


@dataclass(frozen=True)
class UpdateCost:
    """The minimal work of one update."""

    counted_flop: int  # as torch counts the baseline's update
    least_flop: int  # by the learner's formula where it has one, else as counted
    moved_bytes: int  # that cannot but be read or written

    @classmethod
    def of(cls, counted: Mapping[str, Any]) -> UpdateCost:
        """Creates the cost from the counts of a baseline; a learner may have no
        formula for the minimum.
        """
        return cls(
            counted["flop"],
            *(counted["least"] or (counted["flop"], counted["optimizer_bytes"])),
        )

    def limit_s(self, rates: Rates, dtype: str | None = None) -> float:
        """Seconds that the update takes at least, in float32 and the type of 16 bits that its stages may use."""
        flops = max(rates.float32_flops, rates.half_flops.get(dtype or "", 0.0))
        return max(self.least_flop / flops, self.moved_bytes / rates.copy_bytes)


def dtype_of(stages: Iterable[object]) -> str | None:
    """The type of 16 bits that the settings of stages name; None if none does."""
    return next(filter(None, (getattr(stage, "dtype", None) for stage in stages)), None)


class _AllModules:
    """Replaces ``FlopCounterMode``'s tracker of modules: everything is counted together.

    Torch's tracker waits for the gradients of a module's inputs, which fails in a gradient with
    respect to a leaf, such as a gradient penalty.
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        """Does nothing: no module is followed."""

    def __exit__(self, *error: object) -> None:
        """Does nothing."""


def count_work(step: Step, drawn: Drawn) -> dict[str, Any]:
    """Makes an update, and returns what it computed and has to move, for ``UpdateCost.of``.

    Stages that compile are left out of it, because torch counts nothing in compiled code.
    """
    learner = step.learner
    counter = FlopCounterMode(display=False)
    modules: Any = _AllModules()
    counter.mod_tracker = modules
    with torch.compiler.set_stance("force_eager"), counter:
        step.update(drawn)
    moved = optimizer_bytes(optimizer for _, optimizer in learner.optimizers())
    least = learner.least_work(step.pipeline.batch_size)
    return {"flop": counter.get_total_flops(), "optimizer_bytes": moved, "least": least}


def optimizer_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Returns the bytes that the steps read and write: parameters and tensors of
    their state twice, gradients once.
    """
    moved = 0
    for optimizer in optimizers:
        for own in (
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
        ):
            if own.grad is not None or own in optimizer.state:
                gradient = (
                    own if own.grad is None else own.grad
                )  # some loops forget them
                moved += 2 * sum(
                    map(_bytes, [own, *optimizer.state.get(own, {}).values()])
                ) + _bytes(gradient)
    return moved


def _bytes(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    if value.layout == torch.sparse_coo:
        return value._values().nbytes + value._indices().nbytes
    return value.nbytes


def measure_fraction(step: Step, update_s: float) -> float | None:
    """Returns the fraction of its roofline that an update reaches.

    This makes one more update, after which the training cannot continue.

    Args:
        step: A training's, after its end.
        update_s: Seconds of one of its updates.

    Returns:
        Least seconds of an update by seconds that it took; None if it computes no products, or nothing can be counted.
    """
    device = step.pipeline.device
    try:
        work = UpdateCost.of(
            count_work(
                step, Drawn(step.batch, step.learner.noise(step.batch, step.noise))
            )
        )
        rates = measure(device, quick=True)
    except Exception:  # A plugin may raise anything, and a GPU be full: a training that has ended does not fail of it.
        return None
    if not work.counted_flop:
        return None
    stages = step.pipeline.recipe.stages
    return (
        work.limit_s(rates, dtype_of(stages[kind] for kind in step.pipeline.stages))
        / update_s
    )


def measure(device: torch.device, *, quick: bool = False) -> Rates:
    """Measures the rates in some seconds; ``quick`` in a fraction of one, with less memory and less precision."""
    seconds, copied_bytes = (
        (SECONDS / 10, _COPIED_BYTES // 4) if quick else (SECONDS, _COPIED_BYTES)
    )
    shapes: list[Sequence[int]] = list(_BATCHED)
    if not (quick and device.type == "cpu"):
        shapes.append((1, *[_SQUARE[device.type]] * 3))
    rates, errors = {}, {}
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            measured = [
                _product(device, shape, torch.float32, seconds) for shape in shapes
            ]
            rates[precision], errors[precision] = map(max, zip(*measured, strict=True))
    finally:
        # A GPU may be full, and the process continues.
        torch.set_float32_matmul_precision(before)
    source = torch.empty(copied_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    copy = 2 * copied_bytes / _seconds(device, lambda: target.copy_(source), seconds)
    # Types that the device computes in itself; what is emulated is slower than float32.
    if device.type == "cuda":
        has = {
            "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
            "fp16": True,
        }
    else:
        has = {
            "bf16": bool(torch.cpu.get_capabilities().get("avx512_bf16", False)),
            "fp16": False,
        }
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    half = {
        name: max(_product(device, shape, dtypes[name], seconds)[0] for shape in shapes)
        for name in dtypes
        if has[name]
    }
    return Rates(rates["highest"], rates["medium"], errors["medium"], copy, half)


def _product(
    device: torch.device, shape: Sequence[int], dtype: torch.dtype, limit_s: float
) -> tuple[float, float]:
    """Rate and relative error of one batched product."""
    networks, rows, inner, columns = shape
    generator = torch.Generator(device).manual_seed(0)
    one = torch.randn(networks, rows, inner, generator=generator, device=device).to(
        dtype
    )
    other = torch.randn(
        networks, inner, columns, generator=generator, device=device
    ).to(dtype)
    seconds = _seconds(device, lambda: torch.bmm(one, other), limit_s)
    exact = one[0].double() @ other[0].double()
    error = float((torch.bmm(one, other)[0] - exact).norm() / exact.norm())
    return 2 * networks * rows * inner * columns / seconds, error


def _seconds(device: torch.device, work: Callable[[], object], limit_s: float) -> float:
    """Returns the seconds of one call in the fastest blocks, because the limit is
    the speed of an undisturbed machine.
    """
    stopwatch = Stopwatch(device)
    for _ in range(3):
        once = stopwatch.seconds(work)
    count = max(1, round(limit_s / 10 / once))

    def block() -> None:
        for _ in range(count):
            work()

    return statistics.median(
        sorted(stopwatch.seconds(block) / count for _ in range(10))[:3]
    )


def main(parent: Parent) -> None:
    """Sends the rates of a device."""
    parent.tell(**vars(measure(torch.device(parent.options["device"]))))
