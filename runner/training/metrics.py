"""Sums of the metrics of updates and of the seconds by activity, between two reports."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from runner.plugin.context import Slots
from runner.plugin.contract import Mean
from runner.plugin.metric_names import check_metric_name, refuse_names
from runner.plugin.source import State
from runner.system.errors import RunnerError
from runner.system.hardware import peak_host_memory
from runner.system.tensor_trees import map_tensors

RESERVED = frozenset({"updates"})
"""Names of training metrics that are reserved for the runner."""


class Means:
    """Sums and counts of scalars by name: on a CPU numbers; on a GPU tensors that stay there, to wait for nothing."""

    def __init__(self, who: str, on_host: bool) -> None:
        """Starts without sums; messages contain ``who``, and checking a scalar
        costs nothing if it is ``on_host``.
        """
        self.who, self.on_host = who, on_host
        self.sums: dict[str, Any] = {}
        self.counts: dict[str, Any] = {}
        self.names: set[str] = set()
        """All names so far; those of an earlier report may not be given away either."""
        self.finite = True
        """Whether all that was looked at so far was finite; on a GPU, nothing is before ``look``."""

    def add(self, output: Mapping[str, Any]) -> None:
        """Adds the scalars and ``Mean``s that an update returned; a RunnerError if there are none, or anything else."""
        found = False
        for name, value in output.items():
            if isinstance(value, Tensor) and value.dim():
                continue
            total, count = value if isinstance(value, Mean) else (value, 1)
            found = True
            if name not in self.sums:
                self._begin(name, value, total, count)
            if self.on_host:
                number = float(total)
                self.finite = self.finite and math.isfinite(number)
                self.sums[name] += number
                self.counts[name] += float(count)
            else:
                self.sums[name] += (
                    total.detach().double() if isinstance(total, Tensor) else total
                )
                self.counts[name] += count
        if not found:
            raise RunnerError(
                f"{self.who}.update returns no scalar, so divergence cannot be detected; return a loss"
            )

    def look(self) -> bool:
        """Returns whether all sums are finite; waits for a GPU."""
        if not self.on_host and self.sums:
            self.finite = all(
                math.isfinite(float(total)) for total in self.sums.values()
            )
        return self.finite

    def take(self) -> dict[str, float]:
        """The means of all that was added since the last time; what was counted as nothing has none."""
        counts = {name: float(count) for name, count in self.counts.items()}
        means = {
            name: float(total) / counts[name]
            for name, total in self.sums.items()
            if counts[name]
        }
        self.sums, self.counts = {}, {}
        return means

    def state_dict(self) -> State:
        """Sums and counts."""
        return {"sums": dict(self.sums), "counts": dict(self.counts)}

    def load_state_dict(self, state: State, device: torch.device) -> None:
        """Restores what ``state_dict`` returned, where it is added up."""
        self.sums, self.counts = map_tensors(
            lambda each: each.to(device), (state["sums"], state["counts"])
        )

    def _begin(self, name: str, value: Any, total: Any, count: Any) -> None:
        """Starts the sum of a name, and validates the first value."""
        check_metric_name(name, f"{self.who}.update")
        if isinstance(value, Mean):
            right = all(
                each.dim() == 0
                if isinstance(each, Tensor)
                else type(each) in (int, float)
                for each in value
            )
        else:
            right = isinstance(value, Tensor) or type(value) is float
        if not right:
            parts = (
                f" of {type(total).__name__} and {type(count).__name__}"
                if isinstance(value, Mean)
                else ""
            )
            raise RunnerError(
                f"{self.who}.update returned '{name}' as {type(value).__name__}{parts}; it should be a tensor, "
                "a float, or Mean(sum, count) of numbers or scalar tensors"
            )
        if isinstance(total, Tensor) and total.requires_grad:
            raise RunnerError(
                f"{self.who}.update returned '{name}' with its gradient; return {name}.detach()"
            )
        refuse_names(
            f"{self.who}.update", [name], RESERVED, "is reserved for the runner"
        )
        self.names.add(name)
        self.sums[name] = self.counts[name] = 0.0


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
        """Counts the time inside the ``with`` towards ``activity``, and nothing that was launched before."""
        self.wait()
        before = perf_counter()
        yield
        self.wait()
        self.seconds[activity] += perf_counter() - before

    def time(self, slots: Slots, name: str) -> None:
        """Counts the time in a slot towards an activity of its name."""

        def wrapper(step: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*args: Any, **kwargs: Any) -> Any:
                before = perf_counter()
                output = step(*args, **kwargs)
                self.seconds[name] += perf_counter() - before
                return output

            return timed

        slots.wrap(name, wrapper)

    def read(self) -> tuple[float, Mapping[str, float]]:
        """Wall-clock seconds and seconds by activity (0 for others) since the last reading; waits for a GPU."""
        self.wait()
        now = perf_counter()
        elapsed, self.last = now - self.last, now
        seconds, self.seconds = self.seconds, defaultdict(float)
        return elapsed, seconds

    def so_far(self, source_activities: Iterable[str]) -> dict[str, float]:
        """Returns the seconds since the last reading as ``split_time`` does; the next reading contains them too."""
        return split_time(perf_counter() - self.last, self.seconds, source_activities)

    def wait(self) -> None:
        """Lets a GPU finish what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


BESIDE_STEPS = ("startup", "evaluate", "checkpoint")
"""Activities outside of training steps: the first update with its rehearsals,
evaluations, checkpoints.
"""
OWN_ACTIVITIES = (*BESIDE_STEPS, "draw", "next_batch", "sample", "transfer", "update")
"""Everything that the loop times, without the activities of a source."""


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
    parts = {name: seconds[name] for name in source_activities}
    parts["sample"] = max(0.0, seconds["draw"] - sum(parts.values()))
    parts["transfer"] = max(0.0, seconds["next_batch"] - seconds["draw"])
    parts |= {name: seconds[name] for name in BESIDE_STEPS}
    parts["update"] = max(0.0, elapsed - sum(parts.values()))
    return parts


def speeds(
    elapsed: float,
    parts: Mapping[str, float],
    added: Mapping[str, int],
    always: Collection[str],
) -> dict[str, float]:
    """Returns the speeds of training steps, and the shares of all activities, as metrics.

    Args:
        elapsed: Seconds by the wall clock.
        parts: Seconds by activity, as ``split_time`` returns them.
        added: What training steps have counted meanwhile, by unit, without the first update.
        always: Units that are reported also if nothing was counted in them.
    """
    metrics = {f"perf/{name}_share": part / elapsed for name, part in parts.items()}
    training_s = elapsed - sum(parts[name] for name in BESIDE_STEPS)
    for unit, count in added.items():
        if count or unit in always:
            metrics[f"perf/{unit}_per_second"] = (
                count / training_s if training_s > 0 else 0.0
            )
    if added["updates"]:
        metrics["perf/update_ms"] = 1e3 * parts["update"] / added["updates"]
    return metrics


def peak_memory(device: torch.device) -> int:
    """Most bytes that torch ever held on a GPU, or this process in the host's memory."""
    return (
        torch.cuda.max_memory_allocated(device)
        if device.type == "cuda"
        else peak_host_memory()
    )
