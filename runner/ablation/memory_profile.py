"""Profile of an update's memory: slots and modules at the peak, and a plot over the update."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from runner.ablation.memory import MemoryMeter
from runner.ablation.memory_report import MIB, mib, percent
from runner.ablation.memory_result import share
from runner.ablation.report import print_table
from runner.ablation.saved_tensors import SavedTensors
from runner.ablation.tracked_update import MemoryPeak, MemorySample
from runner.plugin.registry import Registry
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.console import CleanText, Console
from runner.system.errors import StorageError, UsageError
from runner.system.files import make_folder, write_text
from runner.system.plots import (
    BLACK,
    GREY,
    NO_PLOTS,
    colours_by_name,
    draw_all,
    legend,
)
from runner.system.text_lines import print_wrapped, processor
from runner.tracking.workspace import Workspace, folder_name
from runner.training.budget import fitted
from runner.training.pipeline import assemble

PLOT = "memory"
FIGURES = "memory.json"
ROWS = 12
"""Most slots and modules in the table; ``--json`` has all of them."""
SMALLEST_SHARE = 0.001
"""Share of the peak, or of the bytes held for backward, below which a table has no row."""
LONGEST_TIMELINE = 2000
_WIDTH = 7.0
_COLOURED_SLOTS = 6
_OTHERS = "other slots"
_HEIGHT = 3.2


@dataclass(frozen=True)
class Held:
    """Bytes of one slot and module at the peak.

    Attributes:
        slot: The slot that allocated it, or saved it for backward.
        module: The module that was running.
        bytes: Bytes at the peak of the update.
        saved: Bytes when most is held for backward, which may be another moment.
    """

    slot: str
    module: str
    bytes: int
    saved: int


@dataclass(frozen=True)
class MemoryProfile:
    """Memory of the largest of several updates.

    Attributes:
        recipe: Name of the recipe.
        device: Device of the update.
        threads: Number of threads.
        batch_size: Samples of a batch.
        updates: Number of updates that were tracked.
        update: Bytes that the update holds at its peak beyond the state.
        saved: Largest number of bytes held for backward.
        state: Bytes of all tensors between two updates, without gradients.
        slot: The slot that was running at the peak.
        kinds: Bytes at the peak by kind.
        held: Bytes at the peak by slot and module, the largest first.
        timeline: Seconds and bytes over the update, with the running slot.
        folder: Place of the plot and the figures.
        plots: Files of the plots; none without matplotlib.
    """

    recipe: str
    device: str
    threads: int
    batch_size: int
    updates: int
    update: int
    saved: int
    state: int
    slot: str
    kinds: Mapping[str, int]
    held: Sequence[Held]
    timeline: Sequence[MemorySample]
    folder: Path
    plots: Sequence[Path]

    def data(self) -> dict[str, Any]:
        """Returns the object that ``--json`` prints."""
        paths = {
            "folder": str(self.folder),
            "plots": [str(path) for path in self.plots],
        }
        data = asdict(self) | paths
        data.pop("timeline")
        return data | {"timeline": str(self.folder / FIGURES)}


def profile_memory(
    recipe: Recipe,
    registry: Registry,
    workspace: Workspace,
    out: Path | None,
    updates: int,
) -> MemoryProfile:
    """Tracks the memory of a few updates and leaves a plot and the figures of the largest one.

    Args:
        recipe: The resolved recipe.
        registry: Where plugins come from.
        workspace: Place of the folder, unless ``out`` is given.
        out: The user's folder.
        updates: Number of updates to track.

    Raises:
        UsageError: A stage compiles code, which the tracker cannot see, or the folder is in use.
        StorageError: The folder cannot be written.
    """
    recipe = fitted(recipe, registry)
    generators.seed(recipe.seed)
    pipeline = assemble(recipe, registry.files)
    _refuse_compiled([kind for kind in pipeline.stages if recipe.stages[kind].traces])
    name = f"{folder_name(recipe.name)}-memory-{uuid.uuid4().hex[:8]}"
    folder = out or workspace.root / "profiles" / name
    if (folder / FIGURES).exists():
        raise UsageError(
            f"{folder} holds a {FIGURES} already; name another folder with --out"
        )
    try:
        # An error of the folder is worth reporting before anything is measured.
        make_folder(folder)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _unwritten(folder, error) from error
    meter = MemoryMeter(pipeline, updates)
    meter.warm_up()
    peaks = [meter.tracked(batch) for batch in meter.batches]
    largest = max(range(len(peaks)), key=lambda number: peaks[number].update)
    peak = peaks[largest]
    saved = meter.saved(meter.batches[largest])
    timeline = thinned(peak.samples)
    return MemoryProfile(
        recipe=recipe.name,
        device=str(pipeline.device),
        threads=torch.get_num_threads(),
        batch_size=pipeline.batch_size,
        updates=len(peaks),
        update=peak.update,
        saved=saved.peak,
        state=peak.resident,
        slot=peak.slot,
        # asdict copies a Counter wrongly.
        kinds={kind.value: size for kind, size in peak.kinds.items()},
        held=_held(peak, saved),
        timeline=timeline,
        folder=folder,
        plots=_write(recipe.name, peak, timeline, folder),
    )


def _held(peak: MemoryPeak, saved: SavedTensors) -> list[Held]:
    """Returns the slots and modules of both measurements, the largest first."""
    held = []
    for holder in peak.holders.keys() | saved.peak_holders.keys():
        sizes = (peak.holders.get(holder, 0), saved.peak_holders[holder])
        held.append(Held(*holder, *sizes))
    return sorted(
        held, key=lambda item: (-item.bytes, -item.saved, item.slot, item.module)
    )


def _write(
    title: str, peak: MemoryPeak, timeline: Sequence[MemorySample], folder: Path
) -> Sequence[Path]:
    """Writes the figures and the plot, and returns the plots."""
    figures = [[sample.seconds, sample.bytes, sample.slot] for sample in timeline]
    try:
        write_text(
            folder / FIGURES, json.dumps({"seconds, bytes, slot": figures}) + "\n"
        )
        picture = partial(_draw, title, peak, timeline)
        return draw_all({PLOT: (picture, (_WIDTH, _HEIGHT))}, folder)
    except OSError as error:
        raise _unwritten(folder, error) from error


def _unwritten(folder: Path, error: OSError) -> StorageError:
    hint = "free some space, or name another folder with --out"
    return StorageError(f"{folder}: {error.strerror}; {hint}")


def _refuse_compiled(kinds: Sequence[str]) -> None:
    if kinds:
        names = " and ".join(kinds)
        switches = " ".join(f"optimization.{kind}=off" for kind in kinds)
        raise UsageError(
            f"{names}: compiled code allocates past torch's operators, so nothing can be "
            f"attributed; profile without it ({switches}), or measure the total with "
            "runner ablate --metric memory"
        )


def thinned(samples: Sequence[MemorySample]) -> Sequence[MemorySample]:
    """Returns at most ``LONGEST_TIMELINE`` samples: of neighbours, the one with the most bytes."""
    # The highest sample of every group keeps the peak visible.
    size = -(-len(samples) // LONGEST_TIMELINE)
    groups = (
        samples[start : start + size] for start in range(0, len(samples), max(1, size))
    )
    return [max(group, key=lambda sample: sample.bytes) for group in groups]


def show(profile: MemoryProfile, console: Console) -> None:
    """Prints the peak, its slots and modules, and the path of the plot."""
    setting = (
        f"{processor(profile.device, profile.threads)}, batch {profile.batch_size}"
    )
    text = f"{profile.recipe}: one update on {setting} holds {mib(profile.update)} MiB at its peak"
    console.print(CleanText(text))
    console.print(CleanText(f"the peak is in {profile.slot}"))
    saved = f"held for backward: {mib(profile.saved)} MiB at most"
    console.print(CleanText(f"{saved}; between updates: {mib(profile.state)} MiB"))
    print_table(console, [*_slot_rows(profile)])
    print_table(console, [*_module_rows(profile)])
    for line in _remarks(profile):
        console.print(CleanText(line), style="dim")
    for plot in profile.plots:
        print_wrapped(f"plot: {plot}", console)
    print_wrapped(f"figures: {profile.folder / FIGURES}", console)


def _slot_rows(profile: MemoryProfile) -> Iterator[dict[str, str]]:
    """Yields a row for every slot, the largest first."""
    totals: dict[str, Held] = {}
    for item in profile.held:
        sum_so_far = totals.get(item.slot, Held(item.slot, "", 0, 0))
        size = sum_so_far.bytes + item.bytes
        totals[item.slot] = Held(item.slot, "", size, sum_so_far.saved + item.saved)
    for item in sorted(totals.values(), key=lambda total: -total.bytes):
        if _is_shown(item, profile):
            yield {"slot": item.slot, **_figures(item, profile)}


def _module_rows(profile: MemoryProfile) -> Iterator[dict[str, str]]:
    for item in _shown(profile):
        yield {"slot": item.slot, "name": item.module, **_figures(item, profile)}


def _shown(profile: MemoryProfile) -> list[Held]:
    """Returns the modules that have a row."""
    return [item for item in profile.held if _is_shown(item, profile)][:ROWS]


def _is_shown(item: Held, profile: MemoryProfile) -> bool:
    """Returns whether a slot or module has enough memory for a row."""
    largest = max(share(item.bytes, profile.update), share(item.saved, profile.saved))
    return largest >= SMALLEST_SHARE


def _figures(item: Held, profile: MemoryProfile) -> dict[str, str]:
    attributed = sum(holder.bytes for holder in profile.held)
    return {
        "MiB": mib(item.bytes),
        "share": percent(share(item.bytes, attributed)),
        "saved MiB": mib(item.saved),
    }


def _remarks(profile: MemoryProfile) -> Iterator[str]:
    kinds = (f"{name} {mib(size)}" for name, size in profile.kinds.items())
    yield f"all tensors at the peak in MiB: {', '.join(kinds)}"
    hidden = len(profile.held) - len(_shown(profile))
    if hidden:
        yield f"{hidden} more pairs of slot and module are in the output of --json"
    yield f"the largest of {profile.updates} updates; tracking slows them, so no time is shown"
    if not profile.plots:
        yield NO_PLOTS


def _largest_slots(timeline: Sequence[MemorySample]) -> list[str]:
    """Returns the slots in which the most memory was held, in the order of the update."""
    sizes: dict[str, int] = {}
    for sample in timeline:
        sizes[sample.slot] = max(sample.bytes, sizes.get(sample.slot, 0))
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:_COLOURED_SLOTS]
    return [slot for slot in sizes if slot in largest]


def _draw(
    title: str, peak: MemoryPeak, timeline: Sequence[MemorySample], canvas: Any
) -> None:
    """Draws update memory over the course of the update, coloured by slot."""
    axes = canvas.subplots()
    end = timeline[-1].seconds or 1.0
    coloured = _largest_slots(timeline)
    colours = {**colours_by_name(coloured), _OTHERS: GREY}
    position = 0
    for slot, group in groupby(
        timeline, key=lambda sample: sample.slot if sample.slot in coloured else _OTHERS
    ):
        samples = [*group]
        # The area reaches the first sample of the next slot.
        area = timeline[position : position + len(samples) + 1]
        position += len(samples)
        times = [100 * sample.seconds / end for sample in area]
        sizes = [sample.bytes / MIB for sample in area]
        axes.fill_between(
            times, sizes, step="post", color=colours[slot], alpha=0.75, lw=0, label=slot
        )
    top = max(timeline, key=lambda sample: sample.bytes)
    height = top.bytes / MIB
    axes.plot([100 * top.seconds / end], [height], "v", color=BLACK, ms=5, label="peak")
    alignment = "left" if top.seconds < end / 2 else "right"
    axes.annotate(
        f"{mib(peak.update)} MiB in {peak.slot}",
        (100 * top.seconds / end, height),
        xytext=(0, 5),
        textcoords="offset points",
        ha=alignment,
        fontsize=8,
    )
    axes.set(
        title=f"{title}: memory of one update",
        xlabel="course of the update (% of the tracked time)",
        ylabel="MiB beyond the state",
        xlim=(0, 100),
    )
    axes.set_ylim(
        bottom=min(0, *(sample.bytes / MIB for sample in timeline)),
        top=1.15 * height or 1,
    )
    legend(canvas)
