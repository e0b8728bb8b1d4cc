"""Where the time of an update goes: ``torch.profiler`` over a few steady ones, and its tables."""

from __future__ import annotations

import os
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from runner.compare.clock import warm_up
from runner.measure.measured import Measured
from runner.system import generators
from runner.system.errors import StorageError, UsageError
from runner.tracking.workspace import folder_name
from runner.train.assemble import assemble

if TYPE_CHECKING:
    from runner.plugin.registry import Registry
    from runner.recipe.recipe import Recipe
    from runner.tracking.workspace import Workspace
    from runner.train.assemble import Assembly

STEP = "step"  # the whole of an update: drawing its batch and its noise, learning, and feeding back
PYTHON = "(outside operators)"  # Python, and code that a stage has compiled
TRACE = "trace.json"
ITEMS = frozenset({"aten::item", "aten::_local_scalar_dense"})
WAITS = frozenset({"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"})
TO_HOST = "Memcpy DtoH"
BARE_BURSTS = 3
_LABEL = "slot "
_WIDE = 100  # columns from which on a terminal shows all figures
_TOP = 15  # operators that are shown; ``--json`` has all of them


@dataclass(frozen=True)
class SlotTime:
    """One slot, in the mean over the profiled updates."""

    name: str
    calls: float  # in one update; 0 where it runs inside something compiled or captured, or a stage does without it
    total_ms: float  # wall-clock time between its beginning and its end on the host
    self_ms: float  # without the slots that it calls
    device_ms: float | None  # of the kernels that it, and the slots that it calls, launched; None on a CPU


@dataclass(frozen=True)
class OperatorTime:
    """One operator on the host or one kernel on a GPU, in the mean over the profiled updates."""

    name: str
    device: str  # ``cpu`` or ``cuda``
    calls: float
    self_ms: float  # without the operators that it calls
    share: float  # of the update's time on the host, or of all kernels' time on the GPU


@dataclass(frozen=True)
class HostSync:
    """What makes the host wait for a GPU, or would do so on one."""

    name: str
    slot: str  # the innermost one that it happened in
    calls: float  # in one update
    waits: bool  # whether it is counted as a wait; the others are shown to find its cause


@dataclass(frozen=True)
class Profile:
    """What came out."""

    recipe: str
    device: str
    threads: int
    batch_size: int
    updates: int  # how many were profiled
    steady: bool  # whether the warm-up ended because the update was steady
    warmup_s: float
    update_ms: float  # one update without the profiler
    profiled_update_ms: float
    slots: tuple[SlotTime, ...]
    operators: tuple[OperatorTime, ...]  # all of them, those that take longest first
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
        data = asdict(self)
        syncs = {"per_update": self.waits, "found": data.pop("syncs")}
        return data | {"profiler_overhead": self.profiler_overhead, "host_syncs": syncs, "trace": str(self.trace)}


def profile(
    recipe: Recipe, registry: Registry, workspace: Workspace, out: Path | None, updates: int = 5, warmup_s: float = 60.0
) -> Profile:
    """Profiles steady updates, one after the other as in a training, and leaves their Chrome trace in a folder.

    The folder is ``out``, or a new one of the workspace. After ``warmup_s`` an update counts as steady anyway.

    Raises:
        UsageError: the folder holds a trace already, or the recipe cannot run here.
        StorageError: the trace cannot be written.
    """
    generators.seed(recipe.seed)
    pipeline = assemble(recipe, registry.files)
    folder = out or workspace.root / "profiles" / f"{folder_name(recipe.name)}-{uuid.uuid4().hex[:8]}"
    try:
        if (folder / TRACE).exists():
            raise UsageError(f"{folder} holds a {TRACE} already; name another folder with --out")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritten(folder, error.strerror) from error
    if not os.access(folder, os.W_OK | os.X_OK):  # or it would be told only after the measuring
        raise _unwritten(folder, "no permission to write")
    burst = Burst(pipeline, updates)
    warmth = warm_up(burst, burst.stopwatch, warmup_s)
    bare = median(burst.stopwatch.seconds(burst) for _ in range(BARE_BURSTS))
    profiled, events = burst.profiled(folder / TRACE)
    timeline = Timeline(events, updates, pipeline.device.type == "cuda")
    return Profile(
        recipe=recipe.name, device=str(pipeline.device), threads=torch.get_num_threads(),
        batch_size=pipeline.batch_size, updates=updates,
        steady=warmth.steady, warmup_s=warmth.first_s + warmth.seconds,
        update_ms=1e3 * bare / updates, profiled_update_ms=1e3 * profiled / updates,
        slots=tuple(timeline.slots((STEP, *burst.names))),
        operators=tuple(sorted(timeline.operators(), key=lambda each: -each.self_ms)),
        syncs=tuple(timeline.syncs()),
        trace=folder / TRACE,
    )  # fmt: skip


def _unwritten(folder: Path, reason: object) -> StorageError:
    return StorageError(f"{folder}: {reason}; free some space, or name another folder with --out")


class Burst:
    """Updates that follow each other, with every slot between the labels of the profiler."""

    def __init__(self, pipeline: Assembly, updates: int) -> None:
        self.pipeline, self.updates = pipeline, updates
        measured = Measured(pipeline)
        self.stopwatch = measured.stopwatch
        self.labels = False
        self.names = tuple(dict.fromkeys(("next_batch", "draw", "transfer", "update", *pipeline.learner.story)))
        for name in self.names:
            pipeline.slots.wrap(name, partial(self.labelled, name))

        def whole_step() -> None:
            while measured.step() is None:
                pass

        self.step = self.labelled(STEP, whole_step)

    def __call__(self) -> None:
        """All of them."""
        for _ in range(self.updates):
            self.step()

    def labelled(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step, between labels while the profiler looks."""

        def labelled(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self.labels:  # a label would break a compiled graph in two
                return step(*args, **kwargs)
            with record_function(f"{_LABEL}{name}"):
                return step(*args, **kwargs)

        return labelled

    def profiled(self, trace: Path) -> tuple[float, list[Any]]:
        """Seconds of the burst under the profiler, and its events; writes the trace.

        Raises:
            StorageError: the trace cannot be written.
        """
        on_gpu = self.pipeline.device.type == "cuda"
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
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


class Timeline:
    """The profiler's events on the host in the order of time, each with the labels around it, the innermost last.

    They are told apart by time, not by what called what: on a GPU, a backward pass runs in a thread of its own while
    its slot waits.
    """

    def __init__(self, events: list[Any], updates: int, on_gpu: bool) -> None:
        self.updates, self.on_gpu = updates, on_gpu
        self.on_device = [each for each in events if each.device_type == DeviceType.CUDA
                          and not each.name.startswith(_LABEL) and not each.is_user_annotation]  # fmt: skip
        self.placed: list[tuple[Any, list[str]]] = []
        running: list[Any] = []
        on_host = (event for event in events if event.device_type == DeviceType.CPU)
        for event in sorted(on_host, key=lambda event: (event.time_range.start, -event.time_range.end)):
            while running and running[-1].time_range.end <= event.time_range.start:
                running.pop()
            self.placed.append((event, [label.name for label in running]))
            if event.name.startswith(_LABEL):
                running.append(event)

    def slots(self, names: tuple[str, ...]) -> Iterator[SlotTime]:
        """Times of these slots, in this order."""
        labels = [each for each in self.placed if each[0].name.startswith(_LABEL)]
        launching = [each for each in self.placed if each[0].kernels]
        for name in names:
            label = f"{_LABEL}{name}"
            own = [event.time_range.elapsed_us() for event, _ in labels if event.name == label]
            nested = [event.time_range.elapsed_us() for event, inside in labels if inside[-1:] == [label]]
            device_ms = None
            if self.on_gpu:
                within = [event for event, inside in launching if label in (event.name, *inside)]
                device_ms = self._ms(sum(kernel.duration for event in within for kernel in event.kernels))
            calls, total = len(own) / self.updates, sum(own)
            yield SlotTime(name, calls, self._ms(total), self._ms(total - sum(nested)), device_ms)

    def operators(self) -> Iterator[OperatorTime]:
        """What took the time, by name."""
        times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        whole = {"cpu": 0.0, "cuda": sum(event.time_range.elapsed_us() for event in self.on_device)}
        for event, inside in self.placed:
            label = event.name.startswith(_LABEL)
            if inside or label:
                times["cpu", PYTHON if label else event.name].append(event.self_cpu_time_total)
            if label and not inside:
                whole["cpu"] += event.time_range.elapsed_us()
        for event in self.on_device:
            times["cuda", event.name].append(event.time_range.elapsed_us())
        for (device, name), own in times.items():
            share = sum(own) / whole[device] if whole[device] else 0
            yield OperatorTime(name, device, len(own) / self.updates, self._ms(sum(own)), share)

    def syncs(self) -> Iterator[HostSync]:
        """Host syncs by name and slot, those that wait first."""
        waits = WAITS if self.on_gpu else frozenset({"aten::_local_scalar_dense"})
        found: Counter[tuple[str, str]] = Counter()
        for event, inside in self.placed:
            if inside:
                slot = inside[-1].removeprefix(_LABEL)
                if event.name in ITEMS | WAITS:
                    found[event.name, slot] += 1
                found.update((kernel.name, slot) for kernel in event.kernels if kernel.name.startswith(TO_HOST))
        for (name, slot), count in sorted(found.items(), key=lambda each: (each[0][0] not in waits, -each[1], each[0])):
            yield HostSync(name, slot, count / self.updates, name in waits)

    def _ms(self, microseconds: float) -> float:
        return microseconds / 1e3 / self.updates


def show(profile: Profile, console: Console) -> None:
    """Prints slots, operators and host syncs, wide or narrow as the terminal is, and where the trace is."""
    wide, on_cpu = console.width >= _WIDE, profile.device == "cpu"
    where = f"{profile.device}, {profile.threads} threads, batch {profile.batch_size}"
    console.print(Text(f"{profile.recipe}: one update on {where}: {profile.update_ms:.3g} ms"))
    _print(console, list(_slots(profile)), "" if wide else "calls")
    for device, what in (("cuda", "kernels on the GPU"), ("cpu", "operators on the host")):
        found = [each for each in profile.operators if each.device == device]
        rows = [{"name": each.name, "calls": f"{each.calls:g}", "self ms": f"{each.self_ms:.3f}",
                 "share": f"{each.share:.1%}"} for each in found[:_TOP]]  # fmt: skip
        if rows:
            console.print(Text(f"top {len(rows)} of {len(found)} {what}"))
            _print(console, rows, "" if wide else "calls")
    what = "values read by the host, which would wait if they were on a GPU" if on_cpu else "host syncs"
    console.print(Text(f"{what}: {profile.waits:g} in one update"))
    if profile.syncs:
        rows = [{"name": each.name, "slot": each.slot, "calls": f"{each.calls:g}",
                 "counted": "yes" if each.waits else ""} for each in profile.syncs]  # fmt: skip
        _print(console, rows, "" if wide else "counted")
    for line in _remarks(profile):
        console.print(Text(line), style="dim")
    console.print(Text(f"trace: {profile.trace} (open it in https://ui.perfetto.dev)"), soft_wrap=True)


def _slots(profile: Profile) -> Iterator[dict[str, str]]:
    whole = profile.slots[0].total_ms
    for slot in profile.slots:
        figures = {"calls": f"{slot.calls:g}", "self ms": f"{slot.self_ms:.3f}", "total ms": f"{slot.total_ms:.3f}"}
        if slot.device_ms is not None:
            figures["GPU ms"] = f"{slot.device_ms:.3f}"
        figures["share"] = f"{slot.self_ms / whole:.1%}"
        yield {"slot": slot.name, **(figures if slot.calls else dict.fromkeys(figures, "-"))}


def _print(console: Console, rows: Sequence[Mapping[str, str]], hidden: str) -> None:
    """Prints a table without the column that is too much for a narrow terminal."""
    first, *figures = (name for name in rows[0] if name != hidden)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in figures:
        table.add_column(name, justify="left" if name in ("slot", "counted") else "right", no_wrap=True)
    for row in rows:
        table.add_row(Text(row[first]), *(row[name] for name in figures))
    console.print(table)


def _remarks(profile: Profile) -> Iterator[str]:
    yield (
        f"mean over {profile.updates} updates; with the profiler, an update took {profile.profiled_update_ms:.3g} ms "
        f"({profile.profiler_overhead:+.0%}), and the tables say where those went"
    )
    if uncalled := ", ".join(slot.name for slot in profile.slots if not slot.calls):
        yield f"not called by themselves: {uncalled} (compiled or captured with what calls them, or replaced)"
    if profile.device != "cpu" and not any(operator.device == "cuda" for operator in profile.operators):
        yield "the driver told nothing about kernels; KINETO_LOG_LEVEL=2 in the environment shows why"
    if not profile.steady:
        yield f"updates were not steady after {profile.warmup_s:.0f} s; --warmup allows more"
