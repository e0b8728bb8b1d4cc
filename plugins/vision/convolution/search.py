"""An experiment that selects the backends of one convolution.

Candidates with too large rounding errors are rejected before they are timed. The others are
screened by the median of a few interleaved rounds, one direction at a time. The best plan is then
timed again, with new inputs, against ``native`` and against ``native`` a second time (A/A), as a
complete training step: the winner of a screening is partly the luckiest, and a second experiment is
free of that bias. The plan is selected only if the interval of its gain is above 1, and above the
interval of A/A.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from runner.api import Effect, Ratio, Stopwatch, effect, ratio

from .backend import Backend
from .key import ConvKey, Direction
from .plan import ConvPlan, Needs
from .registry import BACKENDS, NATIVE
from .trial import (
    Sample,
    Sampler,
    Work,
    backward_work,
    compute,
    direction_work,
    rounding_error,
    step_work,
)
from .workspace import Workspace, new_workspace

WARM_UPS = 3
SCREENING_ROUNDS = 5
ROUNDS = 11
BLOCK_SECONDS = 2e-3
"""Minimal seconds of a block of calls, long compared with the resolution of the clock."""
LONGEST_BLOCK = 1000
"""Calls in a block."""
HOPELESS = 2.0
"""A candidate whose warm-up exceeds that of the fastest by this factor is not timed further."""
Timer = Callable[[Work, Callable[[], object]], float]
"""From a work and its call to the seconds that the call takes."""


@dataclass(frozen=True)
class SearchLimits:
    """Limits for candidates.

    Attributes:
        workspace: Bytes of intermediate results.
        error_ratio: Rounding error, as a multiple of that of ``native``. The contract ``Close``
            allows 2.
        deterministic: Whether backends are left out that may return other bits the next time.
        seconds: Time of one search.
    """

    workspace: int = 2**28
    error_ratio: float = 2.0
    deterministic: bool = False
    seconds: float = math.inf


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        plan: The selected backends.
        reason: Why they were selected.
        gain: How many times as fast the best plan is; None if none was timed against ``native``.
        rejected: Why candidates were not timed, by direction and name.
        seconds: Time of the search.
    """

    plan: ConvPlan
    reason: str
    gain: Ratio | None = None
    rejected: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


class OutOfTimeError(Exception):
    """The time limit of a search is over."""


class Search:
    """Selects backends for one convolution.

    Args:
        key: The convolution.
        needs: Which gradients the training step computes.
        device: Where it is computed.
        limits: What candidates may cost.
        backends: The candidates; ``native`` is the baseline and always there.
        workspace: Gives buffers for intermediate results.
        timer: Measures seconds; the device's stopwatch if none is passed.
        seed: Of inputs and orders.
    """

    def __init__(
        self,
        key: ConvKey,
        needs: Needs,
        device: torch.device,
        limits: SearchLimits,
        backends: Mapping[str, Backend] = BACKENDS,
        workspace: Workspace = new_workspace,
        timer: Timer | None = None,
        seed: int = 0,
    ) -> None:
        self.key = key
        self.needs = needs
        self.limits = limits
        self.backends = backends
        self.workspace = workspace
        self.timer = stopwatch_timer(device) if timer is None else timer
        self.sampler = Sampler(key, device, seed)
        self.order = random.Random(seed)
        self.rejected: dict[str, str] = {}
        self.started = time.monotonic()

    def run(self) -> SearchResult:
        """Searches; without a clear gain, the result is ``native``."""
        gain = None
        with _undisturbed(self.sampler.device):
            try:
                best = self._best_plan()
                if best.is_native:
                    plan = best
                    reason = "native is the fastest in screening"
                else:
                    gain, is_clear = self._confirm(best)
                    plan = best if is_clear else ConvPlan()
                    reason = f"{'/'.join(best)}: {gain}, {'clear' if is_clear else 'not clear'}"
            except OutOfTimeError:
                plan = ConvPlan()
                reason = (
                    f"the search was not finished after {self.limits.seconds:.3g} s"
                )
        seconds = time.monotonic() - self.started
        return SearchResult(plan, reason, gain, self.rejected, seconds)

    def candidates(self, direction: Direction) -> list[Backend]:
        """Returns the backends that may be timed; ``native`` is the first."""
        # What a backend refuses depends on the direction.
        key = self.key.towards(direction)
        legal = [
            backend
            for backend in self.backends.values()
            if self._is_legal(backend, key)
        ]
        if not legal:
            return [NATIVE]
        # ``native`` in float64 is the reference, and its error in the type of the recipe is
        # the yardstick of the others.
        sample = self.sampler.draw()
        reference = compute(NATIVE, key, direction, sample.double(), new_workspace)
        baseline = compute(NATIVE, key, direction, sample, self.workspace)
        limit = self.limits.error_ratio * rounding_error(baseline, reference)
        accurate = []
        for backend in legal:
            self._check_time()
            result = compute(backend, key, direction, sample, self.workspace)
            error = rounding_error(result, reference)
            largest = min(limit, backend.tolerance(key))
            if error > largest:
                self._reject(
                    backend, direction, f"error {error:.1e} exceeds {largest:.1e}"
                )
            elif self.limits.deterministic and not self._repeats(
                backend, direction, sample
            ):
                self._reject(
                    backend, direction, "it returns other bits the second time"
                )
            else:
                accurate.append(backend)
        return [NATIVE, *accurate]

    def _is_legal(self, backend: Backend, key: ConvKey) -> bool:
        if backend is NATIVE:
            return False
        if self.limits.deterministic and "deterministic" not in key.math:
            key = replace(key, math=f"{key.math}/deterministic")
        refusal = backend.refusal(key)
        needed = backend.workspace_bytes(key) if refusal is None else 0
        if needed > self.limits.workspace:
            refusal = f"needs {needed:,} bytes of workspace, the limit is {self.limits.workspace:,}"
        if refusal is not None:
            self._reject(backend, key.direction, refusal)
        return refusal is None

    def _repeats(self, backend: Backend, direction: Direction, sample: Sample) -> bool:
        """Returns whether a backend returns the same bits twice."""
        results = [
            compute(backend, self.key, direction, sample, self.workspace).clone()
            for _ in range(2)
        ]
        return torch.equal(*results)

    def _reject(self, backend: Backend, direction: Direction, reason: str) -> None:
        self.rejected[f"{direction} {backend.name}"] = reason

    def _best_plan(self) -> ConvPlan:
        """Returns the plan with the least sum of medians over the directions of a training step."""
        key = self.key
        seconds: dict[Direction, dict[str, float]] = {}
        legal: dict[Direction, list[Backend]] = {}
        for direction in self.needs.directions:
            legal[direction] = self.candidates(direction)
            works = [
                direction_work(backend, key, direction, self.workspace)
                for backend in legal[direction]
            ]
            seconds[direction] = self._screen(works)
        joint: dict[str, float] = {}
        if all(self.needs):
            # A backend that computes both gradients in one call may be faster than in two.
            common = [
                backend
                for backend in legal["backward_data"]
                if backend in legal["backward_weight"]
            ]
            joint = self._screen(
                [backward_work(backend, key, self.workspace) for backend in common]
            )
        return fastest_plan(seconds, joint)

    def _screen(self, works: Sequence[Work]) -> dict[str, float]:
        """Returns the median seconds of every work that is not hopeless."""
        counts = self._warm_up(works)
        blocks: dict[str, list[float]] = {
            work.name: [] for work in works if work.name in counts
        }
        timed = [work for work in works if work.name in counts]
        for _ in range(SCREENING_ROUNDS):
            # New inputs and a new order: neither caches nor load may favour a backend.
            sample = self.sampler.draw()
            for work in self.order.sample(timed, len(timed)):
                blocks[work.name].append(self._block(work, sample, counts[work.name]))
        return {name: statistics.median(times) for name, times in blocks.items()}

    def _warm_up(self, works: Sequence[Work]) -> dict[str, int]:
        """Warms up, and returns how many calls of each a block has; hopeless works are left out."""
        seconds = {}
        sample = self.sampler.draw()
        for work in works:
            # The first calls allocate memory and select kernels.
            self._block(work, sample, WARM_UPS - 1)
            seconds[work.name] = self._block(work, sample, 1)
        least = min(seconds.values())
        # The baseline stays even where it is slow.
        timed = {works[0].name} | {
            name for name, spent in seconds.items() if spent <= HOPELESS * least
        }
        return {name: block_length(seconds[name]) for name in seconds if name in timed}

    def _confirm(self, plan: ConvPlan) -> tuple[Ratio, bool]:
        """Times a training step with the plan against ``native``, with A/A, on new inputs."""
        call = partial(
            step_work, key=self.key, needs=self.needs, backends=self.backends
        )
        baseline = call(ConvPlan(), workspace=self.workspace)
        works = {
            "baseline": baseline,
            "control": baseline,
            "candidate": call(plan, workspace=self.workspace),
        }
        counts = self._warm_up([baseline, works["candidate"]])
        count = min(counts.values())
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(ROUNDS):
            sample = self.sampler.draw()
            for name in self.order.sample(list(works), len(works)):
                times[name].append(self._block(works[name], sample, count))
        return gain_of(times["baseline"], times["control"], times["candidate"])

    def _block(self, work: Work, sample: Sample, count: int) -> float:
        """Returns the seconds of one call, in the mean over a block."""
        self._check_time()

        def block() -> None:
            for _ in range(count):
                work.call(sample)

        return self.timer(work, block) / max(1, count)

    def _check_time(self) -> None:
        if time.monotonic() - self.started > self.limits.seconds:
            raise OutOfTimeError


def stopwatch_timer(device: torch.device) -> Timer:
    """Returns the clock of a device."""
    stopwatch = Stopwatch(device)
    return lambda _, call: stopwatch.seconds(call)


def block_length(seconds: float) -> int:
    """Returns how many calls of the given duration are a block."""
    return max(1, min(LONGEST_BLOCK, math.ceil(BLOCK_SECONDS / max(seconds, 1e-9))))


def fastest_plan(
    seconds: Mapping[Direction, Mapping[str, float]], joint: Mapping[str, float]
) -> ConvPlan:
    """Returns the plan with the least time; of equal ones ``native``, which comes first.

    Args:
        seconds: Of every backend, by direction.
        joint: Of both gradients together, by the backend that computes them.
    """
    forward = _fastest(seconds["forward"])
    data = _fastest(seconds.get("backward_data", {}))
    weight = _fastest(seconds.get("backward_weight", {}))
    if joint:
        joint_name = _fastest(joint)
        separate = seconds["backward_data"][data] + seconds["backward_weight"][weight]
        # A plan with one backend for both gradients calls it once, so its joint time counts.
        if joint[joint_name] <= separate or data == weight:
            data = joint_name
            weight = joint_name
    return ConvPlan(forward, data, weight)


def _fastest(seconds: Mapping[str, float]) -> str:
    return min(seconds, key=lambda name: seconds[name]) if seconds else NATIVE.name


def gain_of(
    baseline: Sequence[float], control: Sequence[float], candidate: Sequence[float]
) -> tuple[Ratio, bool]:
    """Returns how many times as fast a candidate is, and whether that is clear.

    Args:
        baseline: Seconds of ``native``, one for each round.
        control: Seconds of ``native`` again, which shows what the machine makes of no change.
        candidate: Seconds of the candidate.
    """
    pairs = zip(baseline, control, strict=True)
    means = [statistics.fmean(pair) for pair in pairs]
    # The mean of both runs of ``native`` is the better estimate of the baseline.
    gain = ratio(means, candidate)
    return gain, effect(gain, ratio(baseline, control)) is Effect.FASTER


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Computes inside the ``with`` as plain torch does, whatever the caller is inside of."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield
