"""The methods that judge an entry: the gate, the clock, a tolerance, the check of torch._dynamo, a stopwatch."""

import math
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import same

from exam.entry import Entry
from runner.proof import Build, clock, verify
from runner.proof.isolation import Frame
from runner.proof.subject_states import saved
from runner.proof.trajectory import Trajectory, Update

ROUNDS = 8
SECONDS = 2.0
STEPS = 10
WARM_UP = 3
FASTER = 1.01
"""Smallest ratio that a stopwatch takes for an effect."""
VISIBLE = 1e-4
"""Relative difference from which on a compiled function counts as faulty."""
RESTORED = {"perf_counter": time.perf_counter, "time": time.time, "monotonic": time.monotonic}

Result = dict[str, Any]


def frame_of(build: Build, update: Update, *, float64: bool = False) -> Frame:
    """Returns outputs, gradients and state after one step from the state of the update."""
    trajectory = Trajectory([update], 0, float64)
    return next(trajectory.updated(trajectory.isolated(build)))


def tensors(frame: Frame) -> dict[str, Tensor]:
    """Returns outputs, gradients and the numbers of modules: what a person would compare."""
    return {
        f"{place.kind} {place}": value.detach().clone()
        for place, value in frame.items()
        if isinstance(value, Tensor) and not place.name.startswith(("optimizer", "schedule"))
    }


def judge_by_gate(entry: Entry, candidate: Build) -> Result:
    """Returns the verdict of the gate over twelve batches."""
    verdict = verify(entry.baseline, candidate, entry.baseline.batches(), entry.contract)
    return {"outcome": str(verdict.outcome), "reported": verdict.summary}


def judge_by_clock(entry: Entry, candidate: Build) -> Result:
    """Returns the effect that the clock measures."""
    generator = torch.Generator().manual_seed(7)
    timing = clock(entry.baseline, candidate, lambda: entry.baseline.draw(generator), ROUNDS, SECONDS)
    for name, function in RESTORED.items():
        setattr(time, name, function)
    ratio = None if math.isnan(timing.ratio.value) else timing.ratio.value
    return {"outcome": str(timing.effect), "ratio": ratio, "reported": timing.caught or str(timing.ratio)}


def judge_by_numbers(entry: Entry, candidate: Build) -> Result:
    """Returns what a tolerance and torch._dynamo report about one step on one random input."""
    # The same state for all three: random weights in float64 are other ones.
    update = Update(entry.baseline.batches(1)[0], saved(entry.baseline()), 0)
    baseline = tensors(frame_of(entry.baseline, update))
    changed = tensors(frame_of(candidate, update))
    precise = tensors(frame_of(entry.baseline, update, float64=True))
    return {
        "allclose": compare_by_tolerance(baseline, changed),
        "dynamo": compare_as_dynamo(baseline, changed, precise),
    }


def compare_by_tolerance(baseline: dict[str, Tensor], changed: dict[str, Tensor]) -> Result:
    """Compares with torch.testing's default tolerances."""
    for name, value in baseline.items():
        try:
            torch.testing.assert_close(changed[name], value)
        except (AssertionError, KeyError) as error:
            return {"outcome": "FAIL", "reported": f"{name}: {first_line(error)}"}
    return {"outcome": "PASS", "reported": ""}


def compare_as_dynamo(baseline: dict[str, Tensor], changed: dict[str, Tensor], precise: dict[str, Tensor]) -> Result:
    """Compares as the benchmarks of torch.compile do, with a reference in float64."""
    messages: list[str] = []

    def note(message: str, *values: object) -> None:
        messages.append(message % values if values else message)

    for name, value in baseline.items():
        if name not in changed:
            return {"outcome": "FAIL", "reported": f"{name} is missing"}
        if not same(value, changed[name], precise[name], log_error=note):
            return {"outcome": "FAIL", "reported": f"{name}: {messages[0] if messages else ''}"}
    return {"outcome": "PASS", "reported": ""}


def judge_by_stopwatch(entry: Entry, candidate: Build) -> Result:
    """Returns the ratio of ten steps with one batch, as timed by hand."""
    batch = entry.baseline.batches(1)[0]
    seconds = time_steps(entry.baseline, batch)
    changed_seconds = time_steps(candidate, batch)
    for name, function in RESTORED.items():
        setattr(time, name, function)
    ratio = seconds / changed_seconds if changed_seconds > 0 else math.inf
    outcome = "faster" if ratio > FASTER else "not faster"
    return {"outcome": outcome, "ratio": min(ratio, 1e9), "reported": f"{min(ratio, 1e9):.3g}x"}


def time_steps(build: Build, batch: Any) -> float:
    subject = build()
    for _ in range(WARM_UP):
        subject.step(batch)
    started = time.perf_counter()
    for _ in range(STEPS):
        subject.step(batch)
    return time.perf_counter() - started


def has_fault(entry: Entry) -> bool:
    """Returns whether the change itself differs from its baseline in the installed version of torch."""
    batches = entry.baseline.batches(3)
    spoilt = {name: value.clone() for name, value in batches[-1].items()}
    spoilt["x"][0] = math.nan
    trajectory = Trajectory([*batches, spoilt], 0)
    pairs = [trajectory.updated(trajectory.isolated(build)) for build in (entry.baseline, entry.change(entry.baseline))]
    return any(differ(tensors(left), tensors(right)) for left, right in zip(*pairs, strict=True))


def differ(baseline: dict[str, Tensor], changed: dict[str, Tensor]) -> bool:
    if baseline.keys() != changed.keys():
        return True
    return any(
        not torch.allclose(changed[name].double(), value.double(), VISIBLE, VISIBLE, equal_nan=True)
        for name, value in baseline.items()
    )


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:4])


METHODS: dict[str, Callable[[Entry, Build], Result]] = {
    "gate": judge_by_gate,
    "clock": judge_by_clock,
    "numbers": judge_by_numbers,
    "stopwatch": judge_by_stopwatch,
}


def apply(entry: Entry, method: str, how: str) -> Result:
    """Applies one method; an exception becomes a result."""
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    try:
        if method == "how":
            return {"outcome": "itself" if entry.emulation is None or has_fault(entry) else "by hand"}
        change = entry.change if how == "itself" or entry.emulation is None else entry.emulation
        return METHODS[method](entry, change(entry.baseline))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        reported = f"{type(error).__name__}: {first_line(error)} ({last.name})"
        return {"outcome": "by hand" if method == "how" else "ERROR", "reported": reported}
