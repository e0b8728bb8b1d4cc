"""The report of what stages for inference are worth: on a terminal, as Markdown, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from runner.compare.ratio import Effect
from runner.recipe.rendering import render
from runner.system.console import CleanText, Console
from runner.system.files import write_durably
from runner.system.lines import figure, print_wrapped
from runner.system.plots import BLACK, BLUE, GREY, NO_PLOTS, VERMILLION, draw_all, legend
from runner.system.secrets import redact

if TYPE_CHECKING:
    from runner.inference.ablate import Answering, InferenceResult

REPORT = "README.md"
_WIDE = 130  # columns from which on a terminal shows intervals
_LOGARITHMIC = 4.0  # a ratio from which on others would be drawn too close to one
_MARKS = {Effect.FASTER: (BLUE, ">"), Effect.SLOWER: (VERMILLION, "<"), Effect.UNCLEAR: (GREY, "o"),
          Effect.INVALID: (BLACK, "x")}  # fmt: skip
_HOW_TO_READ = """\
**x** is the time of one answer of the model without stages over that with them, for a request alone and for sixteen
together: above 1 is faster. Both were timed in turns, in one process; the interval is that of rounds (bootstrap, 95 %),
and does not know that others which do the same may be a few percent faster or slower. The first row is the model
against itself. **MB** are those of the weights in a file, or of the program that answers in their place; **in memory**
a program stands beside the network, which answers what the program cannot."""


def show(result: InferenceResult, console: Console) -> None:
    """Prints one row for each set of stages."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rows = list(_rows(result, intervals=console.width >= _WIDE))
    for name in rows[0]:
        is_word = name in ("variant", "verdict")
        table.add_column(name, justify="left" if is_word else "right", overflow="fold", no_wrap=is_word)
    for row in rows:
        table.add_row(*map(CleanText, row.values()))
    console.print(table)
    for line in _caught(result):
        print_wrapped(line, console)
    for kind, reason in result.inactive.items():
        print_wrapped(f"{kind}: inactive, {reason}", console)
    print_wrapped(f"{result.recipe}, on the model of {result.run}: {result.seconds:.0f} s", console)
    print_wrapped(f"report: {result.folder / REPORT}", console)


def write(result: InferenceResult) -> None:
    """Leaves the report and its picture in the result's folder."""
    pictures = draw_all({"ratios": (partial(_ratios, result), (6.4, 1.2 + 0.35 * len(result.rows)))}, result.folder)
    rows = list(_rows(result))
    head = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    machine = ", ".join(f"{name} {value}" for name, value in result.machine.items())
    lines = [
        f"# What stages are worth for {result.recipe}, once it is trained",
        "",
        f"`runner ablate` of a recipe with this section, in {result.seconds:.0f} s on: {machine}. Load average when it "
        f"began: {result.load:.1f}.",
        "",
        "```yaml",
        *render({"inference": result.stages}),
        "```",
        "",
        *head,
        *("| " + " | ".join(row.values()) + " |" for row in rows),
        "",
        *(f"* {row.name}: {redact(row.verdict.summary)}" for row in result.rows if row.verdict is not None),
        *(f"* {line}" for line in _caught(result)),
        *(f"* `{kind}` is inactive: {redact(reason)}" for kind, reason in result.inactive.items()),
        "",
        *(f"![{each.name}]({each.name})" for each in pictures),
        *([] if pictures else [NO_PLOTS]),
        "",
        _HOW_TO_READ,
        "",
    ]
    write_durably(result.folder / REPORT, "\n".join(lines))


def _caught(result: InferenceResult) -> Iterator[str]:
    """What the clock caught, by set of stages and size of the batch."""
    for row in result.rows:
        for size, timing in row.timings.items():
            if timing.caught:
                yield f"{row.name}, batches of {size}: {timing}"


def _rows(result: InferenceResult, intervals: bool = True) -> Iterator[Mapping[str, str]]:
    valued = any(row.value is not None for row in result.rows)
    for row in result.rows:
        times: dict[str, str] = {}
        for size, timing in row.timings.items():
            shown = str(timing.ratio) if intervals or timing.caught else f"{timing.ratio.value:.3g}x"
            times |= {f"ms, {size}": figure(timing.changed_ms), f"x, {size}": shown}
        yield {
            "variant": row.name,
            **times,
            **({"a second": figure(row.throughput)} if intervals else {}),
            "MB": f"{row.bytes / 1e6:.2f}",
            **({"in memory": f"{row.bytes_in_memory / 1e6:.2f}"} if intervals else {}),
            **({result.metric or "": "-" if row.value is None else figure(row.value)} if valued else {}),
            "verdict": "-" if row.verdict is None else str(row.verdict.outcome),
        }


def _ratios(result: InferenceResult, canvas: Any) -> None:
    """The ratio of every set of stages with its interval, a panel for each size of a batch."""
    rows: Sequence[Answering] = result.rows
    panels = canvas.subplots(1, len(result.baseline.timings), sharey=True, squeeze=False)[0]
    for axes, size in zip(panels, result.baseline.timings, strict=True):
        axes.axvline(1, color=BLACK, linewidth=0.8)
        for place, row in enumerate(rows):
            timing = row.timings[size]
            ratio, (colour, mark) = timing.ratio, _MARKS[timing.effect]
            axes.plot([ratio.low, ratio.high], [place, place], color=colour, linewidth=2.5, solid_capstyle="butt")
            axes.plot(ratio.value, place, mark, color=colour, markersize=5, label=str(timing.effect))
        if max(row.timings[size].ratio.high for row in rows) > _LOGARITHMIC:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(f"times as fast, {'one request' if size == 1 else f'{size} together'}")
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
    legend(canvas)
