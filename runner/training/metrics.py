"""Sums of the metrics of updates and of the seconds by activity, between two reports."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.plugin.context import Step
from runner.plugin.contract import Mean
from runner.plugin.metric_names import check_metric_name, refuse_names
from runner.plugin.source import State
from runner.system.errors import RunnerError
from runner.system.tensor_trees import map_tensors

if TYPE_CHECKING:
    from runner.plugin.learner import Learner
    from runner.plugin.source import Source

RESERVED = frozenset({"updates", "skipped_updates"})
"""Names of training metrics that are reserved for the runner."""


@dataclass
class _Total:
    """The sum of a scalar since the last report, and its count."""

    sum: Any = 0.0
    count: Any = 0.0


class Means:
    """Sums and counts of scalars by name.

    On a CPU these are numbers; on a GPU tensors that stay there, so that an update waits for
    nothing.

    Args:
        owner: The class whose update returns the scalars, for messages.
        on_host: Whether checking a scalar costs nothing.
        is_loss: Returns whether the scalar of a name has to be finite.
    """

    def __init__(
        self,
        owner: str,
        on_host: bool,
        is_loss: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.owner = owner
        self.on_host = on_host
        self.is_loss = is_loss
        self.totals: dict[str, _Total] = {}
        # Names of earlier reports are included: a source cannot reuse those, either.
        self.names: set[str] = set()
        # On a GPU, numbers are checked by ``look`` only.
        self.finite = True

    def add(self, output: Mapping[str, Any]) -> None:
        """Adds the scalars and ``Mean``s that an update returned.

        Raises:
            RunnerError: The update returned no scalars, or values that cannot be added up.
        """
        has_scalars = False
        for name, value in output.items():
            if isinstance(value, Mean):
                total, count = value
            elif isinstance(value, Tensor) and value.dim():
                continue
            else:
                total, count = value, 1
            has_scalars = True
            entry = self.totals.get(name) or self._start(name, value, total, count)
            if self.on_host:
                number = float(total)
                if not math.isfinite(number) and self.is_loss(name):
                    self.finite = False
                entry.sum += number
                entry.count += float(count)
            else:
                # A sum of many losses in float32 would lose digits.
                if isinstance(total, Tensor):
                    total = total.detach().double()
                if isinstance(count, Tensor):
                    count = count.detach().double()
                entry.sum += total
                entry.count += count
        if not has_scalars:
            raise RunnerError(
                f"{self.owner}.update returns no scalar, so divergence cannot be detected; "
                "return a loss"
            )

    def look(self) -> bool:
        """Returns whether the sums of all losses are finite; waits for a GPU."""
        if not self.on_host and self.totals:
            self.finite = all(
                math.isfinite(float(entry.sum))
                for name, entry in self.totals.items()
                if self.is_loss(name)
            )
        return self.finite

    def take(self) -> dict[str, float]:
        """Returns the means since the last call; a name with a count of 0 has none."""
        means = {}
        for name, entry in self.totals.items():
            count = float(entry.count)
            if count:
                means[name] = float(entry.sum) / count
        self.totals = {}
        return means

    def state_dict(self) -> State:
        """Returns sums and counts."""
        entries = self.totals.items()
        return {
            "sums": {name: entry.sum for name, entry in entries},
            "counts": {name: entry.count for name, entry in entries},
        }

    def load_state_dict(self, state: State, device: torch.device) -> None:
        """Restores what ``state_dict`` returned, on the device where it is added up."""
        sums, counts = map_tensors(
            lambda tensor: tensor.to(device), (state["sums"], state["counts"])
        )
        self.totals = {name: _Total(sums[name], counts[name]) for name in sums}

    def _start(self, name: str, value: Any, total: Any, count: Any) -> _Total:
        """Starts the sum of a name, and validates the first value."""
        method = f"{self.owner}.update"
        check_metric_name(name, method)
        if not _can_be_added(value):
            description = type(value).__name__
            if isinstance(value, Mean):
                description += f" of {type(total).__name__} and {type(count).__name__}"
            raise RunnerError(
                f"{method} returned '{name}' as {description}; it should be a tensor, "
                "a float, or Mean(sum, count) of numbers or scalar tensors"
            )
        if isinstance(total, Tensor) and total.requires_grad:
            raise RunnerError(
                f"{method} returned '{name}' with its gradient; return {name}.detach()"
            )
        refuse_names(method, [name], RESERVED, "is reserved for the runner")
        self.names.add(name)
        entry = self.totals[name] = _Total()
        return entry


class Activities:
    """Adds up seconds by activity, between two readings.

    The start and the end of an activity wait for work on a GPU, so that its seconds include that
    work. Work that is launched in a step is not waited for: seconds of a slot are those on the
    host, and the remainder of a training step, without its sampling and transfer, follows from the
    elapsed time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.last = perf_counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Counts the time inside the ``with`` towards ``activity``, without earlier launches."""
        # Earlier launches belong to another activity.
        self.wait()
        with self.time(activity):
            yield
            self.wait()

    @contextmanager
    def time(self, activity: str) -> Iterator[None]:
        """Counts the time inside the ``with`` towards ``activity``; launches may go on after it."""
        started = perf_counter()
        yield
        self.seconds[activity] += perf_counter() - started

    def clock(self, activity: str) -> Callable[[Step], Step]:
        """Returns a wrapper that counts the calls of a function, as ``time`` does for a context.

        It takes a fraction of the time of a context, and is for what every update calls.
        """

        def wrapper(function: Step) -> Step:
            def timed(*inputs: Any, **options: Any) -> Any:
                started = perf_counter()
                output = function(*inputs, **options)
                self.seconds[activity] += perf_counter() - started
                return output

            return timed

        return wrapper

    def read(self) -> tuple[float, Mapping[str, float]]:
        """Returns wall-clock seconds and seconds by activity since the last reading.

        Waits for a GPU; activities that did not occur have 0 seconds.
        """
        self.wait()
        time = perf_counter()
        elapsed = time - self.last
        seconds = self.seconds
        self.last = time
        self.seconds = defaultdict(float)
        return elapsed, seconds

    def so_far(self, source_activities: Iterable[str]) -> dict[str, float]:
        """Returns the seconds since the last reading by activity, as ``split_time`` does.

        The next reading contains them as well.
        """
        return split_time(perf_counter() - self.last, self.seconds, source_activities)

    def wait(self) -> None:
        """Waits until a GPU has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


OUTSIDE_STEPS = ("startup", "evaluate", "checkpoint")
"""Activities outside of training steps; start-up is the first update with its rehearsals."""
CALLBACKS = "callbacks"
"""The activity of calling callbacks; trainings without any do not have it."""
LOOP_ACTIVITIES = (
    *OUTSIDE_STEPS,
    CALLBACKS,
    "draw",
    "next_batch",
    "sample",
    "transfer",
    "update",
)
"""Activities that the loop times, without those of a source."""


def split_time(
    elapsed: float, seconds: Mapping[str, float], source_activities: Iterable[str]
) -> dict[str, float]:
    """Splits elapsed seconds by activity; they add up to all of them.

    Args:
        elapsed: Seconds by the wall clock, in which all work was finished.
        seconds: By activity, with the slots ``draw`` and ``next_batch``.
        source_activities: The activities inside ``draw`` that the source reports separately.

    Returns:
        Seconds of the source's activities, ``sample`` (the remainder of sampling a batch),
            ``transfer``, all activities outside of training steps, and ``update``: the remainder.
    """
    durations = {name: seconds[name] for name in source_activities}
    # Rounding could make a difference negative.
    durations["sample"] = max(0.0, seconds["draw"] - sum(durations.values()))
    # The slot ``next_batch`` contains ``draw``.
    durations["transfer"] = max(0.0, seconds["next_batch"] - seconds["draw"])
    durations |= {name: seconds[name] for name in OUTSIDE_STEPS}
    if CALLBACKS in seconds:
        durations[CALLBACKS] = seconds[CALLBACKS]
    durations["update"] = max(0.0, elapsed - sum(durations.values()))
    return durations


def speeds(
    elapsed: float,
    durations: Mapping[str, float],
    progress: Mapping[str, int],
    reported_units: Collection[str],
) -> dict[str, float]:
    """Returns the speeds of training steps, and the shares of all activities, as metrics.

    Args:
        elapsed: Seconds by the wall clock.
        durations: Seconds by activity, as ``split_time`` returns them.
        progress: What training steps have counted meanwhile, by unit, without the first update.
        reported_units: Units that are reported also if nothing was counted in them.
    """
    metrics = {
        f"perf/{name}_share": duration / elapsed for name, duration in durations.items()
    }
    # Speeds are those of training steps alone.
    outside = (*OUTSIDE_STEPS, CALLBACKS)
    training_s = elapsed - sum(durations.get(name, 0.0) for name in outside)
    for unit, count in progress.items():
        if count or unit in reported_units:
            speed = count / training_s if training_s > 0 else 0.0
            metrics[f"perf/{unit}_per_second"] = speed
    if progress["updates"]:
        metrics["perf/update_ms"] = 1e3 * durations["update"] / progress["updates"]
    return metrics


def statistics_of(
    source: Source, learner: Learner, update_names: Collection[str]
) -> dict[str, float]:
    """Returns the source's statistics.

    Args:
        source: The source.
        learner: The learner, for messages.
        update_names: Names of the scalars that updates returned.

    Raises:
        RunnerError: A name is used by the update or reserved for the runner.
    """
    statistics = source.statistics()
    subject = f"{type(source).__name__}.statistics"
    for name in statistics:
        check_metric_name(name, subject)
    refuse_names(subject, statistics, RESERVED, "is reserved for the runner")
    update = f"{type(learner).__name__}.update"
    refuse_names(subject, statistics, update_names, f"is one of {update}")
    return statistics


def _can_be_added(value: Any) -> bool:
    """Returns whether a value of an update is a scalar, or a mean of numbers."""
    if not isinstance(value, Mean):
        return isinstance(value, Tensor) or type(value) is float
    # A ``bool`` is an ``int`` for Python, and not a metric.
    return all(
        item.dim() == 0 if isinstance(item, Tensor) else type(item) in (int, float)
        for item in value
    )
