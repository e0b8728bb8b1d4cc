"""Report of an ablation of inference stages: on a terminal, as Markdown, and as a plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from runner.proof.ratios import Effect, noise_factor
from runner.recipe.rendering import render
from runner.system.console import CleanText, Console
from runner.system.files import write_durably
from runner.system.plots import (
    BLACK,
    BLUE,
    GREY,
    NO_PLOTS,
    VERDICT_MARKERS,
    VERMILLION,
    draw_all,
    legend,
)
from runner.system.secrets import redact
from runner.system.synthetic import SYNTHETIC_REMARK
from runner.system.text_lines import figure, print_wrapped

if TYPE_CHECKING:
    from runner.ablation.inference_ablation import Answering, InferenceResult

REPORT = "README.md"
_WIDE = 130
"""Columns from which on a terminal shows intervals."""
# A linear scale would draw smaller ratios too close to 1.
_LOGARITHMIC = 4.0
_MARGIN = 1.1
"""Factor of the scale around the intervals."""
_MARKS = {
    Effect.FASTER: (BLUE, ">"),
    Effect.SLOWER: (VERMILLION, "<"),
    Effect.UNCLEAR: (GREY, "o"),
    Effect.INVALID: (BLACK, "x"),
}
_HOW_TO_READ = """\
**x** is the time of one answer of the model without stages divided by the time with them, for a
single request and for sixteen together: above 1 is faster. Both were timed alternately in one
process. The interval is that of rounds (bootstrap, 95 %); it does not contain the difference of
a few percent between identical processes. The first row is the model against itself. **MB** is
the size of the weights in a file, or of the program that replaces them. **in memory** also
counts the network that a program leaves loaded for requests that the program cannot answer."""


def show(result: InferenceResult, console: Console) -> None:
    """Prints one row for each set of stages."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rows = list(_rows(result, intervals=console.width >= _WIDE))
    for name in rows[0]:
        is_word = name in ("variant", "verdict")
        table.add_column(
            name,
            justify="left" if is_word else "right",
            overflow="fold",
            no_wrap=is_word,
        )
    for row in rows:
        table.add_row(*map(CleanText, row.values()))
    console.print(table)
    for line in _remarks(result):
        print_wrapped(line, console)
    for kind, reason in result.inactive.items():
        print_wrapped(f"{kind}: inactive, {reason}", console)
    print_wrapped(
        f"{result.recipe}, on the model of {result.run}: {result.seconds:.0f} s",
        console,
    )
    print_wrapped(f"report: {result.folder / REPORT}", console)


def write(result: InferenceResult) -> None:
    """Writes the report and its plot to the result's folder."""
    panels = len(result.baseline.timings) + any(
        row.value is not None for row in result.rows
    )
    size = 1.5 + 2.6 * panels, 1.7 + 0.4 * len(result.rows)
    pictures = draw_all({"ratios": (partial(_plots, result), size)}, result.folder)
    rows = list(_rows(result))
    head = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    machine = ", ".join(f"{name} {value}" for name, value in result.machine.items())
    lines = [
        f"# What every inference stage is worth: {result.recipe}",
        "",
        f"`runner ablate` of a recipe with this section, in {result.seconds:.0f} s on: "
        f"{machine}. Load average at the "
        f"start: {result.load:.1f}.",
        "",
        *(
            f"![Speed-up and quality of the model with every set of stages]({path.name})"
            for path in pictures
        ),
        *([] if pictures else [NO_PLOTS]),
        "",
        "```yaml",
        *render({"inference": result.stages}),
        "```",
        "",
        *head,
        *("| " + " | ".join(row.values()) + " |" for row in rows),
        "",
        *(
            f"* {row.name}: {redact(row.verdict.summary)}"
            for row in result.rows
            if row.verdict is not None
        ),
        *(f"* {line}" for line in _remarks(result)),
        *(
            f"* `{kind}` is inactive: {redact(reason)}"
            for kind, reason in result.inactive.items()
        ),
        "",
        _HOW_TO_READ,
        "",
    ]
    write_durably(result.folder / REPORT, "\n".join(lines))


def _remarks(result: InferenceResult) -> Iterator[str]:
    """Yields lines about the data, and about what the clock caught."""
    if result.synthetic:
        yield f"data {SYNTHETIC_REMARK}"
    for row in result.rows:
        for size, timing in row.timings.items():
            if timing.caught:
                yield f"{row.name}, batches of {size}: {timing}"


def _rows(
    result: InferenceResult, intervals: bool = True
) -> Iterator[Mapping[str, str]]:
    valued = any(row.value is not None for row in result.rows)
    for row in result.rows:
        times: dict[str, str] = {}
        for size, timing in row.timings.items():
            ratio = (
                str(timing.ratio)
                if intervals or timing.caught
                else f"{timing.ratio.value:.3g}x"
            )
            times |= {f"ms, {size}": figure(timing.changed_ms), f"x, {size}": ratio}
        yield {
            "variant": row.name,
            **times,
            **({"a second": figure(row.throughput)} if intervals else {}),
            "MB": f"{row.bytes / 1e6:.2f}",
            **({"in memory": f"{row.bytes_in_memory / 1e6:.2f}"} if intervals else {}),
            **(
                {result.metric or "": "-" if row.value is None else figure(row.value)}
                if valued
                else {}
            ),
            "verdict": "-" if row.verdict is None else str(row.verdict.outcome),
        }


def _plots(result: InferenceResult, canvas: Any) -> None:
    """Draws a panel with ratios for each batch size, on one scale, and a panel with the model's
    quality.
    """
    rows: Sequence[Answering] = result.rows
    sizes = list(result.baseline.timings)
    has_quality = any(row.value is not None for row in rows)
    panels = canvas.subplots(1, len(sizes) + has_quality, sharey=True, squeeze=False)[0]
    canvas.suptitle(f"{result.recipe}: model with stages against the model without")

    timings = [
        row.timings[size]
        for row in rows
        for size in sizes
        if not row.timings[size].caught
    ]
    # Ratios of different work are not drawn, and must not stretch the scale.
    highest = max((timing.ratio.high for timing in timings), default=1.0)
    lowest = min((timing.ratio.low for timing in timings), default=1.0)
    for axes, size in zip(panels, sizes, strict=False):
        _draw_ratios(axes, rows, size)
        # Panels share the scale, so that a bar of one can be compared with a bar of another.
        if highest > _LOGARITHMIC:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlim(min(lowest, 1.0) / _MARGIN, max(highest, 1.0) * _MARGIN)
    if has_quality:
        _draw_quality(panels[-1], result)
    panels[0].set_yticks(range(len(rows)), [row.name for row in rows])
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    legend(canvas)


def _draw_ratios(axes: Any, rows: Sequence[Answering], size: int) -> None:
    """Draws the ratio of every set of stages with its interval, its value, and the band of the
    noise.
    """
    axes.set_title("one request" if size == 1 else f"{size} requests together")
    axes.set_xlabel("speed-up (bar: 95 % interval)")
    axes.axvline(1, color=BLACK, linewidth=0.8)
    for position, row in enumerate(rows):
        timing = row.timings[size]
        # The bar of a ratio of different work would look like a result.
        if timing.caught:
            axes.text(1, position, "not the same work", fontsize=7, va="center")
            continue
        band = noise_factor(timing.a_a)
        axes.barh(
            position,
            band - 1 / band,
            left=1 / band,
            height=0.9,
            color="#dddddd",
            zorder=0,
            label="noise (A/A)",
        )
        ratio = timing.ratio
        colour, mark = _MARKS[timing.effect]
        axes.plot(
            [ratio.low, ratio.high],
            [position, position],
            color=colour,
            linewidth=2.5,
            solid_capstyle="butt",
        )
        axes.plot(
            ratio.value,
            position,
            mark,
            color=colour,
            markersize=5,
            label=str(timing.effect),
        )
        text = {
            "textcoords": "offset points",
            "ha": "center",
            "va": "bottom",
            "fontsize": 7,
        }
        axes.annotate(f"{ratio.value:.2f}", (ratio.value, position), (0, 4), **text)


def _draw_quality(axes: Any, result: InferenceResult) -> None:
    """Draws the objective of every set of stages."""
    axes.set_title("quality")
    axes.set_xlabel(result.metric or "objective")
    axes.margins(x=0.3)
    for position, row in enumerate(result.rows):
        if row.value is None:
            continue
        outcome = None if row.verdict is None else row.verdict.outcome
        label, marker = VERDICT_MARKERS[outcome]
        axes.plot(
            row.value,
            position,
            linestyle="none",
            color=BLACK,
            label=label,
            **({"markersize": 6} | marker),
        )
        text = {
            "textcoords": "offset points",
            "ha": "center",
            "va": "bottom",
            "fontsize": 7,
        }
        axes.annotate(figure(row.value), (row.value, position), (0, 4), **text)
