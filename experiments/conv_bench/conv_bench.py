"""Measures every backend for convolutions on a set of shapes, in all three directions.

    python experiments/conv_bench/conv_bench.py                 # what is measured already is kept
    python experiments/conv_bench/conv_bench.py --errors        # no times, for a busy machine
    python experiments/conv_bench/conv_bench.py k3_s1 large     # only these shapes, again
    python experiments/conv_bench/conv_bench.py --backends im2col fft --dtype float64
    python experiments/conv_bench/conv_bench.py --report        # table and plot alone

Backends of a shape are timed interleaved, each block with fresh inputs, beside a second copy of
``native`` that shows the machine's noise. Errors are relative to a reference in float64.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import yaml
from conv_report import write_report
from pydantic import Field, TypeAdapter, ValidationError
from scipy.stats import bootstrap

from runner.api import Config, UsageError
from runner.plugins.vision.convolution.backend import Backend
from runner.plugins.vision.convolution.geometry import ConvGeometry
from runner.plugins.vision.convolution.key import DIRECTIONS, ConvKey
from runner.plugins.vision.convolution.registry import BACKENDS, NATIVE, backend_named
from runner.proof import ratio
from runner.system.hardware import cpu_model
from runner.system.stopwatch import Stopwatch
from runner.training.roofline import measure

FOLDER = Path(__file__).parent
WARM_UPS = 3
ROUNDS = 9
"""Of blocks of all backends, in one order and then in the reverse order."""
BLOCK_SECONDS = 0.02
INPUTS = 4
"""Sets of inputs that the calls of a block take in turn; every block has others."""
LARGE_FLOP = 1e9
SEEDS = {False: 20, True: 3}
"""For errors, by whether a shape is large: a reference in float64 takes seconds there."""
ALARM = 1e-6
"""Above it, the original's test reports an error of its metric."""

Sizes = Annotated[list[int], Field(min_length=4, max_length=4)]


class Shape(Config):
    """One line of ``shapes.yaml``; a number is height and width."""

    name: str
    x: Sizes
    w: Sizes
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    output_padding: int = 0

    @property
    def geometry(self) -> ConvGeometry:
        """Returns the geometry of the convolution."""
        pairs = [(value, value) for value in (self.stride, self.padding, self.dilation)]
        output_padding = self.output_padding, self.output_padding
        return ConvGeometry(*pairs, self.groups, self.transposed, output_padding)


def read_shapes(path: Path) -> dict[str, Shape]:
    """Returns the shapes of a file by name.

    Raises:
        UsageError: The file is wrong, or a shape is impossible.
    """
    try:
        shapes = TypeAdapter(list[Shape]).validate_python(yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: {reason}") from error
    for shape in shapes:
        problem = shape.geometry.problem(shape.x, shape.w)
        if problem is not None:
            raise UsageError(f"{path}: {shape.name}: {problem}")
    return {shape.name: shape for shape in shapes}


def draw_inputs(key: ConvKey, seed: int) -> tuple[torch.Tensor, ...]:
    """Returns input, weight and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (key.x_size, key.w_size, key.y_size)
    return tuple(torch.randn(size, generator=generator).to(key.torch_dtype) for size in sizes)


def call(backend: Backend, geometry: ConvGeometry, direction: str, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Computes one direction."""
    x, w, gradient = inputs
    if direction == "forward":
        return backend.forward(x, w, geometry)
    if direction == "backward_data":
        return backend.backward_data(gradient, w, geometry, x.shape)
    return backend.backward_weight(gradient, x, geometry, w.shape)


def measure_errors(backend: Backend, shape: Shape, key: ConvKey, references: list[torch.Tensor]) -> dict[str, Any]:
    """Returns the largest relative L2 error over seeds, and how often the original's metric alarms."""
    errors = []
    alarms = 0
    for seed, reference in enumerate(references):
        result = call(backend, shape.geometry, key.direction, draw_inputs(key, seed)).double()
        difference = result - reference
        errors.append((difference.norm() / reference.norm()).item())
        alarms += bool((difference.abs() / reference.abs()).mean() > ALARM)
    return {"error": max(errors), "seeds": len(errors), "alarms": alarms, "tolerance": backend.tolerance(key)}


def references_of(shape: Shape, key: ConvKey) -> list[torch.Tensor]:
    """Returns the results in float64, one for each seed."""
    results = []
    for seed in range(SEEDS[key.nominal_flop > LARGE_FLOP]):
        doubles = tuple(tensor.double() for tensor in draw_inputs(key, seed))
        results.append(call(NATIVE, shape.geometry, key.direction, doubles))
    return results


def time_backends(backends: list[Backend], shape: Shape, key: ConvKey) -> list[list[float]]:
    """Returns seconds of one call by backend, one number for each round."""
    stopwatch = Stopwatch(torch.device("cpu"))
    sets = [draw_inputs(key, seed) for seed in range(INPUTS)]

    def seconds(backend: Backend, count: int) -> float:
        """Returns the mean over calls that take the inputs in turn."""

        def calls() -> None:
            for number in range(count):
                call(backend, shape.geometry, key.direction, sets[number % INPUTS])

        return stopwatch.seconds(calls) / count

    counts = []
    for backend in backends:
        seconds(backend, WARM_UPS)
        counts.append(max(1, round(BLOCK_SECONDS / seconds(backend, WARM_UPS))))
    rounds: list[list[float]] = [[] for _ in backends]
    order = list(range(len(backends)))
    for number in range(ROUNDS):
        first = INPUTS * (number + 1)
        sets[:] = [draw_inputs(key, first + seed) for seed in range(INPUTS)]
        totals = [0.0] * len(backends)
        # A machine that becomes slower favours none of them.
        for index in (*order, *reversed(order)):
            seconds(backends[index], 1)
            totals[index] += seconds(backends[index], counts[index]) / 2
        for index, total in enumerate(totals):
            rounds[index].append(total)
    return rounds


def keys_of(shape: Shape, dtype: str) -> list[ConvKey]:
    """Returns the keys of a shape, one for each direction."""
    x, w = (torch.empty(size, dtype=getattr(torch, dtype)) for size in (shape.x, shape.w))
    return [ConvKey.of(x, w, shape.geometry, direction) for direction in DIRECTIONS]


def error_rows(shape: Shape, backends: list[Backend], dtype: str) -> Iterator[dict[str, Any]]:
    """Yields the errors of a shape, one row for each direction and backend."""
    for key in keys_of(shape, dtype):
        references = references_of(shape, key)
        for backend in backends:
            if backend.refusal(key) is None:
                errors = measure_errors(backend, shape, key, references)
                yield {"shape": shape.name, "direction": key.direction, "backend": backend.name, **errors}


def time_rows(shape: Shape, backends: list[Backend], dtype: str, rates: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Yields the times of a shape, one row for each direction and backend."""
    for key in keys_of(shape, dtype):
        legal = [backend for backend in backends if backend.refusal(key) is None and backend is not NATIVE]
        candidates = [NATIVE, NATIVE, *legal]
        times = time_backends(candidates, shape, key)
        least = max(key.nominal_flop / rates["flops"], key.least_bytes / rates["copy_bytes"])
        for index, (backend, rounds) in enumerate(zip(candidates, times, strict=True)):
            gain = ratio(times[0], rounds)
            milliseconds = 1e3 * np.array(rounds)
            median = float(np.median(milliseconds))
            interval = bootstrap((milliseconds,), np.median, method="percentile", rng=0).confidence_interval
            yield {
                "shape": shape.name,
                "direction": key.direction,
                "backend": "native again" if index == 1 else backend.name,
                "ms": median,
                "ms_interval": [interval.low, interval.high],
                "gain": [gain.value, gain.low, gain.high],
                "nominal_gflops": key.nominal_flop / median / 1e6,
                "roofline": 1e3 * least / median,
                "workspace_bytes": backend.workspace_bytes(key),
                "key": str(key),
            }


def machine() -> dict[str, Any]:
    """Returns what the times depend on, with the measured rates."""
    rates = measure(torch.device("cpu"))
    return {
        "processor": cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "flops": rates.float32_flops,
        "copy_bytes": rates.copy_bytes,
    }


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shapes", nargs="*", help="names of shapes; all that are not measured yet unless given")
    parser.add_argument("--file", type=Path, default=FOLDER / "shapes.yaml", help="the set of shapes")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), help="names of backends")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the results")
    parser.add_argument("--errors", action="store_true", help="measure errors alone, which any machine can")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    return parser.parse_args(arguments)


class Rows:
    """Rows of a file with one JSON object in each line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self.rows = [json.loads(line) for line in path.read_text().splitlines()]

    def measure(
        self, shapes: dict[str, Shape], again: list[str], rows_of: Callable[[Shape], Iterator[dict[str, Any]]]
    ) -> None:
        """Measures shapes that are not in the file, or are measured again."""
        self.rows = [row for row in self.rows if row["shape"] not in again]
        measured = {row["shape"] for row in self.rows}
        for name in again or [name for name in shapes if name not in measured]:
            self.rows += rows_of(shapes[name])
            # A shape is written as a whole, so that an interrupted measurement continues with it.
            self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
            print(self.path.name, name, flush=True)


def main(arguments: list[str]) -> None:
    """Measures the shapes, and writes rows as they come.

    Raises:
        UsageError: A name is unknown, a shape is impossible, or no backend computes the type.
    """
    options = parsed(arguments)
    shapes = read_shapes(options.file)
    backends = [backend_named(name) for name in options.backends]
    unknown = set(options.shapes) - shapes.keys()
    if unknown:
        raise UsageError(f"no shape '{min(unknown)}' in {options.file}")
    if not any(options.dtype in backend.dtypes for backend in backends):
        raise UsageError(f"no backend of {', '.join(options.backends)} computes {options.dtype}")
    errors, times = (Rows(options.out / f"{name}.jsonl") for name in ("errors", "times"))
    machine_file = options.out / "machine.json"
    if not options.report:
        errors.measure(shapes, options.shapes, lambda shape: error_rows(shape, backends, options.dtype))
    if not (options.report or options.errors):
        here = machine()
        machine_file.write_text(json.dumps(here, indent=1) + "\n")
        times.measure(shapes, options.shapes, lambda shape: time_rows(shape, backends, options.dtype, here))
    here = json.loads(machine_file.read_text()) if machine_file.exists() else None
    write_report(errors.rows, times.rows, here, options.out)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
