"""Results of an ablation: tables for a terminal, a report in Markdown, and the recommended
recipe.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from rich import box
from rich.console import JustifyMethod
from rich.measure import Measurement
from rich.table import Table

from runner.ablation.ablation_plots import PLOT_TITLES
from runner.ablation.analysis import CaseResult, Result, Traffic
from runner.ablation.experiment import Case
from runner.ablation.recommendation import Recommendation
from runner.proof.ratios import noise_factor
from runner.proof.verdict import Outcome
from runner.recipe.dumping import dump_inline
from runner.recipe.loader import shipped
from runner.recipe.rendering import render
from runner.system.console import CleanText, Console
from runner.system.files import write_text
from runner.system.hardware import cpu_model
from runner.system.plots import NO_PLOTS
from runner.system.secrets import MASK, redact
from runner.system.synthetic import SYNTHETIC_REMARK
from runner.system.text_lines import amount, figure, print_wrapped, processor
from runner.verify.variants import BASELINE

_ENDLESS = 10_000
_NARROW = 76
"""Columns from which on no verdict is split."""
_WIDE = 160
"""Columns from which on a terminal shows all figures."""
_SHOWN = 3
"""Largest number of faster but unproven sets of stages on a terminal."""
_NONE = "-"
_COSTS = ("ms", "compile s", "warm-up s", "break-even", "MiB", "limit", "per s")
"""Columns of a second table in the report: one with all columns is wider than a page."""
_WORDS = frozenset({"variant", "effect", "verdict", "name", "slot", "counted"})
"""Columns that are not numbers."""
_HOW_TO_READ = """\
* **ratio** is the baseline's time per update divided by the variant's: above 1 is faster.
  **training** is the same ratio of whole training steps, with sampling and transfer, and its
  effect; the recommendation uses it. No update gets a batch that another update has had.
* Every variant was measured in several processes, because two identical processes differ in speed
  for their whole lifetime. The ratio is the geometric mean over processes, with Student's 95 %
  interval. A stage that selects by measuring (a batch size, algorithms, kernels) searches again
  in every process, so the interval contains the luck of its choices.
* **noise** is the baseline measured against itself (A/A). **effect** is *unclear* if the interval
  contains 1, or if the ratio is inside the band of the noise, which the plot shows in grey. The
  effect on updates and that on training steps are measured separately, so one may be unclear and
  the other not. About one in twenty variants without any effect is called faster or slower
  nevertheless.
* After the timed updates, a few more are compared with the baseline's from the same state. A
  variant that skips updates, or returns earlier results, is *invalid* and has no ratio.
* **compile** is the time of the first update, when nothing is compiled yet. **warm-up** is the
  time from there until updates are steady. **break-even** is the number of updates after which
  the start-up has paid off. **limit** is the share that is reached of the fastest speed that this
  machine allows.
* **verdict** is the result of the gate: whether the stages change what is learned. *All but* a
  stage also leaves out the stages that require it; a stage *alone* is measured with the stages
  that it requires.
* The recommendation is the variant that passed the gate and takes the least time for the recipe's
  whole training, start-up included. Only variants whose **training** ratio is faster are
  candidates. If totals differ by no more than the noise, the variant with the fewest stages
  wins."""
_HOW_TO_READ_BYTES = """
* **KiB sent** is what all processes together send for an update, as the loopback interface counts
  it. **computed** follows from the operations of the update, if each is done in a ring, which sends
  the least. *one process* is the baseline with all cores and the whole batch."""
Row = Mapping[str, str]
"""A row of a table: texts by column."""


def print_table(
    console: Console, rows: Sequence[Row], title: str = "", narrowest: int | None = None
) -> None:
    """Prints rows; the first column is at least ``narrowest`` wide, and the other columns fold."""
    table = Table(
        title=CleanText(title) if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in rows[0]:
        # A verdict is one word; it is split only where the screen has no room for all words.
        is_whole = name in ("effect", "verdict") and console.width >= _NARROW
        justify: JustifyMethod = "left" if name in _WORDS else "right"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=is_whole)
    for row in rows:
        table.add_row(*map(CleanText, row.values()))
    # With a minimal width of a column, rich cuts off the columns on the right instead of
    # folding the others, so the width is computed here.
    if narrowest is not None:
        options = console.options.update_width(_ENDLESS)
        full_width = Measurement.get(console, options, table).maximum
        excess = max(0, full_width - console.width)
        longest = max(len(next(iter(row.values()))) for row in rows)
        table.columns[0].width = max(narrowest, longest - excess)
    console.print(table)


def show(result: Result, console: Console) -> None:
    """Prints the table of every case, wide or narrow as the terminal is, what it means, and where
    to find it.
    """
    for case in result.cases:
        machine = processor(case.device, case.threads)
        title = f"{case.name or 'ablation'}: one update on {machine}{_each(case)}"
        longest_word = max(
            len(word) for variant in case.variants for word in variant.title.split()
        )
        rows = _variants(case, console.width >= _WIDE)
        print_table(console, rows, f"{title}, batch {case.batch_size}", longest_word)
        for line in _remarks(case):
            console.print(CleanText(line), style="dim")
    if result.slope is not None:
        console.print(CleanText(_slope(result.slope)))
    for recommendation in result.recommendations:
        console.print(CleanText(str(recommendation)), style="bold")
        for candidate in recommendation.unproven[:_SHOWN]:
            console.print(CleanText(f"{candidate}; to prove it:"))
            print_wrapped(f"    {candidate.command}", console, hang=2)
        if len(recommendation.unproven) > _SHOWN:
            console.print(
                CleanText(f"{len(recommendation.unproven) - _SHOWN} more in the report")
            )
    print_wrapped(f"report: {result.folder}", console)


def markdown(result: Result, plots: Sequence[str]) -> str:
    """Returns the report in Markdown with the given plots."""
    machine = ", ".join(f"{name} {value}" for name, value in result.machine.items())
    lines = [
        f"# {result.name}: what every stage is worth",
        "",
        f"    {result.command}",
        "",
        f"Measured in {result.seconds:.0f} s on: {machine}. Load average at the start: "
        f"{result.load:.1f}.",
        "",
    ]
    if result.interrupted:
        lines += [
            "**The ablation was interrupted; the same command continues it.**",
            "",
        ]
    lines += ["## Recommendation", "", *_recommendations(result)]
    lines += [f"![{PLOT_TITLES[name]}]({name})" for name in plots] or [NO_PLOTS]
    lines += ["", "## Variants", ""]
    lines += _table(list(_sets(result)))
    for case in result.cases:
        lines += [
            f"## {case.name or result.name}",
            "",
            *_case(case, result.published_by),
            "",
        ]
    if result.slope is not None:
        lines += ["## From case to case", "", _slope(result.slope), ""]
    has_several = any(case.processes > 1 for case in result.cases)
    how_to_read = _HOW_TO_READ + (_HOW_TO_READ_BYTES if has_several else "")
    return redact("\n".join([*lines, "", "## How to read this", "", how_to_read, ""]))


def _sets(result: Result) -> Iterator[Row]:
    """Yields the stages of every variant; cases may have other stages under one name."""
    titles = dict.fromkeys(
        variant.title for case in result.cases for variant in case.variants
    )
    for title in titles:
        cases_by_stages: dict[tuple[str, ...], list[str]] = {}
        for case in result.cases:
            for variant in case.variants:
                if variant.title == title:
                    cases_by_stages.setdefault(variant.stages, []).append(case.name)
        texts = []
        for stages, cases in cases_by_stages.items():
            text = ", ".join(stages) or "none"
            prefix = f"{', '.join(cases)}: " if len(cases_by_stages) > 1 else ""
            texts.append(prefix + text)
        yield {"variant": title, "stages": "; ".join(texts)}


def _recommendations(result: Result) -> Iterator[str]:
    """Yields lines of Markdown with the stages to use in every case, and why the others are off."""
    for recommendation in result.recommendations:
        yield from (f"**{recommendation}**", "")
        yield from (
            f"* `{kind}` off: {reason}"
            for kind, reason in recommendation.reasons.items()
        )
        yield ""
        for candidate in recommendation.unproven:
            yield from (
                f"{candidate}. To prove it:",
                "",
                f"    {candidate.command}",
                "",
            )


def summary(result: Result) -> str:
    """Returns a short report for the page of the run in MLflow."""
    lines = []
    for case in result.cases:
        lines += [
            *([f"## {case.name}", ""] if case.name else []),
            *_table(_variants(case, wide=False)),
        ]
        lines += [*(f"* {line}" for line in _remarks(case)), ""]
    return "\n".join(lines)


def _case(case: CaseResult, published_by: str) -> list[str]:
    rates = case.rates
    cost = case.cost
    unit = case.unit.replace("_", " ")
    variants = _variants(case, wide=True)
    worth = [
        {
            "stage": item.stage,
            "adds alone, to what it requires": str(item.alone or _NONE),
            "adds to all others": str(item.together or _NONE),
        }
        for item in case.worth
    ]
    trained = [
        {
            "training": item.name,
            f"{unit}/s": f"{throughput.per_second:,.0f}",
            "ratio": str(throughput.ratio),
            "effect": _NONE if item.name == BASELINE else str(throughput.effect),
        }
        | {activity: f"{share:.1%}" for activity, share in throughput.shares.items()}
        for item in case.variants
        if (throughput := item.throughput) is not None and not item.caught
    ]
    half = (
        "Products in {}: {:.0f} GFLOP/s; the limit of variants that may use this type."
    )
    return [
        f"One update of {case.batch_size} samples on {case.device} with "
        f"{amount(case.threads, 'threads')}{_each(case)}; "
        f"{case.ended}. ",
        f"In the second table, *per s* counts {unit}.",
        "",
        *_table([_without(row, _COSTS) for row in variants]),
        *(
            [f"Published: {published_by}", ""]
            if published_by and "published" in variants[0]
            else []
        ),
        *(f"* {line}" for line in _remarks(case)),
        "",
        *_table(
            [
                {"variant": row["variant"]} | {name: row[name] for name in _COSTS}
                for row in variants
            ]
        ),
        *_table(worth),
        *_table(trained),
        f"The limit of {figure(case.limit_ms, 3)} ms is the larger of "
        f"{figure(cost.least_flop / 1e9, 3)} GFLOP over "
        f"{rates.float32_flops / 1e9:.0f} GFLOP/s, and {figure(cost.moved_bytes / 1e6, 3)} MB over "
        f"{rates.copy_bytes / 1e9:.0f} GB/s. The baseline does "
        f"{figure(cost.counted_flop / 1e9, 3)} GFLOP, as counted.",
        f"Float32 products: {rates.default_flops / 1e9:.0f} GFLOP/s with the default kernels, "
        f"{rates.relaxed_flops / 1e9:.0f} with precision `medium`, off by "
        f"{rates.relaxed_error:.0e}. The limit takes "
        "the faster of the two if both are true float32.",
        *(half.format(name, flops / 1e9) for name, flops in rates.half_flops.items()),
    ]


def _each(case: CaseResult) -> str:
    """Returns how many processes have what was named before; empty for a single one."""
    return f" for each of {case.processes} processes" if case.processes > 1 else ""


def _without(row: Row, names: Sequence[str]) -> Row:
    return {name: text for name, text in row.items() if name not in names}


def _table(rows: Sequence[Row]) -> list[str]:
    """Returns a Markdown table and an empty line; nothing without rows."""
    if not rows:
        return []
    body = (f"| {' | '.join(row.values())} |" for row in rows)
    return [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}", *body, ""]


def _variants(case: CaseResult, wide: bool) -> list[Row]:
    """Returns the rows of all variants; ``wide`` adds all columns."""
    rows: list[Row] = []
    for variant in case.variants:
        steady_ms = "-" if variant.caught else figure(variant.steady_ms, 3)
        row = {
            "variant": variant.title,
            "ratio": variant.shown_ratio,
            "ms": steady_ms,
            "effect": _NONE if variant.name == BASELINE else str(variant.effect),
            "verdict": variant.verdict or _NONE,
        }
        if variant.throughput is not None:
            trains = variant.name != BASELINE and not variant.caught
            changed = f"{variant.throughput.ratio} {variant.throughput.effect}"
            row["training"] = changed if trains else _NONE if variant.caught else "1"
        elif any(item.throughput is not None for item in case.variants):
            row["training"] = _NONE
        if case.processes > 1:
            row |= _traffic(variant.traffic, wide)
        if wide:
            even = variant.break_even_updates
            trained = variant.throughput
            row |= {
                "compile s": figure(variant.compile_s, 2),
                "warm-up s": figure(variant.warmup_s, 2),
                "break-even": _NONE if even is None else f"{even:,}",
                "MiB": f"{variant.peak_memory / 2**20:,.0f}",
                "limit": f"{variant.limit_fraction:.0%}",
                "per s": _NONE if trained is None else f"{trained.per_second:,.0f}",
            }
        if wide and any(item.published is not None for item in case.variants):
            row["published"] = (
                _NONE if variant.published is None else f"{variant.published:g}x"
            )
        rows.append(row)
    return rows


def _traffic(traffic: Traffic | None, wide: bool) -> dict[str, str]:
    """Returns the columns of the bytes that processes send for an update; ``wide`` adds those that
    were computed.
    """
    computed = counted = _NONE
    if traffic is not None:
        computed = f"{traffic.computed / 2**10:,.1f}"
        if traffic.counted is not None:
            counted = f"{traffic.counted / 2**10:,.1f}"
    sent = {"KiB sent": counted}
    return sent | {"computed": computed} if wide else sent


def _remarks(case: CaseResult) -> Iterator[str]:
    if case.synthetic:
        yield f"data {SYNTHETIC_REMARK}"
    band = noise_factor(case.a_a)
    count = case.a_a.processes
    processes = "1 process" if count == 1 else f"{count} processes"
    # A variant has several processes at a time.
    if case.processes > 1:
        processes = amount(count, "starts")
    yield (
        f"noise (baseline against itself): {case.a_a} with {processes} of each; "
        f"ratios from {1 / band:.2f}x to {band:.2f}x are unclear"
    )
    if case.interaction is not None:
        relation = "as much as"
        if not case.interaction.low <= 1 <= case.interaction.high:
            relation = "more than" if case.interaction.low > 1 else "less than"
        yield (
            f"all stages together bring {relation} the product of the single stages: "
            f"{case.interaction}"
        )
    if case.beyond_usual is not None:
        stages = " + ".join(case.usual)
        yield (
            f"all stages beside {stages}, which a training script usually has: "
            f"{case.beyond_usual}"
        )
    for title, reasons in (
        ("inactive", case.inactive),
        ("impossible", case.refused),
        ("not measured", case.missing),
    ):
        for reason in dict.fromkeys(reasons.values()):
            names = ", ".join(name for name, text in reasons.items() if text == reason)
            yield f"{title}: {names}: {(reason.strip().splitlines() or [''])[-1]}"
    for variant in case.variants:
        if variant.caught:
            yield (
                f"{variant.name} has no ratio, because it does not do the baseline's work: "
                f"{variant.caught}"
            )
        if variant.traffic is not None and variant.traffic.unknown:
            operations = ", ".join(variant.traffic.unknown)
            yield f"{variant.name} also sends what is not computed: {operations}"
        if variant.not_compared:
            yield (
                f"{variant.name}: its updates were not compared with the baseline's: "
                f"{variant.not_compared}"
            )
    if unjudged := [
        variant.name
        for variant in case.variants
        if variant.stages and variant.verdict is None
    ]:
        yield f"the gate has not judged {', '.join(unjudged)}"
    yield from dict.fromkeys(
        note for variant in case.variants for note in variant.notes
    )
    for variant in case.variants:
        if variant.verdict not in (None, Outcome.PASS):
            yield f"{variant.name}: {variant.verdict}: {variant.verdict_summary}"


def _slope(power: float) -> str:
    grows = (
        f"the time of an update with all stages grows with the power {power:.2f} of its "
        f"least FLOP"
    )
    return f"From case to case, {grows} (1 is in proportion)."


def write_recipe(
    recommendation: Recommendation, case: Case, result: CaseResult, path: Path
) -> None:
    """Writes a recipe that extends the measured one, with the reason behind every stage that is
    off.
    """
    recipe = case.recipe
    measured = result.named(recommendation.variant)
    hardware = (
        f"{cpu_model()}, {amount(result.threads, 'threads')}"
        if result.device == "cpu"
        else result.device
    )
    lines = [
        f"# What to use on {hardware}; measured {time.strftime('%Y-%m-%d')}.",
        f"# The {recommendation.updates:,} updates of a training take "
        f"{recommendation.seconds:,.0f} s with start-up; "
        f"{recommendation.baseline_seconds:,.0f} s without stages.",
    ]
    if measured is not None and measured.stages:
        lines.insert(
            1,
            f"# Complete training steps are {measured.training_ratio} as fast as without stages.",
        )
    # A relative path stays valid if the workspace is moved; a shipped recipe is found by name.
    extended = os.path.relpath(recipe.path.resolve(), path.parent.resolve())
    if (
        ships := shipped().get(recipe.path.stem)
    ) is not None and ships.resolve() == recipe.path.resolve():
        extended = recipe.path.name
    values = recipe.values()
    lines += [f"name: {recipe.name[:90]}_here", f"extends: {dump_inline(extended)}"]
    lines += [*render(_assigned(case, values)), "optimization:"]
    for kind in recipe.stages:
        if kind in recommendation.stages:
            lines.append(f"  {kind}: {dump_inline(values['optimization'][kind])}")
        else:
            lines.append(
                f"  {kind}: off  # {' '.join(recommendation.reasons[kind].split())}"
            )
    lines += [f"  {kind}: off" for kind in recipe.off]
    write_text(path, "\n".join([*lines, ""]))


def _assigned(case: Case, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the assignments of the case, without stages and secrets, as nested mappings."""
    assigned: dict[str, Any] = {}
    for assignment in case.sets:
        path = assignment.partition("=")[0].split(".")
        if path[0] not in ("optimization", "name") and MASK not in str(
            value := reduce(getitem, path, values)
        ):
            mapping = assigned
            for key in path[:-1]:
                mapping = mapping.setdefault(key, {})
            mapping[path[-1]] = value
    return assigned
