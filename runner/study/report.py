"""The plan and the results of a study: tables for a terminal, and a self-contained page."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import JustifyMethod
from rich.table import Table

from runner.recipe.document import dump_inline
from runner.recipe.rendering import render
from runner.study.config import short, spelled
from runner.study.pictures import SLICE, draw
from runner.system.console import CleanText, Console
from runner.system.errors import UsageError
from runner.system.files import make_folder, remove, write_durably
from runner.system.lines import figure, print_wrapped, wrapped
from runner.system.plots import NO_PLOTS
from runner.system.secrets import redact
from runner.system.synthetic import SYNTHETIC_REMARK

if TYPE_CHECKING:
    from runner.study.definition import StudyPlan
    from runner.study.summary import Row, Summary

REPORT = "report.html"
NO_VALUES = "No plots: no trial has a value yet."
_COMMENT = 78  # columns of a recipe's comment, without its sign
_MOST_ROWS = 12
_NARROWEST = 8


def show(summary: Summary, console: Console, where: Sequence[str] = ()) -> None:
    """Prints the best trials, what decided, what stages were worth, failures and budget, and where to look next."""
    if summary.best:
        title = "Pareto front" if len(summary.objectives) > 1 else "best trial"
        _print_trials(summary, summary.best[:_MOST_ROWS], f"{summary.name}: {title}", console)
        if given := [row for row in summary.rows if row.is_recipe and row.values and not row.best]:
            _print_trials(summary, given, "the recipe unchanged", console)
    else:
        console.print(CleanText(f"{summary.name}: no trial has a valid result yet", style="bold"))
    counting = sum(row.cause == "done" for row in summary.rows)
    for name, shares in summary.importance.items():
        told = ", ".join(f"{path} {share:.0%}" for path, share in shares.items() if share >= 0.005)
        console.print(CleanText(f"importance for {name}, from {counting} trials: {told}"))
    if summary.worth:
        columns = {"stage": False, "objective": False, "on": True, "off": True, "effect": True}
        rows = []
        for each in summary.worth:
            on, off = f"{figure(each.on)} ({each.trials_on})", f"{figure(each.off)} ({each.trials_off})"
            effect = f"{figure(each.on - each.off)} [{figure(each.low)}, {figure(each.high)}]"
            rows.append((each.stage, _title(each.objective), on, off, effect))
        _print_table("stages", columns, rows, console)
        confounded = "Other settings differ between these trials too; runner ablate measures a stage alone."
        console.print(CleanText(confounded, style="dim"))
    console.print(*map(CleanText, remarks(summary)), sep="\n")
    print_wrapped("\n".join(where), console)


def remarks(summary: Summary) -> Iterator[str]:
    """Budget, failures and doubts, a line each."""
    if summary.synthetic:
        yield f"data {SYNTHETIC_REMARK}"
    used, budget = summary.used, summary.budget
    pending = used.trials < budget["trials"] and summary.seconds_left is not None
    left = f"; about {_time(summary.seconds_left or 0.0)} left at this pace" if pending else ""
    limit, device = (f" of {_time(budget[n])}" if budget[n] else "" for n in ("seconds", "device_seconds"))
    yield (
        f"budget: {used.trials} of {budget['trials']} trials, {_time(used.seconds)}{limit}, "
        f"{_time(used.device_seconds)}{device} on devices{left}"
    )
    if summary.causes:
        yield "trials: " + ", ".join(f"{count} {cause}" for cause, count in sorted(summary.causes.items()))
    for cause in sorted(set(summary.causes) - {"done", "pruned"}):
        rows = [row for row in summary.rows if row.cause == cause]
        yield f"  {cause} ({', '.join(str(row.number) for row in rows)}): {' '.join(rows[0].reason.split())}"
    if summary.overhead_s is not None:
        yield f"overhead per trial: {summary.overhead_s:.1f} s (median)"
    if summary.disturbed:
        yield f"{summary.disturbed} trials were timed while other programs computed; their speeds are doubtful"


def show_plan(plan: StudyPlan, console: Console) -> None:
    """Prints what a study will try and cost."""
    rows = [(short(path), values, needs) for path, values, needs in plan.space]
    _print_table(f"{plan.name}: {plan.recipe}", {"setting": False, "values": False, "needs": False}, rows, console)
    space = "the space is continuous"
    if plan.configurations is not None:
        space = f"{plan.configurations:,.0f} configurations"
    lines = [
        f"budget: {plan.budget}, {plan.trainings} trainings; {space}",
        f"sampler {plan.sampler}, pruner {plan.pruner}; limits of a training: {', '.join(plan.limits)}",
    ]
    if plan.forecast is not None:
        trial, start, study = plan.forecast.trial_seconds, plan.forecast.start_seconds, plan.forecast.study_seconds
        lines.append(f"forecast: {_time(trial)} per trial ({start:.1f} s of it start-up), {_time(study)} in total")
    console.print(*map(CleanText, lines), *(CleanText(f"* {remark}") for remark in plan.remarks), sep="\n")


def html(summary: Summary, plots: Sequence[Path], hint: str) -> str:
    """Returns a page that contains everything, including plots; ``hint`` is the
    reason if there are none.
    """
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader("runner.study", "."), autoescape=True, trim_blocks=True)
    environment.filters |= {"figure": spelled, "time": _time, "short": short}
    page = environment.get_template("study.html.jinja").render(
        summary=summary, remarks=list(remarks(summary)), hint=hint, slice=SLICE,
        settings=list(dict.fromkeys(path for row in summary.rows for path in row.settings)),
        plots=[(path.stem, base64.b64encode(path.read_bytes()).decode()) for path in plots],
    )  # fmt: skip
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
    return "\n".join([*(f"# {part}" for part in wrapped(head, _COMMENT)), *render(row.recipe)]) + "\n"


def _print_trials(summary: Summary, rows: Sequence[Row], title: str, console: Console) -> None:
    wanted = {f"{_title(n)} {'↑' if each == 'maximize' else '↓'}": True for n, each in summary.objectives.items()}
    cells = []
    for row in rows:
        settings = [f"{short(path)} {spelled(value)}" for path, value in row.settings.items()]
        settings += [f"gate {row.verdict}"] if row.verdict else []
        values = [figure(row.values[name]) for name in summary.objectives]
        cells.append((f"{row.number}{' (recipe)' if row.is_recipe else ''}", *values, ", ".join(settings)))
    _print_table(title, {"trial": True, **wanted, "settings": False}, cells, console)


def _print_table(title: str, columns: Mapping[str, bool], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Prints columns of numbers or not; where it is too wide, titles and settings are folded and never a number."""
    table = Table(title=CleanText(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, is_number in columns.items():
        how: JustifyMethod = "right" if is_number else "left"
        table.add_column(CleanText(name), justify=how, overflow="fold", no_wrap=name == "setting")
    for row in rows:
        table.add_row(*map(CleanText, row))
    if console.measure(table, options=console.options.update(width=1000)).maximum > console.width:
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
