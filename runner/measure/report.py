"""What an ablation has come to: tables for a terminal, and a report in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.system.secrets import redact

if TYPE_CHECKING:
    from runner.compare.noninferiority import Ratio
    from runner.measure.recommend import Recommendation
    from runner.measure.result import CaseResult, Result, VariantResult

_WIDE = 160
"""Columns from which on a terminal shows all figures."""
_NONE = "-"
_NARROW_COLUMNS = ("ratio", "ms", "effect", "verdict")
_COLUMNS = (*_NARROW_COLUMNS, "compile s", "warm-up s", "break-even", "MiB", "limit", "per s", "published")
_HOW_TO_READ = """\
**ratio** is the baseline's time of one update over the variant's, the median over rounds with its 95 % bootstrap
interval: above 1 is faster. **effect** is inconclusive where the interval holds 1, or where the effect is no larger
than what the baseline shows against itself (A/A). **compile** is the first update, **warm-up** what follows until it is
steady, **break-even** the number of updates after which the start-up has paid. **limit** is the share of the limit's
speed that is reached. **verdict** is the gate's answer to whether the stages are harmless. *All but* a stage is also
without what requires it, and a stage *alone* comes with what it requires."""


def show(result: Result, recommendations: Sequence[Recommendation], console: Console) -> None:
    """Prints the table of every case, wide or narrow as the terminal is, what it means, and where to find it."""
    wide = console.width >= _WIDE
    for case in result.cases:
        _table(case, wide, console)
        for line in _remarks(case):
            console.print(Text(line), style="dim")
    if result.slope is not None:
        console.print(Text(_slope(result)))
    for recommendation in recommendations:
        console.print(Text(_recommended(recommendation)), style="bold")
    console.print(Text(f"report: {result.folder}"), soft_wrap=True)


def _table(case: CaseResult, wide: bool, console: Console) -> None:
    columns = [name for name in (_COLUMNS if wide else _NARROW_COLUMNS) if name != "published" or _has_published(case)]
    title = f"{case.name or 'ablation'}: one update on {case.device}, {case.threads} threads, batch {case.batch_size}"
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    longest_word = max(len(word) for variant in case.variants for word in _title(variant).split())
    table.add_column("variant", overflow="fold", min_width=longest_word)
    for name in columns:
        table.add_column(name, justify="left" if name in ("effect", "verdict") else "right", overflow="fold")
    for variant in case.variants:
        cells = _cells(variant)
        table.add_row(Text(_title(variant)), *(Text(cells[name]) for name in columns))
    console.print(table)


def markdown(result: Result, recommendations: Sequence[Recommendation], plots: Sequence[str], hint: str) -> str:
    """The report.

    Args:
        result: what came out.
        recommendations: one for every case.
        plots: names of the pictures beside it.
        hint: why there are no pictures, if so.
    """
    lines = [f"# {result.name}: what every stage is worth", "", *_how(result), "", *_variants(result), ""]
    for case in result.cases:
        lines += [*_case(case, result), ""]
    if result.slope is not None:
        lines += ["## From case to case", "", _slope(result), ""]
    lines += ["## Recommendation", ""]
    for recommendation in recommendations:
        lines += [_recommended(recommendation), ""]
        lines += [f"* `{kind}` off: {reason}" for kind, reason in recommendation.reasons.items()]
        lines += [""]
    lines += [f"![{name}]({name})" for name in plots] or [hint]
    return redact("\n".join([*lines, "", "## How to read this", "", _HOW_TO_READ, ""]))


def summary(result: Result) -> str:
    """The report in short, for a page that shows it beside the measurements."""
    lines = []
    for case in result.cases:
        lines += [f"## {case.name or result.name}", "", *_rows(case, _NARROW_COLUMNS), ""]
        lines += [*(f"* {line}" for line in _remarks(case)), ""]
    return "\n".join(lines)


def _how(result: Result) -> Iterator[str]:
    machine = ", ".join(f"{name} {value}" for name, value in result.machine.items())
    yield f"    {result.command}"
    yield ""
    yield f"Measured in {result.seconds:.0f} s on: {machine}. Load average when it began: {result.load:.1f}."
    if result.interrupted:
        yield ""
        yield "**It was interrupted; the same command goes on with it.**"


def _variants(result: Result) -> Iterator[str]:
    """Which stages every variant has, the same in all cases."""
    yield "| variant | stages |"
    yield "|---|---|"
    rows = {_title(variant): variant.stages for case in result.cases for variant in case.variants}
    for title, stages in rows.items():
        yield f"| {title} | {', '.join(stages) or 'none'} |"


def _case(case: CaseResult, result: Result) -> Iterator[str]:
    yield f"## {case.name or result.name}"
    yield ""
    yield f"One update of {case.batch_size} samples on {case.device} with {case.threads} threads; {case.ended}. "
    yield f"What is counted per second are {case.unit.replace('_', ' ')}."
    yield ""
    columns = [name for name in _COLUMNS if name != "published" or _has_published(case)]
    yield from _rows(case, columns)
    yield ""
    if _has_published(case) and result.published_by:
        yield f"Published: {result.published_by}"
        yield ""
    for line in _remarks(case):
        yield f"* {line}"
    yield ""
    yield from _gains(case)
    yield from _shares(case)
    yield from _limit(case)


def _rows(case: CaseResult, columns: Sequence[str]) -> Iterator[str]:
    """The variants' table."""
    yield f"| variant | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for variant in case.variants:
        cells = _cells(variant)
        yield f"| {_title(variant)} | {' | '.join(cells[name] for name in columns)} |"


def _gains(case: CaseResult) -> Iterator[str]:
    """What each stage adds, alone and to the others."""
    if not case.worth:
        return
    yield "| stage | adds alone, to what it requires | adds to all others |"
    yield "|---|---|---|"
    for gain in case.worth:
        yield f"| {gain.stage} | {_ratio(gain.alone)} | {_ratio(gain.together)} |"
    yield ""


def _shares(case: CaseResult) -> Iterator[str]:
    """Where the time of a whole training goes."""
    measured = [(variant, variant.throughput) for variant in case.variants if variant.throughput is not None]
    if not measured:
        return
    names = list(measured[0][1].shares)
    yield f"| whole training | steps/s | ratio | {' | '.join(names)} |"
    yield f"|---|---|---|{'---|' * len(names)}"
    for variant, throughput in measured:
        shares = " | ".join(f"{throughput.shares[name]:.1%}" for name in names)
        yield f"| {variant.name} | {throughput.per_second:,.0f} | {_ratio(throughput.ratio)} | {shares} |"
    yield ""


def _limit(case: CaseResult) -> Iterator[str]:
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


def _remarks(case: CaseResult) -> Iterator[str]:
    yield f"A/A, the baseline in one process against the baseline in another: {case.a_a}"
    if not case.a_a.low <= 1 <= case.a_a.high:
        yield "A/A does not hold 1: two processes that do the same differ here by more than chance"
    if case.interaction is not None:
        said = "more" if case.interaction.low > 1 else "less" if case.interaction.high < 1 else "as much"
        yield f"all stages together bring {said} than the product of what each adds alone: {case.interaction}".replace(
            "as much than", "as much as"
        )
    for what, reasons in (("inactive", case.inactive), ("impossible", case.refused), ("not measured", case.missing)):
        for reason in dict.fromkeys(reasons.values()):
            names = ", ".join(name for name, own in reasons.items() if own == reason)
            yield f"{what}: {names}: {_last_line(reason)}"
    yield from dict.fromkeys(note for variant in case.variants for note in variant.notes)
    for variant in case.variants:
        if str((variant.verdict or {}).get("outcome", "PASS")).upper() != "PASS":
            yield f"{variant.name}: {(variant.verdict or {}).get('outcome')}: {(variant.verdict or {}).get('summary')}"


def _slope(result: Result) -> str:
    return (
        f"From case to case, the time of an update with all stages grows with the power {result.slope:.2f} of its "
        "least FLOP (1 is in proportion)."
    )


def _recommended(recommendation: Recommendation) -> str:
    case = f"{recommendation.case}: " if recommendation.case else ""
    return (
        f"{case}use {', '.join(recommendation.stages) or 'no stage'}: {recommendation.seconds:,.0f} s for the "
        f"{recommendation.updates:,} updates of a training instead of {recommendation.baseline_seconds:,.0f} s"
    )


def _cells(variant: VariantResult) -> dict[str, str]:
    is_baseline = not variant.stages
    even = variant.break_even_updates
    return {
        "ratio": "1" if is_baseline else _ratio(variant.ratio),
        "ms": f"{variant.steady_ms:.3g}",
        "effect": _NONE if is_baseline else str(variant.effect),
        "verdict": str((variant.verdict or {}).get("outcome", _NONE)),
        "compile s": f"{variant.compile_s:.2g}",
        "warm-up s": f"{variant.warmup_s:.2g}",
        "break-even": _NONE if is_baseline or even is None else f"{even:,}",
        "MiB": f"{variant.peak_memory / 2**20:,.0f}",
        "limit": f"{variant.limit_fraction:.0%}",
        "per s": _NONE if variant.throughput is None else f"{variant.throughput.per_second:,.0f}",
        "published": _NONE if variant.published is None else f"{variant.published:g}x",
    }


def _title(variant: VariantResult) -> str:
    return " = ".join((variant.name, *variant.also))


def _ratio(ratio: Ratio | None) -> str:
    return _NONE if ratio is None else str(ratio)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else text


def _has_published(case: CaseResult) -> bool:
    return any(variant.published is not None for variant in case.variants)
