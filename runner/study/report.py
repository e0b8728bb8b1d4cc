"""The plan and the results of a study: tables for a terminal, and a self-contained page."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import JustifyMethod
from rich.table import Table

from runner.recipe.dumping import dump_inline
from runner.recipe.rendering import render
from runner.study.space import short, spelled
from runner.study.study_plots import SLICE, draw
from runner.system.console import CleanText, Console
from runner.system.errors import UsageError
from runner.system.files import make_folder, remove, write_durably
from runner.system.plots import NO_PLOTS
from runner.system.secrets import redact
from runner.system.synthetic import SYNTHETIC_REMARK
from runner.system.text_lines import figure, print_wrapped, wrapped

if TYPE_CHECKING:
    from runner.study.plan import StudyPlan
    from runner.study.summary import Row, Summary, Worth

REPORT = "report.html"
NO_VALUES = "No plots: no trial has a value yet."
# Columns of a comment in a recipe, without its sign.
_COMMENT = 78
_MOST_ROWS = 12
_NARROWEST = 8


def show(summary: Summary, console: Console, where: Sequence[str] = ()) -> None:
    """Prints the best trials, what decided, what stages were worth, failures and budget, and where to look next."""
    if summary.best:
        title = "Pareto front" if len(summary.objectives) > 1 else "best trial"
        _print_trials(summary, summary.best[:_MOST_ROWS], f"{summary.name}: {title}", console)
        recipe_rows = [row for row in summary.rows if row.is_recipe and row.values and not row.best]
        if recipe_rows:
            _print_trials(summary, recipe_rows, "the recipe unchanged", console)
    else:
        console.print(CleanText(f"{summary.name}: no trial has a valid result yet", style="bold"))

    counting = sum(row.cause == "done" for row in summary.rows)
    for name, shares in summary.importance.items():
        shares_text = ", ".join(f"{path} {share:.0%}" for path, share in shares.items() if share >= 0.005)
        console.print(CleanText(f"importance for {name}, from {counting} trials: {shares_text}"))
    if summary.worth:
        _print_worth(summary.worth, console)
    console.print(*map(CleanText, remarks(summary)), sep="\n")
    print_wrapped("\n".join(where), console)


def remarks(summary: Summary) -> Iterator[str]:
    """Budget, failures and doubts, a line each."""
    if summary.synthetic:
        yield f"data {SYNTHETIC_REMARK}"
    yield _budget_remark(summary)

    if summary.causes:
        yield "trials: " + ", ".join(f"{count} {cause}" for cause, count in sorted(summary.causes.items()))
    for cause in sorted(set(summary.causes) - {"done", "pruned"}):
        rows = [row for row in summary.rows if row.cause == cause]
        numbers = ", ".join(str(row.number) for row in rows)
        # Only the first reason: trials of one cause usually end alike.
        reason = " ".join(rows[0].reason.split())
        yield f"  {cause} ({numbers}): {reason}"

    if summary.overhead_s is not None:
        yield f"overhead per trial: {summary.overhead_s:.1f} s (median)"
    if summary.disturbed:
        yield f"{summary.disturbed} trials were timed while other programs computed; their speeds are doubtful"


def _budget_remark(summary: Summary) -> str:
    used = summary.used
    budget = summary.budget
    seconds_limit = f" of {_time(budget['seconds'])}" if budget["seconds"] else ""
    device_limit = f" of {_time(budget['device_seconds'])}" if budget["device_seconds"] else ""
    remaining = ""
    if used.trials < budget["trials"] and summary.seconds_left is not None:
        remaining = f"; about {_time(summary.seconds_left)} left at this pace"
    return (
        f"budget: {used.trials} of {budget['trials']} trials, {_time(used.seconds)}{seconds_limit}, "
        f"{_time(used.device_seconds)}{device_limit} on devices{remaining}"
    )


def show_plan(plan: StudyPlan, console: Console) -> None:
    """Prints what a study will try and cost."""
    rows = [(short(path), values, needs) for path, values, needs in plan.space]
    _print_table(
        f"{plan.name}: {plan.recipe}",
        {"setting": False, "values": False, "needs": False},
        rows,
        console,
    )
    space = "the space is continuous"
    if plan.configurations is not None:
        space = f"{plan.configurations:,.0f} configurations"
    lines = [
        f"budget: {plan.budget}, {plan.trainings} trainings; {space}",
        f"sampler {plan.sampler}, pruner {plan.pruner}; limits of a training: {', '.join(plan.limits)}",
    ]
    if plan.forecast is not None:
        forecast = plan.forecast
        lines.append(
            f"forecast: {_time(forecast.trial_seconds)} per trial ({forecast.start_seconds:.1f} s of it start-up), "
            f"{_time(forecast.study_seconds)} in total"
        )
    console.print(*map(CleanText, lines), *(CleanText(f"* {remark}") for remark in plan.remarks), sep="\n")


def html(summary: Summary, plots: Sequence[Path], hint: str) -> str:
    """Returns a page that contains everything, including plots; ``hint`` is the
    reason if there are none.
    """
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("runner.study", "."),
        autoescape=True,
        trim_blocks=True,
    )
    environment.filters |= {"figure": spelled, "time": _time, "short": short}
    template = environment.get_template("study.html.jinja")
    page = template.render(
        summary=summary,
        remarks=list(remarks(summary)),
        hint=hint,
        slice=SLICE,
        settings=list(dict.fromkeys(path for row in summary.rows for path in row.settings)),
        plots=[(path.stem, base64.b64encode(path.read_bytes()).decode()) for path in plots],
    )
    return redact(page)


def write_report(summary: Summary, folder: Path) -> list[Path]:
    """Writes report, pictures and the recipes of the best trials; returns all files."""
    best = folder / "best"
    make_folder(best)
    plots = draw(summary, folder)
    hint = NO_PLOTS if any(row.values for row in summary.rows) else NO_VALUES
    write_durably(folder / REPORT, html(summary, plots, hint))
    for old in best.glob("*.yaml"):
        remove(old)
    recipes = [best / f"trial-{row.number:04d}.yaml" for row in summary.best]
    for row, path in zip(summary.best, recipes, strict=True):
        write_durably(path, recipe_text(summary, row.number))
    return [folder / REPORT, *plots, *recipes]


def recipe_text(summary: Summary, number: int) -> str:
    """The recipe of a trial as YAML that ``runner run`` accepts and that reproduces it; a ``UsageError`` if none."""
    row = next((row for row in summary.rows if row.number == number), None)
    if row is None or row.recipe is None:
        raise UsageError(f"study '{summary.name}' has no trial {number} with a recipe")
    values = ", ".join(f"{name} {value:.6g}" for name, value in row.values.items())
    settings = ", ".join(f"{path}: {dump_inline(value)}" for path, value in row.settings.items())
    head = f"Trial {number} of study {summary.name}: {values or row.cause}.\nSearched: {settings}"
    comments = [f"# {line}" for line in wrapped(head, _COMMENT)]
    return "\n".join([*comments, *render(row.recipe)]) + "\n"


def _print_worth(worths: Sequence[Worth], console: Console) -> None:
    """Prints the worth of every stage, with a remark on what it is not."""
    rows = []
    for worth in worths:
        on = f"{figure(worth.on)} ({worth.trials_on})"
        off = f"{figure(worth.off)} ({worth.trials_off})"
        effect = f"{figure(worth.on - worth.off)} [{figure(worth.low)}, {figure(worth.high)}]"
        rows.append((worth.stage, _title(worth.objective), on, off, effect))
    columns = {"stage": False, "objective": False, "on": True, "off": True, "effect": True}
    _print_table("stages", columns, rows, console)
    confounded = "Other settings differ between these trials too; runner ablate measures a stage alone."
    console.print(CleanText(confounded, style="dim"))


def _print_trials(summary: Summary, rows: Sequence[Row], title: str, console: Console) -> None:
    columns = {"trial": True}
    for name, direction in summary.objectives.items():
        arrow = "↑" if direction == "maximize" else "↓"
        columns[f"{_title(name)} {arrow}"] = True
    columns["settings"] = False

    cells = []
    for row in rows:
        settings = [f"{short(path)} {spelled(value)}" for path, value in row.settings.items()]
        if row.verdict:
            settings.append(f"gate {row.verdict}")
        values = [figure(row.values[name]) for name in summary.objectives]
        number = f"{row.number} (recipe)" if row.is_recipe else str(row.number)
        cells.append((number, *values, ", ".join(settings)))
    _print_table(title, columns, cells, console)


def _print_table(title: str, columns: Mapping[str, bool], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Prints columns of numbers or not; where it is too wide, titles and settings are folded and never a number."""
    table = Table(
        title=CleanText(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name, is_number in columns.items():
        justify: JustifyMethod = "right" if is_number else "left"
        table.add_column(
            CleanText(name),
            justify=justify,
            overflow="fold",
            no_wrap=name == "setting",
        )
    for row in rows:
        table.add_row(*map(CleanText, row))

    unlimited = console.options.update(width=1000)
    if console.measure(table, options=unlimited).maximum > console.width:
        for column in table.columns:
            if column.justify == "right":
                words = (word for cell in column.cells for word in str(cell).split())
                column.width = max(_NARROWEST, *map(len, words))
    console.print(table)


def _title(metric: str) -> str:
    """A metric's name that a narrow column breaks between words."""
    return metric.replace("/", ": ").replace("_", " ")


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
