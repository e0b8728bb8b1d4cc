"""Profiles steady updates with ``torch.profiler``: tables of slots, operators and host syncs."""

from __future__ import annotations

import os
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from runner.ablation.report import print_table
from runner.ablation.variant_process import Measured
from runner.plugin.registry import Registry
from runner.proof.warm_up import warm_up
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.console import CleanText, Console
from runner.system.errors import StorageError, UsageError
from runner.system.files import make_folder
from runner.system.text_lines import figure, print_wrapped, processor
from runner.tracking.workspace import Workspace, folder_name
from runner.training.budget import fitted
from runner.training.pipeline import Assembly, assemble

STEP = "step"
"""A complete update: sampling its batch and noise, learning, and feedback."""
PYTHON = "(outside operators)"
"""Python, and code that a stage has compiled."""
TRACE = "trace.json"
WAITS = frozenset(
    {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"}
)
SYNCS = WAITS | {"aten::item", "aten::_local_scalar_dense"}
TO_HOST = "Memcpy DtoH"
BARE_BURSTS = 3
_LABEL = "slot "
_WIDE = 100
"""Columns from which on a terminal shows all figures."""
_TOP = 15
"""Operators that are shown; ``--json`` has all of them."""


@dataclass(frozen=True)
class SlotTime:
    """The time of one slot, in the mean over the profiled updates."""

    name: str
    calls: float
    """Calls per update; 0 if the slot is compiled or captured with its caller, or replaced."""
    total_ms: float
    """Wall-clock time on the host."""
    self_ms: float
    """Time without the slots that it calls."""
    device_ms: float | None
    """Time of the kernels that the slot and its callees launched; None on a CPU."""


@dataclass(frozen=True)
class OperatorTime:
    """The time of one operator on the host or one kernel on a GPU, in the mean
    over the profiled updates.
    """

    name: str
    device: str
    """``cpu`` or ``cuda``."""
    calls: float
    self_ms: float
    """Time without the operators that it calls."""
    share: float
    """Share of the update's time on the host, or of all kernels' time on the GPU."""


@dataclass(frozen=True)
class HostSync:
    """An operation that makes the host wait for a GPU, or would do so on one."""

    name: str
    slot: str
    """The innermost slot in which it happened."""
    calls: float
    """Calls per update."""
    waits: bool
    """True if it counts as a wait; the others help to find the cause."""


@dataclass(frozen=True)
class Profile:
    """The result of a profile."""

    recipe: str
    device: str
    threads: int
    batch_size: int
    updates: int
    """Number of profiled updates."""
    steady: bool
    """True if the warm-up ended because updates were steady."""
    warmup_s: float
    update_ms: float
    """Time of an update without the profiler."""
    profiled_update_ms: float
    slots: Sequence[SlotTime]
    operators: Sequence[OperatorTime]
    """All operators, the slowest first."""
    syncs: Sequence[HostSync]
    """Syncs, those that count as waits first."""
    trace: Path

    @property
    def profiler_overhead(self) -> float:
        """Share by which the profiler made the update longer."""
        return self.profiled_update_ms / self.update_ms - 1

    @property
    def waits(self) -> float:
        """Times that the host waits for the GPU in one update; on a CPU, would if the tensors
        were on a GPU.
        """
        return sum(sync.calls for sync in self.syncs if sync.waits)

    def data(self) -> dict[str, Any]:
        """Returns the output of ``--json``."""
        data = asdict(self)
        syncs = {"per_update": self.waits, "found": data.pop("syncs")}
        return data | {
            "profiler_overhead": self.profiler_overhead,
            "host_syncs": syncs,
            "trace": str(self.trace),
        }


def profile(
    recipe: Recipe,
    registry: Registry,
    workspace: Workspace,
    out: Path | None,
    updates: int = 5,
    warmup_s: float = 60.0,
) -> Profile:
    """Profiles steady updates, one after the other as in a training, and leaves their Chrome
    trace in a folder.

    The folder is ``out``, or a new one of the workspace. After ``warmup_s`` an update counts as
    steady anyway. A UsageError if the folder holds a trace already, a StorageError if it cannot
    be written to.
    """
    recipe = fitted(recipe, registry)
    generators.seed(recipe.seed)
    pipeline = assemble(recipe, registry.files)
    folder = (
        out
        or workspace.root
        / "profiles"
        / f"{folder_name(recipe.name)}-{uuid.uuid4().hex[:8]}"
    )
    try:
        if (folder / TRACE).exists():
            raise UsageError(
                f"{folder} holds a {TRACE} already; name another folder with --out"
            )
        make_folder(folder)
        # A folder that is not writable should fail before the measurement.
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _unwritten(folder, error.strerror) from error
    burst = Burst(pipeline, updates)
    # The profiler slows updates, so their time is measured without it first.
    warmth = warm_up(burst, burst.stopwatch, warmup_s)
    bare = median(burst.stopwatch.seconds(burst) for _ in range(BARE_BURSTS))
    profiled, events = burst.profiled(folder / TRACE)
    slots, operators, syncs = tables(
        events, burst.names, updates, pipeline.device.type == "cuda"
    )
    return Profile(
        recipe=recipe.name,
        device=str(pipeline.device),
        threads=torch.get_num_threads(),
        batch_size=pipeline.batch_size,
        updates=updates,
        steady=warmth.steady,
        warmup_s=warmth.first_s + warmth.seconds,
        update_ms=1e3 * bare / updates,
        profiled_update_ms=1e3 * profiled / updates,
        slots=slots,
        operators=operators,
        syncs=syncs,
        trace=folder / TRACE,
    )


def _unwritten(folder: Path, reason: object) -> StorageError:
    return StorageError(
        f"{folder}: {reason}; free some space, or name another folder with --out"
    )


class Burst:
    """Updates that follow each other, with every slot between the labels of the profiler."""

    def __init__(self, pipeline: Assembly, updates: int) -> None:
        self.pipeline = pipeline
        self.updates = updates
        self.labels = False
        measured = Measured(pipeline)
        self.stopwatch = measured.stopwatch
        slots = dict.fromkeys(
            ("next_batch", "draw", "transfer", "update", *pipeline.learner.story)
        )
        self.names = (STEP, *slots)
        for name in slots:
            pipeline.slots.surround(name, partial(self.label, name))
        self.measured_step = measured.step

    def __call__(self) -> None:
        """Performs all updates."""
        for _ in range(self.updates):
            with self.label(STEP):
                while self.measured_step() is None:
                    pass

    def label(self, name: str) -> AbstractContextManager[Any]:
        """Returns a label of the profiler while it records."""
        return record_function(f"{_LABEL}{name}") if self.labels else nullcontext()

    def profiled(self, trace: Path) -> tuple[float, list[Any]]:
        """Seconds of the burst under the profiler, and its events; writes the trace, or raises a
        StorageError.
        """
        on_gpu = self.pipeline.device.type == "cuda"
        activities = (
            [ProfilerActivity.CPU, ProfilerActivity.CUDA]
            if on_gpu
            else [ProfilerActivity.CPU]
        )
        self.labels = True
        # The profiler prints to stderr when it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with torch_profile(activities=activities):
            # The first use of the profiler is slow.
            self()
        with torch_profile(activities=activities, acc_events=True) as profiler:
            seconds = self.stopwatch.seconds(self)
        try:
            profiler.export_chrome_trace(str(trace))
            # Fails if the trace could not be written, which the profiler may not report.
            trace.stat()
        except (OSError, RuntimeError) as error:
            raise _unwritten(trace.parent, error) from error
        return seconds, list(profiler.events() or ())


def tables(
    events: Iterable[Any], names: Sequence[str], updates: int, on_gpu: bool
) -> tuple[list[SlotTime], list[OperatorTime], list[HostSync]]:
    """Converts the profiler's events to tables of the named slots, of operators
    and kernels, and of host syncs.

    An event on the host is assigned to the labels that surround it in time, not to its caller: on a
    GPU, a backward pass runs in a separate thread while its slot waits.
    """
    # By slot, in microseconds.
    calls, total, nested, device = (defaultdict[str, float](float) for _ in range(4))
    spent: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    """By device and operator."""
    sync_counts: Counter[tuple[str, str]] = Counter()
    """Syncs by name and slot."""
    running: list[tuple[str, float]] = []
    """Slots with their end, the innermost last."""
    for event in sorted(
        events, key=lambda event: (event.time_range.start, -event.time_range.end)
    ):
        duration = event.time_range.elapsed_us()
        slot = event.name.removeprefix(_LABEL)
        if (
            event.device_type == DeviceType.CUDA
            and slot == event.name
            and not event.is_user_annotation
        ):
            spent["cuda", event.name].append(duration)
        if event.device_type != DeviceType.CPU:
            continue
        # Events are sorted by their start: labels that ended before this event are closed.
        while running and running[-1][1] <= event.time_range.start:
            running.pop()
        if slot != event.name:
            calls[slot] += 1
            total[slot] += duration
            nested[running[-1][0] if running else ""] += duration
            running.append((slot, event.time_range.end))
        if running:
            spent["cpu", event.name if slot == event.name else PYTHON].append(
                event.self_cpu_time_total
            )
            for open_slot in {name for name, _ in running}:
                device[open_slot] += sum(kernel.duration for kernel in event.kernels)
            syncs = [
                kernel.name
                for kernel in event.kernels
                if kernel.name.startswith(TO_HOST)
            ]
            syncs += [event.name] if event.name in SYNCS else []
            sync_counts.update((name, running[-1][0]) for name in syncs)
    total_us = {
        "cpu": nested[""],
        "cuda": sum(
            sum(durations)
            for (device_type, _), durations in spent.items()
            if device_type == "cuda"
        ),
    }
    waits = WAITS if on_gpu else {"aten::_local_scalar_dense"}

    def ms(microseconds: float) -> float:
        return microseconds / 1e3 / updates

    return (
        [
            SlotTime(
                name,
                calls[name] / updates,
                ms(total[name]),
                ms(total[name] - nested[name]),
                ms(device[name]) if on_gpu else None,
            )
            for name in names
        ],
        sorted(
            (
                OperatorTime(
                    name,
                    device_type,
                    len(durations) / updates,
                    ms(sum(durations)),
                    sum(durations) / (total_us[device_type] or 1),
                )
                for (device_type, name), durations in spent.items()
            ),
            key=lambda open_slot: -open_slot.self_ms,
        ),
        sorted(
            (
                HostSync(name, slot, count / updates, name in waits)
                for (name, slot), count in sync_counts.items()
            ),
            key=lambda open_slot: (
                not open_slot.waits,
                -open_slot.calls,
                open_slot.name,
                open_slot.slot,
            ),
        ),
    )


def show(profile: Profile, console: Console) -> None:
    """Prints slots, operators and host syncs, wide or narrow as the terminal is, and where the
    trace is.
    """
    wide = console.width >= _WIDE
    on_cpu = profile.device == "cpu"

    def table(minor: str, rows: Iterable[dict[str, str]]) -> None:
        """Prints rows, on a narrow terminal without the minor column."""
        visible = [
            {name: row[name] for name in row if wide or name != minor} for row in rows
        ]
        if visible:
            print_table(console, visible)

    setting = (
        f"{processor(profile.device, profile.threads)}, batch {profile.batch_size}"
    )
    console.print(
        CleanText(
            f"{profile.recipe}: one update on {setting}: {figure(profile.update_ms, 3)} ms"
        )
    )
    table("calls", _slots(profile))
    for device, title in (
        ("cuda", "kernels on the GPU"),
        ("cpu", "operators on the host"),
    ):
        if operators := [
            entry for entry in profile.operators if entry.device == device
        ]:
            console.print(
                CleanText(f"top {len(operators[:_TOP])} of {len(operators)} {title}")
            )
            table(
                "calls",
                (
                    {
                        "name": entry.name,
                        "calls": f"{entry.calls:g}",
                        "self ms": f"{entry.self_ms:.3f}",
                        "share": f"{entry.share:.1%}",
                    }
                    for entry in operators[:_TOP]
                ),
            )
    effect = " (each would stall a GPU)" if on_cpu else ""
    console.print(CleanText(f"host syncs: {profile.waits:g} per update{effect}"))
    table(
        "counted",
        (
            {
                "name": entry.name,
                "slot": entry.slot,
                "calls": f"{entry.calls:g}",
                "counted": "yes" if entry.waits else "",
            }
            for entry in profile.syncs
        ),
    )
    for line in _remarks(profile):
        console.print(CleanText(line), style="dim")
    print_wrapped(
        f"trace: {profile.trace} (open it in https://ui.perfetto.dev)", console
    )


def _slots(profile: Profile) -> Iterator[dict[str, str]]:
    for slot in profile.slots:
        figures = {
            "calls": f"{slot.calls:g}",
            "self ms": f"{slot.self_ms:.3f}",
            "total ms": f"{slot.total_ms:.3f}",
        }
        figures |= {} if slot.device_ms is None else {"GPU ms": f"{slot.device_ms:.3f}"}
        figures |= {"share": f"{slot.self_ms / profile.slots[0].total_ms:.1%}"}
        yield {
            "slot": slot.name,
            **(figures if slot.calls else dict.fromkeys(figures, "-")),
        }


def _remarks(profile: Profile) -> Iterator[str]:
    yield (
        f"mean over {profile.updates} updates; with the profiler, an update took "
        f"{figure(profile.profiled_update_ms, 3)} ms "
        f"({profile.profiler_overhead:+.0%}), which the tables divide"
    )
    if uncalled := ", ".join(slot.name for slot in profile.slots if not slot.calls):
        yield (
            f"not called by themselves: {uncalled} (compiled or captured with what calls "
            f"them, or replaced)"
        )
    if profile.device != "cpu" and not any(
        operator.device == "cuda" for operator in profile.operators
    ):
        yield (
            "the driver reported no kernels; KINETO_LOG_LEVEL=2 in the environment shows the "
            "reason"
        )
    if not profile.steady:
        yield f"updates were not steady after {profile.warmup_s:.0f} s; --warmup allows more"
