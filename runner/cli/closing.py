"""What a run has come to: the table at the end."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.system.secrets import redact

if TYPE_CHECKING:
    from runner.train.run import RunResult


def show(result: "RunResult", console: Console, headline: Sequence[str]) -> None:
    """Prints what was learnt, how fast, with which stages, and where to find it."""
    table = Table(title=Text(f"{result.run_name}: {result.status}"), title_justify="left", show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, lines in (
        ("learnt", _learnt(result.metrics, headline)),
        ("speed", _speed(result)),
        ("stages", _stages(result)),
        ("run", [f"MLflow id {result.run_id}", result.run_dir]),
        ("next", _next(result)),
    ):
        for position, line in enumerate(lines):
            table.add_row("" if position else label, Text(redact(line)))
    console.print(table)


def _next(result: "RunResult") -> list[str]:
    if result.status != "FINISHED":
        return [result.resume, "runner ls"]
    digits = result.run_name.rpartition("-")[2]
    return [f"runner compare {digits} OTHER_RUN", "runner ui"]


def _learnt(metrics: dict[str, float], headline: Sequence[str]) -> list[str]:
    evaluated = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
    ordered = [name for name in headline if name in evaluated] + sorted(set(evaluated) - set(headline))
    return [f"{name} {evaluated[name]:.4g}" for name in ordered] or ["nothing was evaluated"]


def _speed(result: "RunResult") -> list[str]:
    metrics = result.metrics
    resumed = "" if result.resumed_at is None else f" since it was resumed at {result.resumed_at:,}"
    lines = [f"{result.seconds:.0f} s in all{resumed}"]
    if "perf/update_ms" in metrics:
        first = metrics.get("perf/first_update_seconds", 0.0)
        lines.append(f"{metrics['perf/update_ms']:.3g} ms per update; the first took {first:.1f} s")
    shares = {name: value for name, value in metrics.items() if name.startswith("perf/") and name.endswith("_share")}
    if shares:
        lines.append(", ".join(f"{name[5:-6]} {value:.0%}" for name, value in sorted(shares.items())))
    return lines


def _stages(result: "RunResult") -> list[str]:
    lines = []
    for report in result.stages:
        state = "active" if report.active else f"inactive: {report.reason}"
        lines.append("; ".join([f"{report.kind} {state}", *report.notes]))
    return lines or ["none: this is the baseline"]
