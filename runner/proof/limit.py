"""How fast an update could be at best on this machine: its least work over what the machine was measured to do.

Run as ``python -m runner.proof.limit DEVICE`` it measures the rates, in a process of its own, and prints them.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runner.proof.clock import Stopwatch

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
_POLYAK_BYTES = 12


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
class Work:
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


def work(kind: str, shapes: Mapping[str, Sequence[int]], hidden: Sequence[int], counted: Mapping[str, Any],
         batch_size: int) -> Work:  # fmt: skip
    """The least work of one update.

    Args:
        kind: of the learner; the formula is known for ``masac``.
        shapes: of the source's batches.
        hidden: widths of the learner's hidden layers, empty if it has none.
        counted: ``flop`` and ``parameters`` of the baseline.
        batch_size: samples of one update.
    """
    flop, parameters = int(counted["flop"]), int(counted["parameters"])
    if kind != "masac":
        return Work(flop, flop, _ADAM_BYTES * parameters)
    agents, observation = shapes["observation"]
    action = shapes["action"][1]
    least = masac_flop(agents, observation, action, hidden, batch_size)
    actor = agents * sum(a * b for a, b in zip([observation, *hidden], [*hidden, 2 * action], strict=True))
    activations = 4 * batch_size * agents * 13 * sum(hidden)
    moved = _ADAM_BYTES * parameters + _POLYAK_BYTES * (parameters - actor) + activations
    return Work(flop, least, moved)


def masac_flop(agents: int, observation: int, action: int, hidden: Sequence[int], batch_size: int) -> int:
    """The least matrix FLOP of one simultaneous multi-agent SAC update.

    A forward through P weights costs 2 P a sample, as do the gradient of the weights and that of the inputs, of which
    the first layer needs none. For every agent there are two target and two online critics forward, both gradients of
    the online ones, these once more on fresh actions with gradients for the own action alone, and two forwards and one
    backward of the actor.
    """
    joint = agents * (observation + action)
    first, last = hidden[0], hidden[-1]
    between = sum(a * b for a, b in itertools.pairwise(hidden))
    critic = joint * first + between + last
    actor = observation * first + between + last * 2 * action
    each = 24 * critic - 8 * joint * first + 4 * action * first + 8 * actor - 2 * observation * first
    return agents * batch_size * each


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


def main() -> int:
    """Answers each line of stdin with the rates of the device that it names."""
    for line in sys.stdin:
        rates = measure(torch.device(line.strip()))
        sys.stdout.write(json.dumps(vars(rates)) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
