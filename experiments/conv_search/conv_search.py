"""Measures whether the search for convolution algorithms is honest, and what it gains.

    python experiments/conv_search/conv_search.py             # all parts; what is measured is kept
    python experiments/conv_search/conv_search.py aa          # one part: aa, search, again, calls
    python experiments/conv_search/conv_search.py report      # the summary alone
    python experiments/conv_search/conv_search.py --fresh     # all parts from the beginning

* ``aa`` searches with ``native`` and an identical twin of it, 100 times.
* ``search`` selects a plan for a training step with each shape of ``conv_bench``.
* ``again`` times every plan that is not ``native`` again, in another process and with a clock of
  its own.
* ``calls`` compares a search at each call with the first search's plan.

Results are lines of ``results.jsonl``. An interrupted measurement continues with the same command.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "conv_bench"))

from conv_bench import Shape, machine, read_shapes  # noqa: E402 (a script of the folder beside it)
from search_report import write_report  # noqa: E402

from runner.plugin.tuning import Tuning  # noqa: E402
from runner.plugins.vision.convolution.function import convolve  # noqa: E402
from runner.plugins.vision.convolution.key import DIRECTIONS, ConvKey  # noqa: E402
from runner.plugins.vision.convolution.native import Native  # noqa: E402
from runner.plugins.vision.convolution.plan import ConvPlan, Needs  # noqa: E402
from runner.plugins.vision.convolution.plan_file import no_plans  # noqa: E402
from runner.plugins.vision.convolution.planner import Planner, on_device  # noqa: E402
from runner.plugins.vision.convolution.registry import BACKENDS, NATIVE  # noqa: E402
from runner.plugins.vision.convolution.search import Search, SearchLimits  # noqa: E402
from runner.plugins.vision.convolution.workspace import new_workspace  # noqa: E402
from runner.proof import ratio  # noqa: E402

PARTS = ("aa", "search", "again", "calls")
CPU = torch.device("cpu")
STEP = Needs(True, True)
TRIALS = 100
"""A/A searches."""
SHAPES_OF_AA = ("small", "accuracy_k3_s1_p1", "transposed_small", "resnet18_01")
"""Shapes that A/A searches take in turn."""
SHAPES_OF_CALLS = ("small", "k3_s1")
"""Shapes with which each call searches."""
ROUNDS = 20
"""Pairs of blocks of an independent timing."""
BLOCK_SECONDS = 0.05
CALLS = 20
"""Calls that search each time."""


class Twin(Native):
    """The baseline under another name."""

    name = "twin"


class Results:
    """Lines of a file, one for each measurement, found again by their part and name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def of(self, part: str) -> dict[str, dict[str, Any]]:
        """Returns the rows of a part by name."""
        return {row["name"]: row for row in self.rows if row["part"] == part}

    def add(self, part: str, name: str, **values: Any) -> None:
        """Adds a line, which is in the file when this returns."""
        row = {"part": part, "name": name, **values}
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(part, name, {key: value for key, value in values.items() if key != "rejected"}, flush=True)


def key_of(shape: Shape) -> ConvKey:
    """Returns the forward key of a shape in float32."""
    return ConvKey.of(torch.empty(shape.x), torch.empty(shape.w), shape.geometry)


def measure_aa(results: Results, shapes: dict[str, Shape]) -> None:
    """Searches between identical backends."""
    backends = {NATIVE.name: NATIVE, Twin.name: Twin()}
    for trial in range(TRIALS):
        if str(trial) in results.of("aa"):
            continue
        name = SHAPES_OF_AA[trial % len(SHAPES_OF_AA)]
        found = Search(key_of(shapes[name]), STEP, CPU, SearchLimits(), backends, seed=trial).run()
        gain = None if found.gain is None else [found.gain.value, found.gain.low, found.gain.high]
        results.add("aa", str(trial), shape=name, is_native=found.plan.is_native, gain=gain)


def measure_search(results: Results, shapes: dict[str, Shape], rates: dict[str, Any]) -> None:
    """Selects a plan for each shape."""
    for name, shape in shapes.items():
        if name in results.of("search"):
            continue
        key = key_of(shape)
        found = Search(key, STEP, CPU, SearchLimits()).run()
        gain = None if found.gain is None else [found.gain.value, found.gain.low, found.gain.high]
        least = [
            max(part.nominal_flop / rates["flops"], part.least_bytes / rates["copy_bytes"])
            for part in (key.towards(direction) for direction in DIRECTIONS)
        ]
        results.add(
            "search", name, plan=list(found.plan), gain=gain, reason=found.reason, seconds=found.seconds,
            least_ms=1e3 * sum(least), rejected=dict(found.rejected),
        )  # fmt: skip


def measure_again(results: Results) -> None:
    """Times the selected plans in processes of their own."""
    for name, row in results.of("search").items():
        if name in results.of("again"):
            continue
        if set(row["plan"]) == {NATIVE.name}:
            results.add("again", name, plan=row["plan"], gain=[1.0, 1.0, 1.0], native_ms=None)
            continue
        command = [sys.executable, __file__, "retime", name, *row["plan"]]
        output = subprocess.run(command, capture_output=True, text=True, check=True)
        results.add("again", name, plan=row["plan"], **json.loads(output.stdout))


def retime(shape: Shape, plan: ConvPlan) -> dict[str, Any]:
    """Times a training step with a plan against ``native``, in the order A B B A."""
    generator = torch.Generator().manual_seed(int.from_bytes(shape.name.encode()[:4], "little"))
    sets = []
    for _ in range(4):
        x, w = (torch.randn(size, generator=generator).requires_grad_() for size in (shape.x, shape.w))
        sets.append((x, w, torch.randn(key_of(shape).y_size, generator=generator)))

    def seconds(selected: ConvPlan, count: int) -> float:
        started = time.perf_counter()
        for number in range(count):
            x, w, gradient = sets[number % len(sets)]
            y = convolve(x, w, shape.geometry, lambda key: BACKENDS[getattr(selected, key.direction)])
            torch.autograd.grad(y, [x, w], gradient)
        return (time.perf_counter() - started) / count

    native = ConvPlan()
    for selected in (native, plan):
        seconds(selected, 4)
    count = max(1, round(BLOCK_SECONDS / seconds(native, 4)))
    baseline, candidate = [], []
    for _ in range(ROUNDS):
        first, second, third, fourth = (seconds(each, count) for each in (native, plan, plan, native))
        baseline.append((first + fourth) / 2)
        candidate.append((second + third) / 2)
    gain = ratio(baseline, candidate)
    return {"gain": [gain.value, gain.low, gain.high], "native_ms": 1e3 * statistics.median(baseline)}


def measure_calls(results: Results, shapes: dict[str, Shape]) -> None:
    """Compares a search at each call with a plan that is kept."""
    for name in SHAPES_OF_CALLS:
        if name in results.of("calls"):
            continue
        shape = shapes[name]
        seconds = {mode: list(call_seconds(shape, mode == "every call")) for mode in ("every call", "cached")}
        found = ratio(seconds["every call"], seconds["cached"])
        results.add(
            "calls", name, ratio=[found.value, found.low, found.high],
            every_call_ms=1e3 * statistics.median(seconds["every call"]),
            cached_ms=1e3 * statistics.median(seconds["cached"]),
        )  # fmt: skip


def call_seconds(shape: Shape, every_call: bool) -> Iterator[float]:
    """Yields the seconds of training steps after the first one."""
    search: Callable[..., Any] = on_device(CPU, lambda: new_workspace)
    choices = Tuning({}).of("algorithm_search")
    planner = Planner(choices, no_plans, search, SearchLimits(seconds=math.inf), every_call)
    x, w = (torch.randn(size).requires_grad_() for size in (shape.x, shape.w))
    for number in range(CALLS + 1):
        started = time.perf_counter()
        y = planner.convolve(x, w, shape.geometry, None, new_workspace)
        torch.autograd.grad(y.sum(), [x, w])
        if number:
            yield time.perf_counter() - started


def main() -> None:
    """Runs the parts of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="?", default="all", choices=["all", *PARTS, "report", "retime"])
    parser.add_argument("names", nargs="*", help="shapes; all unless given. After 'retime': a shape and its plan")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the results")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    arguments = parser.parse_args()
    shapes = read_shapes(FOLDER.parent / "conv_bench" / "shapes.yaml")
    if arguments.part == "retime":
        name, *plan = arguments.names
        print(json.dumps(retime(shapes[name], ConvPlan(*plan))))
        return
    wanted = {name: shapes[name] for name in arguments.names} if arguments.names else shapes
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "results.jsonl"
    if arguments.fresh:
        path.unlink(missing_ok=True)
    results = Results(path)
    parts = PARTS if arguments.part == "all" else (arguments.part,)
    if "machine" not in results.of("machine") and arguments.part != "report":
        results.add("machine", "machine", **machine())
    if "aa" in parts:
        measure_aa(results, shapes)
    if "search" in parts:
        measure_search(results, wanted, results.of("machine")["machine"])
    if "again" in parts:
        measure_again(results)
    if "calls" in parts:
        measure_calls(results, shapes)
    write_report(results, arguments.out / "summary.md")


if __name__ == "__main__":
    main()
