"""Where the time of an update goes, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from runner.measure.profile import Profile

_WIDE = 100
"""Columns from which on a terminal shows all figures."""
_TOP = 15
"""Operators that are shown; ``--json`` has all of them."""


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
