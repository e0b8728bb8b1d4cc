"""What a study has come to: tables for a terminal, and one HTML page that needs nothing beside it."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.study.space import figure
from runner.system.secrets import redact

if TYPE_CHECKING:
    from runner.study.plan import StudyPlan
    from runner.study.summary import Row, Summary

_MOST_ROWS = 12
_NARROWEST = 8
_TEMPLATE = "study.html.jinja"
_CONFOUNDED = "Across the study, where other settings differ too: runner ablate measures a stage by itself."


def show(summary: Summary, console: Console, where: Sequence[str] = ()) -> None:
    """Prints the best trials, what decided, what stages were worth, failures and budget.

    Args:
        summary: of the study.
        console: wide or narrow.
        where: what to look at next.
    """
    title = "Pareto front" if len(summary.objectives) > 1 else "best trial"
    if summary.best:
        _print(_trials(summary, summary.best[:_MOST_ROWS], f"{summary.name}: {title}"), console)
        recipe = next((row for row in summary.rows if row.is_recipe), None)
        if recipe is not None and not recipe.best and recipe.values:
            _print(_trials(summary, [recipe], "the recipe as it is"), console)
    else:
        console.print(Text(f"{summary.name}: no trial counts yet", style="bold"))
    for name, shares in summary.importance.items():
        told = ", ".join(f"{path} {share:.0%}" for path, share in shares.items() if share >= 0.005)
        console.print(Text(f"what decides about {name}, by {len(_counting(summary))} trials: {told}"))
    if summary.worth:
        _print(_worth(summary), console)
        console.print(Text(_CONFOUNDED, style="dim"))
    for line in remarks(summary):
        console.print(Text(line))
    for line in where:
        console.print(Text(line), soft_wrap=True)


def remarks(summary: Summary) -> Iterator[str]:
    """Budget, failures and doubts, a line each."""
    used, budget = summary.used, summary.budget
    left = "" if summary.seconds_left is None else f"; about {_time(summary.seconds_left)} left at this pace"
    limit = f" of {_time(budget['seconds'])}" if budget["seconds"] else ""
    device = f" of {_time(budget['device_seconds'])}" if budget["device_seconds"] else ""
    yield (
        f"budget: {used.trials} of {budget['trials']} trials, {_time(used.seconds)}{limit}, "
        f"{_time(used.device_seconds)}{device} on devices{left if used.trials < budget['trials'] else ''}"
    )
    if summary.causes:
        yield "trials: " + ", ".join(f"{count} {cause}" for cause, count in sorted(summary.causes.items()))
    for cause in sorted(set(summary.causes) - {"done", "pruned"}):
        example = next(row for row in summary.rows if row.cause == cause)
        numbers = ", ".join(str(row.number) for row in summary.rows if row.cause == cause)
        yield f"  {cause} ({numbers}): {' '.join(example.reason.split())}"
    if summary.overhead_s is not None:
        yield f"around a trial's training: {summary.overhead_s:.1f} s in the median (start, log, finish)"
    if summary.disturbed:
        yield f"{summary.disturbed} trials were timed while others used the processor: their speed is in doubt"


def show_plan(plan: StudyPlan, console: Console) -> None:
    """Prints what a study will try and cost."""
    table = Table(title=Text(f"{plan.name}: {plan.recipe}"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for column in ("values", "needs"):
        table.add_column(column, overflow="fold")
    for path, values, needs in plan.space:
        table.add_row(*map(Text, (_short(path), values, needs)))
    console.print(table)
    many = "endlessly many" if plan.configurations == float("inf") else f"{plan.configurations:,.0f}"
    lines = [
        f"budget: {plan.budget}, {plan.trainings} trainings in all, of {many} configurations",
        f"sampler {plan.sampler}, pruner {plan.pruner}; limits of a training: {', '.join(plan.limits)}",
    ]
    if plan.forecast is not None:
        trial, start, study = plan.forecast.trial_seconds, plan.forecast.start_seconds, plan.forecast.study_seconds
        lines.append(f"forecast: {_time(trial)} a trial, with {start:.1f} s to start; {_time(study)} the study")
    for line in [*lines, *(f"* {remark}" for remark in plan.remarks)]:
        console.print(Text(line))


def html(summary: Summary, plots: Sequence[Path], hint: str) -> str:
    """One page with everything in it.

    Args:
        summary: of the study.
        plots: pictures to put into the page.
        hint: why there are none, if so.
    """
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader("runner.study", "."), autoescape=True, trim_blocks=True)
    environment.filters |= {"figure": figure, "time": _time}
    pictures = [(path.stem, base64.b64encode(path.read_bytes()).decode()) for path in plots]
    page = environment.get_template(_TEMPLATE).render(
        summary=summary, settings=_varying(summary.rows), remarks=list(remarks(summary)), plots=pictures, hint=hint
    )
    return redact(page)


def _print(table: Table, console: Console) -> None:
    """Prints a table; where it is too wide, titles and settings are folded and never a number."""
    if console.measure(table, options=console.options.update(width=1000)).maximum > console.width:
        for column in table.columns:
            if column.justify == "right":
                words = (word for cell in column.cells for word in str(cell).split())
                column.width = max(_NARROWEST, *map(len, words))
    console.print(table)


def _trials(summary: Summary, rows: Sequence[Row], title: str) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("trial", justify="right")
    for name, direction in summary.objectives.items():
        wanted = Text(f"{_title(name)} {'↑' if direction == 'maximize' else '↓'}")
        table.add_column(wanted, justify="right", overflow="fold")
    table.add_column("settings", overflow="fold")
    for row in rows:
        number = f"{row.number}{' (recipe)' if row.is_recipe else ''}"
        values = [figure(row.values[name]) for name in summary.objectives]
        verdict = [f"gate {row.verdict}"] if row.verdict else []
        settings = [f"{_short(path)} {figure(value)}" for path, value in row.settings.items()]
        table.add_row(number, *values, Text(", ".join(settings + verdict)))
    return table


def _worth(summary: Summary) -> Table:
    table = Table(title=Text("stages"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("stage", "objective"):
        table.add_column(column, overflow="fold")
    for column in ("on", "off", "effect"):
        table.add_column(column, justify="right", overflow="fold")
    for each in summary.worth:
        difference = f"{figure(each.on - each.off)} [{figure(each.low)}, {figure(each.high)}]"
        on, off = f"{figure(each.on)} ({each.trials_on})", f"{figure(each.off)} ({each.trials_off})"
        table.add_row(*map(Text, (each.stage, _title(each.objective), on, off, difference)))
    return table


def _counting(summary: Summary) -> list[Row]:
    """The trials that importance and the worth of stages look at."""
    return [row for row in summary.rows if row.cause == "done"]


def _varying(rows: Sequence[Row]) -> list[str]:
    """The paths of all settings that were searched, in order."""
    return list(dict.fromkeys(path for row in rows for path in row.settings))


def _title(metric: str) -> str:
    """A metric's name that a narrow column breaks between words."""
    return metric.replace("/", ": ").replace("_", " ")


def _short(path: str) -> str:
    return path.removeprefix("optimization.")


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
