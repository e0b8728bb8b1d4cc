"""The shortest possible time of an update: its minimal work, divided by this machine's rates.

The roofline is that of Williams et al. 2009: the larger of FLOP / (FLOP/s of products) and
bytes / (bytes/s of copies).
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

# Time of the measurement of each shape of product, and of the copy.
SECONDS = 0.3
# A float32 product has a relative error of some 1e-7, one of rounded factors of 3e-4 or more.
TRUE_FLOAT32 = 1e-5
_SQUARE = {"cpu": 1024, "cuda": 8192}
# Products as stacked networks of usual sizes have them: networks, batch, inputs, outputs.
_BATCHED = ((8, 128, 256, 256), (8, 256, 256, 256), (32, 256, 256, 256))
_COPIED_BYTES = 2**28
_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Rates:
    """Measured rates of a machine.

    Attributes:
        default_flops: FLOP/s of float32 products with torch's default kernels, best of all shapes.
        relaxed_flops: The same with ``torch.set_float32_matmul_precision("medium")``.
        relaxed_error: Relative error of such a product.
        copy_bytes: Bytes read plus bytes written, per second.
        half_flops: FLOP/s of products in the types of 16 bits that the machine has.
    """

    default_flops: float
    relaxed_flops: float
    relaxed_error: float
    copy_bytes: float
    half_flops: Mapping[str, float] = field(default_factory=dict)

    @property
    def float32_flops(self) -> float:
        """The best rate of true float32, with whichever kernels."""
        if self.relaxed_error < TRUE_FLOAT32:
            return max(self.default_flops, self.relaxed_flops)
        return self.default_flops


@dataclass(frozen=True)
class UpdateCost:
    """The minimal work of one update.

    Attributes:
        counted_flop: FLOP as torch counts them in the baseline's update.
        least_flop: FLOP by the learner's formula, or as counted if it has none.
        moved_bytes: Bytes that every implementation reads or writes.
    """

    counted_flop: int
    least_flop: int
    moved_bytes: int

    @classmethod
    def of(cls, counted: Mapping[str, Any]) -> UpdateCost:
        """Creates the cost from the counts of a baseline."""
        minimum = counted["least"]
        # A learner may have no formula for the minimum.
        if not minimum:
            minimum = (counted["flop"], counted["optimizer_bytes"])
        return cls(counted["flop"], *minimum)

    def limit_s(self, rates: Rates, dtype: str | None = None) -> float:
        """Returns the least seconds of the update.

        Args:
            rates: The rates of the machine.
            dtype: The type of 16 bits that its stages may use; None for float32 only.
        """
        flops = max(rates.float32_flops, rates.half_flops.get(dtype or "", 0.0))
        return max(self.least_flop / flops, self.moved_bytes / rates.copy_bytes)


def dtype_of(stages: Iterable[object]) -> str | None:
    """Returns the type of 16 bits that the settings of stages name; None if there is none."""
    dtypes = (getattr(stage, "dtype", None) for stage in stages)
    return next(filter(None, dtypes), None)


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
    """Makes an update, and returns its counts for ``UpdateCost.of``."""
    learner = step.learner
    counter = FlopCounterMode(display=False)
    modules: Any = _AllModules()
    counter.mod_tracker = modules
    # Torch counts nothing in compiled code.
    with torch.compiler.set_stance("force_eager"), counter:
        step.update(drawn)
    moved = optimizer_bytes(optimizer for _, optimizer in learner.optimizers())
    least = learner.least_work(step.pipeline.batch_size)
    return {"flop": counter.get_total_flops(), "optimizer_bytes": moved, "least": least}


def optimizer_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Returns the bytes that the optimizers' steps read and write.

    These are parameters and tensors of their state twice, and gradients once.
    """
    moved = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None and parameter not in optimizer.state:
                    continue
                # Some loops delete gradients after a step.
                gradient = parameter if parameter.grad is None else parameter.grad
                state = optimizer.state.get(parameter, {})
                written = [parameter, *state.values()]
                moved += 2 * sum(map(_bytes, written)) + _bytes(gradient)
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
        step: The step of a training, after its end.
        update_s: Seconds of one of its updates.

    Returns:
        Least seconds of an update by its actual seconds; None if it computes no products, or
            nothing can be counted.
    """
    pipeline = step.pipeline
    # A plugin may raise anything, and a GPU may be full: a training that has ended does not fail.
    try:
        inputs = Drawn(step.batch, step.learner.noise(step.batch, step.noise))
        work = UpdateCost.of(count_work(step, inputs))
        rates = measure(pipeline.device, quick=True)
    except Exception:
        return None
    if not work.counted_flop:
        return None
    stages = pipeline.recipe.stages
    dtype = dtype_of(stages[kind] for kind in pipeline.stages)
    return work.limit_s(rates, dtype) / update_s


def measure(device: torch.device, *, quick: bool = False) -> Rates:
    """Measures the rates in some seconds.

    With ``quick``, it takes a fraction of a second, less memory, and is less precise.
    """
    seconds = SECONDS
    copied_bytes = _COPIED_BYTES
    shapes: list[Sequence[int]] = list(_BATCHED)
    if quick:
        seconds /= 10
        copied_bytes //= 4
    if not (quick and device.type == "cpu"):
        shapes.append((1, *[_SQUARE[device.type]] * 3))

    rates = {}
    errors = {}
    default_precision = torch.get_float32_matmul_precision()
    # A GPU may be full, and the process continues: the precision is restored in any case.
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            products = [
                _product(device, shape, torch.float32, seconds) for shape in shapes
            ]
            rates[precision] = max(rate for rate, _ in products)
            errors[precision] = max(error for _, error in products)
    finally:
        torch.set_float32_matmul_precision(default_precision)

    source = torch.empty(copied_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    copy_s = _seconds(device, lambda: target.copy_(source), seconds)

    half_rates = {}
    for name in _native_half_dtypes(device):
        dtype = _HALF_DTYPES[name]
        half_rates[name] = max(
            _product(device, shape, dtype, seconds)[0] for shape in shapes
        )
    return Rates(
        default_flops=rates["highest"],
        relaxed_flops=rates["medium"],
        relaxed_error=errors["medium"],
        copy_bytes=2 * copied_bytes / copy_s,
        half_flops=half_rates,
    )


def _native_half_dtypes(device: torch.device) -> list[str]:
    """Returns the types of 16 bits in which the device computes.

    A type that it emulates is slower than float32.
    """
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return ["bf16", "fp16"] if has_bf16 else ["fp16"]
    has_bf16 = bool(torch.cpu.get_capabilities().get("avx512_bf16", False))
    return ["bf16"] if has_bf16 else []


def _product(
    device: torch.device, shape: Sequence[int], dtype: torch.dtype, limit_s: float
) -> tuple[float, float]:
    """Returns rate and relative error of one batched product."""
    networks, rows, inner, columns = shape
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        numbers = torch.randn(*sizes, generator=generator, device=device)
        return numbers.to(dtype)

    left = random(networks, rows, inner)
    right = random(networks, inner, columns)
    seconds = _seconds(device, lambda: torch.bmm(left, right), limit_s)
    exact = left[0].double() @ right[0].double()
    difference = torch.bmm(left, right)[0] - exact
    error = float(difference.norm() / exact.norm())
    return 2 * networks * rows * inner * columns / seconds, error


def _seconds(device: torch.device, work: Callable[[], object], limit_s: float) -> float:
    """Returns the seconds of one call in the fastest blocks."""
    stopwatch = Stopwatch(device)
    for _ in range(3):
        once = stopwatch.seconds(work)
    count = max(1, round(limit_s / 10 / once))

    def block() -> None:
        for _ in range(count):
            work()

    times = sorted(stopwatch.seconds(block) / count for _ in range(10))
    # The limit is the speed of an undisturbed machine, so slow blocks do not count.
    return statistics.median(times[:3])


def main(parent: Parent) -> None:
    """Sends the rates of a device."""
    parent.tell(**vars(measure(torch.device(parent.options["device"]))))
