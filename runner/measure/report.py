"""What an ablation has come to: tables for a terminal, a report in Markdown, and its pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.system.plots import NO_PLOTS, draw_all
from runner.system.secrets import redact
from runner.verify.variants import ALL

if TYPE_CHECKING:
    from runner.measure.analysis import CaseResult, Result, VariantResult
    from runner.measure.recommend import Recommendation

_WIDE = 160  # columns from which on a terminal shows all figures
_NONE = "-"
_NARROW_COLUMNS = ("ratio", "ms", "effect", "verdict")
_COLUMNS = (*_NARROW_COLUMNS, "compile s", "warm-up s", "break-even", "MiB", "limit", "per s", "published")
_COLOURS = {"draw": "#66ccee", "transfer": "#ccbb44", "update": "#ee6677", "other": "#bbbbbb"}
"""Told apart also by those who see few colours (Paul Tol's bright scheme)."""
_SOURCE_COLOURS = ("#4477aa", "#228833", "#aa3377")  # for what a source does apart
_EFFECT_COLOURS = {"faster": "#228833", "slower": "#aa3377", "inconclusive": "#888888"}
_INCH_A_ROW = 0.32
_HOW_TO_READ = """\
**ratio** is the baseline's time of one update over the variant's, the median over rounds with its 95 % bootstrap
interval: above 1 is faster. **effect** is inconclusive where the interval holds 1, or where the effect is no larger
than what the baseline shows against itself (A/A). **compile** is the first update, **warm-up** what follows until it is
steady, **break-even** the number of updates after which the start-up has paid. **limit** is the share of the limit's
speed that is reached. **verdict** is the gate's answer to whether the stages are harmless. *All but* a stage is also
without what requires it, and a stage *alone* comes with what it requires."""


def show(result: Result, console: Console) -> None:
    """Prints the table of every case, wide or narrow as the terminal is, what it means, and where to find it."""
    for case in result.cases:
        title = f"{case.name or 'ablation'}: one update on {case.device}, {case.threads} threads"
        table = Table(title=Text(f"{title}, batch {case.batch_size}"), title_justify="left", box=box.SIMPLE_HEAD,
                      pad_edge=False)  # fmt: skip
        longest_word = max(len(word) for variant in case.variants for word in variant.title.split())
        table.add_column("variant", overflow="fold", min_width=longest_word)
        columns = _columns(case) if console.width >= _WIDE else _NARROW_COLUMNS
        for name in columns:
            table.add_column(name, justify="left" if name in ("effect", "verdict") else "right", overflow="fold")
        for row in _rows(case, columns):
            table.add_row(*map(Text, row))
        console.print(table)
        for line in _remarks(case):
            console.print(Text(line), style="dim")
    if result.slope is not None:
        console.print(Text(_slope(result.slope)))
    for recommendation in result.recommendations:
        console.print(Text(_recommended(recommendation)), style="bold")
    console.print(Text(f"report: {result.folder}"), soft_wrap=True)


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
    lines += _table(("variant", "stages"), ((title, ", ".join(own) or "none") for title, own in stages.items()))
    for case in result.cases:
        lines += [f"## {case.name or result.name}", "", *_case(case, result.published_by), ""]
    if result.slope is not None:
        lines += ["## From case to case", "", _slope(result.slope), ""]
    lines += ["## Recommendation", ""]
    for each in result.recommendations:
        lines += [_recommended(each), "", *(f"* `{kind}` off: {reason}" for kind, reason in each.reasons.items()), ""]
    lines += [f"![{name}]({name})" for name in plots] or [NO_PLOTS]
    return redact("\n".join([*lines, "", "## How to read this", "", _HOW_TO_READ, ""]))


def summary(result: Result) -> str:
    """The report in short, for a page that shows it beside the measurements."""
    lines = []
    for case in result.cases:
        lines += [f"## {case.name or result.name}", "", *_table(("variant", *_NARROW_COLUMNS), _rows(case))]
        lines += [*(f"* {line}" for line in _remarks(case)), ""]
    return "\n".join(lines)


def _case(case: CaseResult, published_by: str) -> Iterator[str]:
    yield f"One update of {case.batch_size} samples on {case.device} with {case.threads} threads; {case.ended}. "
    yield f"What is counted per second are {case.unit.replace('_', ' ')}."
    yield ""
    columns = _columns(case)
    yield from _table(("variant", *columns), _rows(case, columns))
    if "published" in columns and published_by:
        yield f"Published: {published_by}"
        yield ""
    for line in _remarks(case):
        yield f"* {line}"
    yield ""
    if case.worth:
        gains = ((each.stage, str(each.alone or _NONE), str(each.together or _NONE)) for each in case.worth)
        yield from _table(("stage", "adds alone, to what it requires", "adds to all others"), gains)
    if trained := [(each.name, each.throughput) for each in case.variants if each.throughput is not None]:
        activities = trained[0][1].shares
        rows = ((name, f"{own.per_second:,.0f}", str(own.ratio), *(f"{own.shares[each]:.1%}" for each in activities))
                for name, own in trained)  # fmt: skip
        yield from _table(("whole training", f"{case.unit.replace('_', ' ')}/s", "ratio", *activities), rows)
    rates, cost = case.rates, case.cost
    yield (
        f"The limit of {case.limit_ms:.3g} ms is the larger of {cost.least_flop / 1e9:.3g} GFLOP over "
        f"{rates.float32_flops / 1e9:.0f} GFLOP/s, and {cost.moved_bytes / 1e6:.3g} MB over "
        f"{rates.copy_bytes / 1e9:.0f} GB/s. The baseline does {cost.counted_flop / 1e9:.3g} GFLOP, as counted."
    )
    yield (
        f"Float32 products: {rates.default_flops / 1e9:.0f} GFLOP/s with the default kernels, "
        f"{rates.relaxed_flops / 1e9:.0f} with precision `medium`, off by {rates.relaxed_error:.0e}. The limit takes "
        "the faster of the two if both are true float32."
    )
    for name, flops in rates.half_flops.items():
        yield f"Products in {name}: {flops / 1e9:.0f} GFLOP/s, by which variants are judged that may use them."


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table in Markdown, and an empty line."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _columns(case: CaseResult) -> Sequence[str]:
    """All that there is something to say in."""
    return _COLUMNS if any(variant.published is not None for variant in case.variants) else _COLUMNS[:-1]


def _rows(case: CaseResult, columns: Sequence[str] = _NARROW_COLUMNS) -> Iterator[list[str]]:
    for variant in case.variants:
        cells = _cells(variant)
        yield [variant.title, *(cells[name] for name in columns)]


def _cells(variant: VariantResult) -> dict[str, str]:
    even = variant.break_even_updates
    return {
        "ratio": str(variant.ratio) if variant.stages else "1",
        "ms": f"{variant.steady_ms:.3g}",
        "effect": str(variant.effect) if variant.stages else _NONE,
        "verdict": variant.told("outcome") or _NONE,
        "compile s": f"{variant.compile_s:.2g}",
        "warm-up s": f"{variant.warmup_s:.2g}",
        "break-even": _NONE if even is None else f"{even:,}",
        "MiB": f"{variant.peak_memory / 2**20:,.0f}",
        "limit": f"{variant.limit_fraction:.0%}",
        "per s": _NONE if variant.throughput is None else f"{variant.throughput.per_second:,.0f}",
        "published": _NONE if variant.published is None else f"{variant.published:g}x",
    }


def _remarks(case: CaseResult) -> Iterator[str]:
    yield f"A/A, the baseline in one process against the baseline in another: {case.a_a}"
    if not case.a_a.low <= 1 <= case.a_a.high:
        yield "A/A does not hold 1: two processes that do the same differ here by more than chance"
    if case.interaction is not None:
        said = "as much as"
        if not case.interaction.low <= 1 <= case.interaction.high:
            said = "more than" if case.interaction.low > 1 else "less than"
        yield f"all stages together bring {said} the product of what each adds alone: {case.interaction}"
    for what, reasons in (("inactive", case.inactive), ("impossible", case.refused), ("not measured", case.missing)):
        for reason in dict.fromkeys(reasons.values()):
            names = ", ".join(name for name, own in reasons.items() if own == reason)
            yield f"{what}: {names}: {(reason.strip().splitlines() or [''])[-1]}"
    yield from dict.fromkeys(note for variant in case.variants for note in variant.notes)
    for variant in case.variants:
        if variant.told("outcome") not in (None, "PASS"):
            yield f"{variant.name}: {variant.told('outcome')}: {variant.told('summary')}"


def _slope(power: float) -> str:
    return (
        f"From case to case, the time of an update with all stages grows with the power {power:.2f} of its least FLOP "
        "(1 is in proportion)."
    )


def _recommended(recommendation: Recommendation) -> str:
    case = f"{recommendation.case}: " if recommendation.case else ""
    return (
        f"{case}use {', '.join(recommendation.stages) or 'no stage'}: {recommendation.seconds:,.0f} s for the "
        f"{recommendation.updates:,} updates of a training instead of {recommendation.baseline_seconds:,.0f} s"
    )


def draw(result: Result, folder: Path) -> list[str]:
    """Draws what there is to see, as PNG; returns the names of the files, none if matplotlib is not installed."""
    wide = 2.5 + 5.0 * len(result.cases), 1.8 + _INCH_A_ROW * max(len(case.variants) for case in result.cases)
    pictures = {"ratios": (partial(_ratios, result), wide)}
    if any(variant.throughput for case in result.cases for variant in case.variants):
        pictures["training"] = (partial(_training, result), wide)
    if result.slope is not None:
        pictures["scaling"] = (partial(_scaling, result), (6.5, 5.0))
    return [path.name for path in draw_all(pictures, folder)]


def _ratios(result: Result, figure: Any) -> None:
    """The ratio of every variant with its interval; what A/A reaches is shaded."""
    for axes, case in zip(figure.subplots(1, len(result.cases), squeeze=False)[0], result.cases, strict=True):
        variants = [variant for variant in case.variants if variant.stages]
        for row, variant in enumerate(variants):
            ratio, colour = variant.ratio, _EFFECT_COLOURS[variant.effect]
            axes.plot([ratio.low, ratio.high], [row, row], color=colour, linewidth=2.5, solid_capstyle="butt")
            axes.plot(ratio.value, row, "o", color=colour, markersize=5)
            axes.annotate(f"{ratio.value:.2f}x", (ratio.high, row), (6, 0), textcoords="offset points", va="center")
            if variant.published is not None:
                axes.plot(variant.published, row, "D", color="black", fillstyle="none", markersize=6)
        axes.axvspan(1 / case.a_a.spread, case.a_a.spread, color="#dddddd", zorder=0)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.margins(x=0.15)
        label = "times as fast as the baseline (95 % interval; grey: A/A; diamond: published)"
        _label(axes, [variant.name for variant in variants], label, case.name or result.name)


def _training(result: Result, figure: Any) -> None:
    """Time of a whole training for each of the units that are counted, by what it is spent on."""
    for axes, case in zip(figure.subplots(1, len(result.cases), squeeze=False)[0], result.cases, strict=True):
        measured = [(v.name, v.throughput) for v in case.variants if v.throughput is not None]
        left = [0.0] * len(measured)
        source_colours = cycle(_SOURCE_COLOURS)
        for activity in dict.fromkeys(activity for _, own in measured for activity in own.shares):
            colour = _COLOURS.get(activity) or next(source_colours)
            widths = [1e3 * own.shares.get(activity, 0.0) / own.per_second for _, own in measured]
            axes.barh(range(len(measured)), widths, left=left, color=colour, label=activity)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        label = f"milliseconds of a whole training for each {case.unit.removesuffix('s').replace('_', ' ')}"
        _label(axes, [name for name, _ in measured], label, case.name or result.name)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def _label(axes: Any, rows: list[str], below: str, title: str) -> None:
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel(below)
    axes.set_title(title, fontsize=10)


def _scaling(result: Result, figure: Any) -> None:
    """Time of an update against its least arithmetic, over the cases."""
    axes = figure.subplots()
    cases = sorted(result.cases, key=lambda case: case.cost.least_flop)
    flop = [case.cost.least_flop / 1e9 for case in cases]
    axes.plot(flop, [case.baseline_ms for case in cases], "o-", label="baseline", markersize=5)
    whole = [case.named(ALL) for case in cases]
    whole_ms = [math.nan if variant is None else variant.steady_ms for variant in whole]
    axes.plot(flop, whole_ms, "s-", label="all stages", markersize=5)
    axes.plot(flop, [case.limit_ms for case in cases], "k--", label="limit")
    for x, case in zip(flop, cases, strict=True):
        axes.annotate(case.name, (x, case.baseline_ms), (0, 7), textcoords="offset points", ha="center")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_xlabel("least GFLOP of an update")
    axes.set_ylabel("ms an update")
    axes.legend()
