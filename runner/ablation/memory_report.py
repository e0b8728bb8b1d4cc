"""Report of an ablation by memory: tables for a terminal and a page in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from runner.ablation.memory_result import (
    LARGEST_DISAGREEMENT,
    CaseMemory,
    MemoryResult,
    VariantMemory,
)
from runner.ablation.report import Row, print_table
from runner.system.console import CleanText, Console
from runner.system.secrets import redact
from runner.system.synthetic import SYNTHETIC_REMARK
from runner.system.text_lines import amount, print_wrapped, processor
from runner.verify.variants import BASELINE

MIB = 2**20
SMALLEST_MIB = 0.01
"""Smaller sizes are shown as below it."""
_WIDE = 110
_NONE = "-"
_PRODUCT = "product of the stages"
_HOW_TO_READ = """\
**update MiB** is what an update holds at its peak beyond the tensors that exist between updates:
  gradients, activations and temporaries. On a CPU, torch's `MemTracker` counts it on the real
  tensors of the update; on a CUDA device it is the peak of the allocator. **remaining** is its
  share of the baseline's. **saved MiB** is the most that autograd held for backward, counted by
  `saved_tensors_hooks`: every storage once, without parameters, buffers, the batch and its noise.
  A checkpoint keeps the tensors that it computes again itself, so they count in the update memory
  only. **grown MiB** is how much the process grew in the same update by the kernel's count, in a
  process that returns freed memory immediately; it checks the first column. **process MiB** is
  the most that an ordinary process held: it includes Python, torch, the data and what the C
  library keeps, so the effect of a stage on it is small. The largest of several updates counts
  everywhere.

The **product** multiplies what each stage leaves (a stage that requires another one is compared
with that one). Shares are never added. Where *all* is larger than the product, stages save the
same bytes."""


def mib(size: float | None) -> str:
    """Formats bytes in MiB."""
    if size is None:
        return _NONE
    value = size / MIB
    if 0 < value < SMALLEST_MIB:
        return f"< {SMALLEST_MIB}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def percent(share: float) -> str:
    """Formats a share, with more digits where it is close to 1."""
    if not math.isfinite(share):
        return _NONE
    return "100 %" if share == 1 else f"{100 * share:.1f} %"


def show(result: MemoryResult, console: Console) -> None:
    """Prints the table and the remarks of every case, and the folder of the report."""
    for case in result.cases:
        setting = f"{processor(case.device, case.threads)}, batch {case.batch_size}"
        title = f"{case.name or result.name}: memory of one update on {setting}"
        console.print(CleanText(title))
        print_table(console, table(case, console.width >= _WIDE))
        for line in remarks(case):
            console.print(CleanText(line), style="dim")
    print_wrapped(f"report: {result.folder}", console)


def markdown(result: MemoryResult) -> str:
    """Returns the report as a page."""
    machine = ", ".join(f"{name} {value}" for name, value in result.machine.items())
    lines = [f"# {result.name}: memory by stage", "", f"    {result.command}", ""]
    lines += [f"Measured in {result.seconds:.0f} s on: {machine}.", ""]
    if result.interrupted:
        lines += [
            "**The ablation was interrupted; the same command continues it.**",
            "",
        ]
    for case in result.cases:
        lines += [f"## {case.name or result.name}", ""]
        lines += [
            f"Updates of {case.batch_size} samples on {case.device}, "
            f"{amount(case.threads, 'threads')}.",
            "",
        ]
        lines += _markdown_table(table(case, wide=True))
        lines += [*(f"* {line}" for line in remarks(case)), ""]
    return redact("\n".join([*lines, "## How to read this", "", _HOW_TO_READ, ""]))


def table(case: CaseMemory, wide: bool) -> list[Row]:
    """Returns the rows of all variants and of the product."""
    rows: list[Row] = [_row(variant, wide) for variant in case.variants]
    if math.isfinite(case.product):
        row = dict.fromkeys(rows[0], "") | {
            "variant": _PRODUCT,
            "remaining": percent(case.product),
        }
        if wide:
            row["saved remaining"] = percent(case.product_saved)
        rows.append(row)
    return rows


def _row(variant: VariantMemory, wide: bool) -> dict[str, str]:
    memory = variant.memory
    row = {
        "variant": variant.title,
        "update MiB": mib(memory.update),
        "remaining": percent(variant.remaining),
        "saved MiB": mib(memory.saved),
    }
    if wide:
        row["saved remaining"] = percent(variant.remaining_saved)
        row["grown MiB"] = mib(memory.grown)
    row["process MiB"] = mib(variant.process)
    return row


def remarks(case: CaseMemory) -> Iterator[str]:
    """Yields lines below the table."""
    if case.synthetic:
        yield f"data {SYNTHETIC_REMARK}"
    difference = case.disagreement
    if difference is not None:
        yield from _agreement(case, difference)
    # The tracker observes torch's operators only.
    compiled = [item.name for item in case.variants if item.memory.tracked is None]
    if compiled:
        reason = "compiled code allocates past torch's operators"
        yield f"measured by the growth of the process: {', '.join(compiled)}; {reason}"
    groups = (
        ("inactive", case.inactive),
        ("impossible", case.refused),
        ("not measured", case.failed),
    )
    for title, reasons in groups:
        for name, reason in reasons.items():
            last = (reason.strip().splitlines() or [""])[-1]
            yield f"{title}: {name}: {last}"
    notes = [note for variant in case.variants for note in variant.notes]
    yield from dict.fromkeys(notes)


def _agreement(case: CaseMemory, difference: float) -> Iterator[str]:
    """Yields how well the tracker and the kernel agree."""
    baseline = case.named(BASELINE)
    assert baseline is not None
    figures = f"{mib(baseline.memory.tracked)} and {mib(baseline.memory.grown)} MiB"
    text = f"tracker and growth of the process: {figures} in the baseline"
    yield f"{text}; they differ by at most {difference:.1%}"
    if difference > LARGEST_DISAGREEMENT:
        yield (
            f"they differ by more than {LARGEST_DISAGREEMENT:.0%}: the updates are small "
            f"compared with a page of "
            "memory, or an operator has internal buffers"
        )


def _markdown_table(rows: Sequence[Row]) -> list[str]:
    head = f"| {' | '.join(rows[0])} |"
    rule = f"|---|{'---:|' * (len(rows[0]) - 1)}"
    return [head, rule, *(f"| {' | '.join(row.values())} |" for row in rows), ""]
