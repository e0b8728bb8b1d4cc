"""What an ablation has come to: tables for a terminal, a report in Markdown, its pictures, and the recipe to use."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import cycle
from operator import getitem
from pathlib import Path
from typing import Any

from rich import box
from rich.measure import Measurement
from rich.table import Table

from runner.compare.ratio import Ratio
from runner.compare.verdict import Outcome
from runner.measure.analysis import CaseResult, Result
from runner.measure.experiment import Case
from runner.measure.recommend import Recommendation
from runner.recipe.document import dump_inline
from runner.recipe.loader import shipped
from runner.recipe.rendering import render
from runner.system.console import CleanText, Console
from runner.system.files import write_text
from runner.system.hardware import cpu_model
from runner.system.lines import print_wrapped
from runner.system.plots import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    NO_PLOTS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    draw_all,
    legend,
)
from runner.system.secrets import MASK, redact
from runner.verify.variants import ALL

_ENDLESS = 10_000
_WIDE = 160  # columns from which on a terminal shows all figures
_SHOWN = 3  # sets of stages that are faster but unproven
_NONE = "-"
_WORDS = frozenset({"variant", "effect", "verdict", "name", "slot", "counted"})  # columns that are no numbers
_COLOURS = {"draw": ORANGE, "transfer": GREEN, "update": BLUE, "other": GREY}
_SOURCE_COLOURS = (VERMILLION, PURPLE, SKY)  # for what a source does apart
_EFFECT_MARKS = {"faster": (BLUE, ">"), "slower": (VERMILLION, "<"), "unclear": (GREY, "o"), "invalid": (BLACK, "x")}
_VISIBLE = 0.002  # the share of a bar that is a dot wide
_INCH_A_ROW = 0.32
_HOW_TO_READ = """\
**ratio** is the baseline's time of one update over the variant's: above 1 is faster; **training** is the same of whole
training steps, with sampling and transfer, and it is what the recommendation rests on. No update gets a batch that
another one has had. After the timed updates, a few more are compared with the baseline's from the same state: a variant
that skips some, or returns earlier results, has no ratio and is *invalid*. Every variant was measured in
several processes, one after the other, for two that do the same differ as long as they live; the ratio is the mean of
their medians, with Student's 95 % interval over processes. **effect** is unclear where the interval holds 1, or
where the effect is no larger than that of the baseline against itself (A/A); one in twenty variants that do nothing is
called faster or slower all the same. A stage that selects by measuring (a batch size, algorithms, kernels) searches
again in every one of these processes, without what another process has selected or compiled, so that the interval
includes the luck of its choices. **compile** is the first update, with nothing compiled yet, **warm-up** what
follows until it is steady, **break-even** the number of updates after which the start-up has paid. **limit** is the
share of the limit's speed that is reached. **verdict** is the gate's answer to whether the stages are harmless. *All
but* a stage is also without what requires it, and a stage *alone* comes with what it requires."""
Row = Mapping[str, str]  # of a table: texts by column


def print_table(console: Console, rows: Sequence[Row], title: str = "", narrowest: int | None = None) -> None:
    """Prints rows, the first column no narrower than told; then others fold."""
    table = Table(title=CleanText(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="left" if name in _WORDS else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(CleanText, row.values()))
    if narrowest is not None:  # a least width would be kept by cutting off what is on the right
        too_wide = Measurement.get(console, console.options.update_width(_ENDLESS), table).maximum - console.width
        table.columns[0].width = max(narrowest, max(len(next(iter(row.values()))) for row in rows) - max(0, too_wide))
    console.print(table)


def show(result: Result, console: Console) -> None:
    """Prints the table of every case, wide or narrow as the terminal is, what it means, and where to find it."""
    for case in result.cases:
        title = f"{case.name or 'ablation'}: one update on {case.device}, {case.threads} threads"
        longest_word = max(len(word) for variant in case.variants for word in variant.title.split())
        rows = _variants(case, console.width >= _WIDE)
        print_table(console, rows, f"{title}, batch {case.batch_size}", longest_word)
        for line in _remarks(case):
            console.print(CleanText(line), style="dim")
    if result.slope is not None:
        console.print(CleanText(_slope(result.slope)))
    for recommendation in result.recommendations:
        console.print(CleanText(str(recommendation)), style="bold")
        for each in recommendation.unproven[:_SHOWN]:
            console.print(CleanText(f"{each}; to prove it:"))
            print_wrapped(f"    {each.command}", console, hang=2)
        if len(recommendation.unproven) > _SHOWN:
            console.print(CleanText(f"{len(recommendation.unproven) - _SHOWN} more of them are in the report"))
    print_wrapped(f"report: {result.folder}", console)


def markdown(result: Result, plots: Sequence[str]) -> str:
    """The report, which shows the pictures of these names beside it."""
    machine = ", ".join(f"{name} {value}" for name, value in result.machine.items())
    lines = [
        f"# {result.name}: what every stage is worth", "",
        f"    {result.command}", "",
        f"Measured in {result.seconds:.0f} s on: {machine}. Load average when it began: {result.load:.1f}.", "",
    ]  # fmt: skip
    if result.interrupted:
        lines += ["**It was interrupted; the same command goes on with it.**", ""]
    stages = {variant.title: variant.stages for case in result.cases for variant in case.variants}
    lines += _table([{"variant": name, "stages": ", ".join(own) or "none"} for name, own in stages.items()])
    for case in result.cases:
        lines += [f"## {case.name or result.name}", "", *_case(case, result.published_by), ""]
    if result.slope is not None:
        lines += ["## From case to case", "", _slope(result.slope), ""]
    lines += ["## Recommendation", ""]
    for each in result.recommendations:
        lines += [str(each), "", *(f"* `{kind}` off: {reason}" for kind, reason in each.reasons.items()), ""]
        for other in each.unproven:
            lines += [f"{other}. To prove it:", "", f"    {other.command}", ""]
    lines += [f"![{name}]({name})" for name in plots] or [NO_PLOTS]
    return redact("\n".join([*lines, "", "## How to read this", "", _HOW_TO_READ, ""]))


def summary(result: Result) -> str:
    """The report in short, for a page that shows it beside the measurements."""
    lines = []
    for case in result.cases:
        lines += [*([f"## {case.name}", ""] if case.name else []), *_table(_variants(case, wide=False))]
        lines += [*(f"* {line}" for line in _remarks(case)), ""]
    return "\n".join(lines)


def _case(case: CaseResult, published_by: str) -> list[str]:
    rates, cost, unit, variants = case.rates, case.cost, case.unit.replace("_", " "), _variants(case, wide=True)
    worth = [{"stage": each.stage, "adds alone, to what it requires": str(each.alone or _NONE),
              "adds to all others": str(each.together or _NONE)} for each in case.worth]  # fmt: skip
    trained = [
        {"whole training": each.name, f"{unit}/s": f"{own.per_second:,.0f}", "ratio": str(own.ratio),
         "effect": str(own.effect) if each.stages else _NONE}
        | {activity: f"{share:.1%}" for activity, share in own.shares.items()}
        for each in case.variants if (own := each.throughput) is not None and not each.caught
    ]  # fmt: skip
    half = "Products in {}: {:.0f} GFLOP/s, by which variants are judged that may use them."
    return [
        f"One update of {case.batch_size} samples on {case.device} with {case.threads} threads; {case.ended}. ",
        f"What is counted per second are {unit}.", "",
        *_table(variants),
        *([f"Published: {published_by}", ""] if published_by and "published" in variants[0] else []),
        *(f"* {line}" for line in _remarks(case)), "",
        *_table(worth), *_table(trained),
        f"The limit of {case.limit_ms:.3g} ms is the larger of {cost.least_flop / 1e9:.3g} GFLOP over "
        f"{rates.float32_flops / 1e9:.0f} GFLOP/s, and {cost.moved_bytes / 1e6:.3g} MB over "
        f"{rates.copy_bytes / 1e9:.0f} GB/s. The baseline does {cost.counted_flop / 1e9:.3g} GFLOP, as counted.",
        f"Float32 products: {rates.default_flops / 1e9:.0f} GFLOP/s with the default kernels, "
        f"{rates.relaxed_flops / 1e9:.0f} with precision `medium`, off by {rates.relaxed_error:.0e}. The limit takes "
        "the faster of the two if both are true float32.",
        *(half.format(name, flops / 1e9) for name, flops in rates.half_flops.items()),
    ]  # fmt: skip


def _table(rows: Sequence[Row]) -> list[str]:
    """A table in Markdown, and an empty line; nothing where there is no row."""
    if not rows:
        return []
    body = (f"| {' | '.join(row.values())} |" for row in rows)
    return [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}", *body, ""]


def _variants(case: CaseResult, wide: bool) -> list[Row]:
    """The table of all variants; ``wide`` has all that there is something to say in."""
    rows: list[Row] = []
    for each in case.variants:
        row = {"variant": each.title, "ratio": each.shown_ratio, "ms": "-" if each.caught else f"{each.steady_ms:.3g}",
               "effect": str(each.effect) if each.stages else _NONE, "verdict": each.verdict or _NONE}  # fmt: skip
        if each.throughput is not None:
            trains = each.stages and not each.caught
            row["training"] = str(each.throughput.ratio) if trains else _NONE if each.caught else "1"
        elif any(other.throughput is not None for other in case.variants):
            row["training"] = _NONE
        if wide:
            even, trained = each.break_even_updates, each.throughput
            row |= {"compile s": f"{each.compile_s:.2g}", "warm-up s": f"{each.warmup_s:.2g}",
                    "break-even": _NONE if even is None else f"{even:,}", "MiB": f"{each.peak_memory / 2**20:,.0f}",
                    "limit": f"{each.limit_fraction:.0%}",
                    "per s": _NONE if trained is None else f"{trained.per_second:,.0f}"}  # fmt: skip
        if wide and any(other.published is not None for other in case.variants):
            row["published"] = _NONE if each.published is None else f"{each.published:g}x"
        rows.append(row)
    return rows


def _remarks(case: CaseResult) -> Iterator[str]:
    yield f"A/A, the baseline against the baseline: {case.a_a} in {case.a_a.processes} processes of each"
    if case.interaction is not None:
        said = "as much as"
        if not case.interaction.low <= 1 <= case.interaction.high:
            said = "more than" if case.interaction.low > 1 else "less than"
        yield f"all stages together bring {said} the product of what each adds alone: {case.interaction}"
    for what, reasons in (("inactive", case.inactive), ("impossible", case.refused), ("not measured", case.missing)):
        for reason in dict.fromkeys(reasons.values()):
            names = ", ".join(name for name, own in reasons.items() if own == reason)
            yield f"{what}: {names}: {(reason.strip().splitlines() or [''])[-1]}"
    for variant in case.variants:
        if variant.caught:
            yield f"{variant.name} has no ratio, because it does not do the baseline's work: {variant.caught}"
        if variant.not_compared:
            yield f"{variant.name}: its updates were not compared with the baseline's: {variant.not_compared}"
    if unasked := [variant.name for variant in case.variants if variant.stages and variant.verdict is None]:
        yield f"the gate was not asked about {', '.join(unasked)}"
    yield from dict.fromkeys(note for variant in case.variants for note in variant.notes)
    for variant in case.variants:
        if variant.verdict not in (None, Outcome.PASS):
            yield f"{variant.name}: {variant.verdict}: {variant.verdict_summary}"


def _slope(power: float) -> str:
    grows = f"the time of an update with all stages grows with the power {power:.2f} of its least FLOP"
    return f"From case to case, {grows} (1 is in proportion)."


def write_recipe(recommendation: Recommendation, case: Case, result: CaseResult, path: Path) -> None:
    """Writes a recipe that extends the measured one, with the reason behind every stage that is off."""
    recipe, measured = case.recipe, result.named(recommendation.variant)
    where = f"{cpu_model()}, {result.threads} threads" if result.device == "cpu" else result.device
    lines = [
        f"# What to use on {where}; measured {time.strftime('%Y-%m-%d')}.",
        f"# The {recommendation.updates:,} updates of a training take {recommendation.seconds:,.0f} s with start-up; "
        f"{recommendation.baseline_seconds:,.0f} s without stages.",
    ]
    if measured is not None and measured.stages:
        lines.insert(1, f"# Whole training steps are {measured.training_ratio} as fast as without stages.")
    extended = os.path.relpath(recipe.path.resolve(), path.parent.resolve())
    if (ships := shipped().get(recipe.path.stem)) is not None and ships.resolve() == recipe.path.resolve():
        extended = recipe.path.name
    values = recipe.values()
    lines += [f"name: {recipe.name[:90]}_here", f"extends: {dump_inline(extended)}"]
    lines += [*render(_assigned(case, values)), "optimization:"]
    for kind in recipe.stages:
        if kind in recommendation.stages:
            lines.append(f"  {kind}: {dump_inline(values['optimization'][kind])}")
        else:
            lines.append(f"  {kind}: off  # {' '.join(recommendation.reasons[kind].split())}")
    lines += [f"  {kind}: off" for kind in recipe.off]
    write_text(path, "\n".join([*lines, ""]))


def _assigned(case: Case, values: dict[str, Any]) -> dict[str, Any]:
    """What the case's assignments have set, but for stages and secrets, as nested mappings."""
    assigned: dict[str, Any] = {}
    for assignment in case.sets:
        path = assignment.partition("=")[0].split(".")
        if path[0] not in ("optimization", "name") and MASK not in str(value := reduce(getitem, path, values)):
            below = assigned
            for key in path[:-1]:
                below = below.setdefault(key, {})
            below[path[-1]] = value
    return assigned


def draw(result: Result, folder: Path) -> list[str]:
    """Draws what there is to see, as PNG; returns the names of the files, none if matplotlib is not installed."""
    rows = len({variant.name for case in result.cases for variant in case.variants})
    wide = 2.0 + 4.5 * len(result.cases), 1.6 + _INCH_A_ROW * rows
    pictures = {}
    if any(variant.stages for case in result.cases for variant in case.variants):
        pictures["ratios"] = (partial(_ratios, result), wide)
    if any(variant.throughput for case in result.cases for variant in case.variants):
        pictures["training"] = (partial(_training, result), wide)
    if result.slope is not None:
        pictures["scaling"] = (partial(_scaling, result), (6.5, 5.0))
    return [path.name for path in draw_all(pictures, folder)]


def _panels(result: Result, figure: Any, rows: Sequence[str], ratios: Callable[[CaseResult], Iterable[Ratio]]) -> Any:
    """A part of the figure for every case, side by side, on one scale and with the same rows from top to bottom."""
    every = figure.subplots(1, len(result.cases), squeeze=False, sharex=True, sharey=True)[0]
    for axes, case in zip(every, result.cases, strict=True):
        own = list(ratios(case))
        counts = {what: sorted({getattr(each, what) for each in own}) for what in ("processes", "rounds")}
        told = [
            f"{' to '.join(map(str, sorted({of[0], of[-1]})))} {what}"
            for what, of in counts.items()
            if of not in ([], [1])
        ]
        axes.set_title(": ".join(filter(None, (case.name or result.name, ", ".join(told)))))
        axes.grid(visible=False, axis="y")
        axes.set(yticks=range(len(rows)), yticklabels=rows, ylim=(len(rows) - 0.5, -0.5))
    return zip(every, result.cases, strict=True)


def _ratios(result: Result, figure: Any) -> None:
    """The ratio of every variant with its interval; that of A/A is shaded."""
    rows = list(dict.fromkeys(v.name for case in result.cases for v in case.variants if v.stages))
    for axes, case in _panels(result, figure, rows, lambda case: (v.ratio for v in case.variants if v.stages)):
        axes.axvspan(
            1 / case.a_a.spread, case.a_a.spread, color="#dddddd", zorder=0, label="A/A: baseline against itself"
        )
        axes.axvline(1, color=BLACK, linewidth=0.8)
        for variant in (variant for variant in case.variants if variant.stages and not variant.caught):
            row, ratio, (colour, mark) = rows.index(variant.name), variant.ratio, _EFFECT_MARKS[variant.effect]
            axes.plot([ratio.low, ratio.high], [row, row], color=colour, linewidth=2.5, solid_capstyle="butt")
            axes.plot(ratio.value, row, mark, color=colour, markersize=5, label=str(variant.effect))
            _write(axes, str(ratio), (1, row), (4, 0), xycoords=("axes fraction", "data"), va="center")
            if variant.published is not None:
                axes.plot(variant.published, row, "D", color=BLACK, fillstyle="none", markersize=5, label="published")
                _write(axes, f"{variant.published:g}", (variant.published, row), (0, -5), ha="center", va="top")
        axes.set_xlabel("times as fast as the baseline (line: 95 % interval)")
    legend(figure)


def _training(result: Result, figure: Any) -> None:
    """Time of a whole training for each of the units that are counted, by what it is spent on."""
    rows = list(dict.fromkeys(v.name for case in result.cases for v in case.variants if v.throughput))
    trained = [own for case in result.cases for variant in case.variants if (own := variant.throughput)]
    largest = {
        activity: max(own.shares.get(activity, 0.0) for own in trained) for each in trained for activity in each.shares
    }
    apart = cycle(_SOURCE_COLOURS)
    colours = {
        activity: _COLOURS.get(activity) or next(apart) for activity, share in largest.items() if share >= _VISIBLE
    }
    longest = max(1e3 / own.per_second for own in trained)
    for axes, case in _panels(
        result, figure, rows, lambda case: (v.throughput.ratio for v in case.variants if v.throughput and v.stages)
    ):
        for variant, own in ((variant, own) for variant in case.variants if (own := variant.throughput)):
            row, whole = rows.index(variant.name), 1e3 / own.per_second
            left = 0.0
            for activity, colour in colours.items():
                width = own.shares.get(activity, 0.0) * whole
                axes.barh(row, width, left=left, color=colour, label=activity)
                left += width
            _write(axes, f"{whole:.3g}", (whole, row), (3, 0), va="center")
        unit = case.unit.removesuffix("s").replace("_", " ")
        axes.set(xlabel=f"ms of a whole training for each {unit}", xlim=(0, 1.15 * longest))
    legend(figure)


def _scaling(result: Result, figure: Any) -> None:
    """Time of an update against its least arithmetic, over the cases."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes = figure.subplots()
    cases = sorted(result.cases, key=lambda case: case.cost.least_flop)
    flop = [case.cost.least_flop / 1e9 for case in cases]
    whole_ms = [math.nan if (whole := case.named(ALL)) is None else whole.steady_ms for case in cases]
    lines = {
        "baseline": ("o-", GREY, [case.baseline_ms for case in cases]), "all stages": ("s-", BLUE, whole_ms),
        "limit of this machine": ("^--", BLACK, [case.limit_ms for case in cases]),
    }  # fmt: skip
    for label, (mark, colour, milliseconds) in lines.items():
        axes.plot(flop, milliseconds, mark, color=colour, label=label, markersize=5)
        for place in zip(flop, milliseconds, strict=True):
            _write(axes, f"{place[1]:.3g}", place, (0, 5), ha="center")
    axes.set(xscale="log", yscale="log", xlabel="least GFLOP of an update", ylabel="ms an update")
    axes.set_xticks(flop, [f"{each:.3g}\n{case.name}" for each, case in zip(flop, cases, strict=True)])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.margins(0.15)
    legend(figure)


def _write(axes: Any, text: str, place: tuple[float, float], beside: tuple[float, float], **how: Any) -> None:
    axes.annotate(text, place, beside, textcoords="offset points", annotation_clip=False, fontsize=7, **how)
