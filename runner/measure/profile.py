"""Where the time of an update goes: ``torch.profiler`` over a few steady ones."""

from __future__ import annotations

import os
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from runner.compare.clock import WarmUp, warm_up
from runner.measure.measured import Measured
from runner.plugin.registry import Registry
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.errors import StorageError, UsageError
from runner.tracking import Workspace
from runner.tracking.workspace import folder_name
from runner.train.assemble import Assembly, assemble

STEP = "step"
"""The whole of an update: drawing its batch and its noise, learning, and feeding back."""
PYTHON = "(outside operators)"
"""Python, and code that a stage has compiled."""
TRACE = "trace.json"
ITEMS = frozenset({"aten::item", "aten::_local_scalar_dense"})
WAITS = frozenset({"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"})
TO_HOST = "Memcpy DtoH"
BARE_BURSTS = 3
_LABEL = "slot "


@dataclass(frozen=True)
class SlotTime:
    """One slot, in the mean over the profiled updates."""

    name: str
    calls: float
    """In one update; 0 where it runs inside something compiled or captured, or a stage does without it."""
    total_ms: float
    """Wall-clock time between its beginning and its end on the host."""
    self_ms: float
    """Without the slots that it calls."""
    device_ms: float | None
    """Of the kernels that it, and the slots that it calls, launched; None on a CPU."""


@dataclass(frozen=True)
class OperatorTime:
    """One operator on the host or one kernel on a GPU, in the mean over the profiled updates."""

    name: str
    device: str
    """``cpu`` or ``cuda``."""
    calls: float
    self_ms: float
    """Without the operators that it calls."""
    share: float
    """Of the update's time on the host, or of all kernels' time on the GPU."""


@dataclass(frozen=True)
class HostSync:
    """What makes the host wait for a GPU, or would do so on one."""

    name: str
    slot: str
    """The innermost one that it happened in."""
    calls: float
    """In one update."""
    waits: bool
    """Whether it is counted as a wait; the others are shown to find its cause."""


@dataclass(frozen=True)
class Profile:
    """What came out."""

    recipe: str
    device: str
    threads: int
    batch_size: int
    updates: int
    """How many were profiled."""
    steady: bool
    """Whether the warm-up ended because the update was steady."""
    warmup_s: float
    update_ms: float
    """One update without the profiler."""
    profiled_update_ms: float
    slots: tuple[SlotTime, ...]
    operators: tuple[OperatorTime, ...]
    """All of them, those that take longest first."""
    syncs: tuple[HostSync, ...]
    trace: Path

    @property
    def profiler_overhead(self) -> float:
        """Share by which the profiler made the update longer."""
        return self.profiled_update_ms / self.update_ms - 1

    @property
    def waits(self) -> float:
        """Times that the host waits for the GPU in one update; on a CPU, would if the tensors were on a GPU."""
        return sum(sync.calls for sync in self.syncs if sync.waits)

    def data(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "recipe": self.recipe, "device": self.device, "threads": self.threads, "batch_size": self.batch_size,
            "updates": self.updates, "steady": self.steady, "warmup_s": self.warmup_s, "update_ms": self.update_ms,
            "profiled_update_ms": self.profiled_update_ms, "profiler_overhead": self.profiler_overhead,
            "slots": [asdict(slot) for slot in self.slots],
            "operators": [asdict(operator) for operator in self.operators],
            "host_syncs": {"per_update": self.waits, "found": [asdict(sync) for sync in self.syncs]},
            "trace": str(self.trace),
        }  # fmt: skip


def profile(
    recipe: Recipe,
    registry: Registry,
    workspace: Workspace,
    out: Path | None = None,
    updates: int = 5,
    warmup_s: float = 60.0,
) -> Profile:
    """Profiles steady updates of a recipe and leaves their Chrome trace in a folder.

    Args:
        recipe: validated.
        registry: where its plugins come from.
        workspace: where the folder is, unless ``out`` says otherwise.
        out: the folder.
        updates: how many are profiled, one after the other as in a training.
        warmup_s: seconds after which an update counts as steady anyway.

    Raises:
        UsageError: the folder holds a trace already, or the recipe cannot run here.
        StorageError: the trace cannot be written.
    """
    pipeline = _assembled(recipe, registry)
    trace = _new_folder(recipe, workspace, out) / TRACE
    burst = _Burst(pipeline, updates)
    warmth = warm_up(burst, burst.stopwatch, warmup_s)
    bare = median(burst.stopwatch.seconds(burst) for _ in range(BARE_BURSTS))
    profiled, events = burst.profiled(trace)
    timeline = _Timeline(events, updates, pipeline.device.type == "cuda")
    return Profile(
        recipe=recipe.name,
        device=str(pipeline.device),
        threads=torch.get_num_threads(),
        batch_size=pipeline.batch_size,
        updates=updates,
        steady=warmth.steady,
        warmup_s=_seconds(warmth),
        update_ms=1e3 * bare / updates,
        profiled_update_ms=1e3 * profiled / updates,
        slots=tuple(timeline.slots((STEP, *burst.names))),
        operators=tuple(sorted(timeline.operators(), key=lambda each: -each.self_ms)),
        syncs=tuple(timeline.syncs()),
        trace=trace,
    )


def _assembled(recipe: Recipe, registry: Registry) -> Assembly:
    generators.seed(recipe.seed)
    return assemble(recipe, registry.files)


def _new_folder(recipe: Recipe, workspace: Workspace, out: Path | None) -> Path:
    folder = out or workspace.root / "profiles" / f"{folder_name(recipe.name)}-{uuid.uuid4().hex[:8]}"
    try:
        if (folder / TRACE).exists():
            raise UsageError(f"{folder} holds a {TRACE} already; name another folder with --out")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritten(folder, error.strerror) from error
    if not os.access(folder, os.W_OK | os.X_OK):  # or it would be told only after the measuring
        raise _unwritten(folder, "no permission to write")
    return folder


def _unwritten(folder: Path, reason: object) -> StorageError:
    return StorageError(f"{folder}: {reason}; free some space, or name another folder with --out")


def _seconds(warmth: WarmUp) -> float:
    return warmth.first_s + warmth.seconds


class _Burst:
    """Updates that follow each other, with every slot between the labels of the profiler.

    Args:
        pipeline: assembled; its slots are wrapped.
        updates: how many.
    """

    def __init__(self, pipeline: Assembly, updates: int) -> None:
        self.pipeline, self.updates = pipeline, updates
        measured = Measured(pipeline)
        self.stopwatch, self.whole_step = measured.stopwatch, measured.step
        self.labels = False
        self.names = tuple(dict.fromkeys(("next_batch", "draw", "transfer", "update", *pipeline.learner.story)))
        for name in self.names:
            pipeline.slots.wrap(name, partial(self._labelled, name))
        self.step = self._labelled(STEP, self._step)

    def __call__(self) -> None:
        for _ in range(self.updates):
            self.step()

    def profiled(self, trace: Path) -> tuple[float, list[Any]]:
        """Seconds of the burst under the profiler, and its events; writes the trace.

        Raises:
            StorageError: the trace cannot be written.
        """
        activities = [ProfilerActivity.CPU]
        if self.pipeline.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.labels = True
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells everybody on stderr when it starts and stops
        with torch_profile(activities=activities):
            self()  # the profiler's own first time is slow
        with torch_profile(activities=activities, acc_events=True) as profiler:
            seconds = self.stopwatch.seconds(self)
        try:
            profiler.export_chrome_trace(str(trace))
        except (OSError, RuntimeError) as error:
            raise _unwritten(trace.parent, error) from error
        if not trace.exists():
            raise _unwritten(trace.parent, "the trace could not be written")
        return seconds, list(profiler.events() or ())

    def _step(self) -> None:
        while self.whole_step() is None:
            pass

    def _labelled(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def labelled(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self.labels:  # a label would break a compiled graph in two
                return step(*args, **kwargs)
            with record_function(f"{_LABEL}{name}"):
                return step(*args, **kwargs)

        return labelled


class _Timeline:
    """The profiler's events, each in the innermost slot that was running when it began.

    They are told apart by time, not by what called what: on a GPU, a backward pass runs in a thread of its own while
    its slot waits.
    """

    def __init__(self, events: list[Any], updates: int, on_gpu: bool) -> None:
        self.updates, self.on_gpu = updates, on_gpu
        self.on_host = [event for event in events if event.device_type == DeviceType.CPU]
        self.on_device = [
            event
            for event in events
            if event.device_type == DeviceType.CUDA
            and not event.name.startswith(_LABEL)
            and not event.is_user_annotation
        ]
        self.placed = list(self._placed())

    def slots(self, names: tuple[str, ...]) -> Iterator[SlotTime]:
        """Times of these slots, in this order."""
        calls: Counter[str] = Counter()
        total: defaultdict[str, float] = defaultdict(float)
        nested: defaultdict[str, float] = defaultdict(float)
        device: defaultdict[str, float] = defaultdict(float)
        for event, inside in self.placed:
            if event.name.startswith(_LABEL):
                name, length = event.name.removeprefix(_LABEL), event.time_range.elapsed_us()
                calls[name] += 1
                total[name] += length
                if inside:
                    nested[inside[-1]] += length
                inside = (*inside, name)
            for name in set(inside):
                device[name] += sum(kernel.duration for kernel in event.kernels)
        for name in names:
            yield SlotTime(
                name,
                calls[name] / self.updates,
                self._ms(total[name]),
                self._ms(total[name] - nested[name]),
                self._ms(device[name]) if self.on_gpu else None,
            )

    def operators(self) -> Iterator[OperatorTime]:
        """What took the time, by name."""
        host: defaultdict[str, list[float]] = defaultdict(list)
        whole = 0.0
        for event, inside in self.placed:
            label = event.name.startswith(_LABEL)
            if inside or label:
                host[PYTHON if label else event.name].append(event.self_cpu_time_total)
            if label and not inside:
                whole += event.time_range.elapsed_us()
        yield from self._rows("cpu", host, whole)
        kernels: defaultdict[str, list[float]] = defaultdict(list)
        for event in self.on_device:
            kernels[event.name].append(event.time_range.elapsed_us())
        yield from self._rows("cuda", kernels, sum(map(sum, kernels.values())))

    def syncs(self) -> Iterator[HostSync]:
        """Host syncs by name and slot, those that wait first."""
        waits = WAITS if self.on_gpu else frozenset({"aten::_local_scalar_dense"})
        found: Counter[tuple[str, str]] = Counter()
        for event, inside in self.placed:
            if inside:
                if event.name in ITEMS | WAITS:
                    found[event.name, inside[-1]] += 1
                found.update((kernel.name, inside[-1]) for kernel in event.kernels if kernel.name.startswith(TO_HOST))
        for (name, slot), count in sorted(found.items(), key=lambda each: (each[0][0] not in waits, -each[1], each[0])):
            yield HostSync(name, slot, count / self.updates, name in waits)

    def _placed(self) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """Every event on the host in the order of time, with the slots that were running, the innermost last."""
        running: list[Any] = []
        for event in sorted(self.on_host, key=lambda event: (event.time_range.start, -event.time_range.end)):
            while running and running[-1].time_range.end <= event.time_range.start:
                running.pop()
            yield event, tuple(label.name.removeprefix(_LABEL) for label in running)
            if event.name.startswith(_LABEL):
                running.append(event)

    def _rows(self, device: str, found: dict[str, list[float]], whole: float) -> Iterator[OperatorTime]:
        for name, times in found.items():
            spent = sum(times)
            yield OperatorTime(name, device, len(times) / self.updates, self._ms(spent), spent / whole if whole else 0)

    def _ms(self, microseconds: float) -> float:
        return microseconds / 1e3 / self.updates
