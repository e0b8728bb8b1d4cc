"""Where the time of an update goes, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from runner.measure.profile import OperatorTime, Profile, SlotTime

_WIDE = 100
"""Columns from which on a terminal shows all figures."""
_TOP = 15
"""Operators that are shown; ``--json`` has all of them."""


def show(profile: Profile, console: Console) -> None:
    """Prints slots, operators and host syncs, wide or narrow as the terminal is, and where the trace is."""
    wide = console.width >= _WIDE
    _slots(profile, wide, console)
    for device, title in (("cuda", "kernels on the GPU"), ("cpu", "operators on the host")):
        rows = [operator for operator in profile.operators if operator.device == device]
        if rows:
            _operators(rows, title, wide, console)
    _syncs(profile, wide, console)
    for line in _remarks(profile):
        console.print(Text(line), style="dim")
    console.print(Text(f"trace: {profile.trace} (open it in https://ui.perfetto.dev)"), soft_wrap=True)


def _slots(profile: Profile, wide: bool, console: Console) -> None:
    on_gpu = any(slot.device_ms is not None for slot in profile.slots)
    title = (
        f"{profile.recipe}: one update on {profile.device}, {profile.threads} threads, batch {profile.batch_size}: "
        f"{profile.update_ms:.3g} ms"
    )
    figures = ["calls", "self ms", "total ms"] if wide else ["self ms", "total ms"]
    console.print(Text(title))
    table = _table("slot", [*figures, *(["GPU ms"] if on_gpu else []), "share"])
    whole = profile.slots[0].total_ms
    for slot in profile.slots:
        cells = _slot(slot, whole)
        table.add_row(Text(slot.name), *(cells[str(column.header)] for column in table.columns[1:]))
    console.print(table)


def _slot(slot: SlotTime, whole: float) -> dict[str, str]:
    if not slot.calls:
        return dict.fromkeys(("calls", "self ms", "total ms", "GPU ms", "share"), "-")
    return {
        "calls": f"{slot.calls:g}",
        "self ms": f"{slot.self_ms:.3f}",
        "total ms": f"{slot.total_ms:.3f}",
        "GPU ms": "-" if slot.device_ms is None else f"{slot.device_ms:.3f}",
        "share": f"{slot.self_ms / whole:.1%}",
    }


def _operators(rows: Sequence[OperatorTime], title: str, wide: bool, console: Console) -> None:
    shown = rows[:_TOP]
    console.print(Text(f"top {len(shown)} of {len(rows)} {title}"))
    table = _table("name", ["calls", "self ms", "share"][not wide :])
    for row in shown:
        cells = [f"{row.calls:g}", f"{row.self_ms:.3f}", f"{row.share:.1%}"]
        table.add_row(Text(row.name), *cells[not wide :])
    console.print(table)


def _syncs(profile: Profile, wide: bool, console: Console) -> None:
    on_cpu = profile.device == "cpu"
    what = "values read by the host, which would wait if they were on a GPU" if on_cpu else "host syncs"
    console.print(Text(f"{what}: {profile.waits:g} in one update"))
    if profile.syncs:
        table = _table("name", ["slot", "calls", "counted"][: 3 if wide else 2])
        for sync in profile.syncs:
            cells = [sync.slot, f"{sync.calls:g}", "yes" if sync.waits else ""]
            table.add_row(Text(sync.name), *cells[: len(table.columns) - 1])
        console.print(table)


def _remarks(profile: Profile) -> list[str]:
    uncalled = [slot.name for slot in profile.slots if not slot.calls]
    remarks = [
        f"mean over {profile.updates} updates; with the profiler, an update took {profile.profiled_update_ms:.3g} ms "
        f"({profile.profiler_overhead:+.0%}), and the tables say where those went"
    ]
    if uncalled:
        remarks.append(
            f"not called by themselves: {', '.join(uncalled)} (compiled or captured with what calls them, or replaced)"
        )
    if profile.device != "cpu" and not any(operator.device == "cuda" for operator in profile.operators):
        remarks.append("the driver told nothing about kernels; KINETO_LOG_LEVEL=2 in the environment shows why")
    if not profile.steady:
        remarks.append(f"updates were not steady after {profile.warmup_s:.0f} s; --warmup allows more")
    return remarks


def _table(first: str, figures: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in figures:
        table.add_column(name, justify="left" if name in ("slot", "counted") else "right", no_wrap=True)
    return table
