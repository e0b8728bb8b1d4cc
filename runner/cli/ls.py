"""The command ``ls``: lists the runs of the workspace."""

from typing import Annotated, Literal

from typer import Option

from runner.cli import completion
from runner.cli.common import AsJson, emit, output, run_folders
from runner.system.errors import UsageError

Where = Annotated[
    list[str] | None,
    Option(
        metavar="METRIC>NUMBER",
        help="Only runs whose newest value fulfils this; also <, <=, >=, = and !=. Repeatable.",
    ),
]
OfRecipe = Annotated[
    str | None,
    Option(
        "--recipe",
        metavar="NAME",
        help="Only runs of this recipe; * matches anything.",
        autocompletion=completion.recipes,
    ),
]
OfKind = Annotated[
    Literal["run", "ablation", "study", "seeds", "folds", "grid"] | None,
    Option(
        "--kind",
        metavar="KIND",
        help="Only this kind: run, ablation, study, seeds, folds or grid; the last three are groups of runs.",
    ),
]
Columns = Annotated[
    str | None,
    Option(
        metavar="NAME,...",
        help="One line per run with these columns: fields, metrics (eval/loss), settings (optimizer.lr).",
    ),
]
Sort = Annotated[
    str | None,
    Option(metavar="COLUMN", help="Sort by a column, the smallest first; without it, the newest is first."),
]
Reverse = Annotated[bool, Option("--reverse", help="The other way round.")]
AsCsv = Annotated[
    bool,
    Option("--csv", help="Print a table as CSV: the columns, or fields, metrics and overrides."),
]
Since = Annotated[
    str | None,
    Option(
        metavar="AGE|DATE",
        help="Only runs that started at most 2d, 3h or 30min ago, or since 2026-01-31.",
    ),
]


def ls(
    where: Where = None,
    recipe: OfRecipe = None,
    kind: OfKind = None,
    since: Since = None,
    columns: Columns = None,
    sort: Sort = None,
    reverse: Reverse = False,
    as_csv: AsCsv = False,
    as_json: AsJson = False,
) -> None:
    """List the runs, ablations, studies and groups of seeds of this workspace.

    The list contains status, progress, objective and overridden settings. A group of seeds has the
    mean of its runs with the 95 % interval; its runs are listed below it.

    Runs whose process has crashed are set to KILLED, here and in MLflow.

    [bold]runner ls[/]

    [bold]runner ls --recipe 'marl_*' --since 2d --where 'eval/return>0'[/]

    [bold]runner ls --columns name,optimizer.lr,eval/loss --sort eval/loss[/]
    """
    from runner.tracking import Workspace
    from runner.tracking.listing import listing, show
    from runner.tracking.run_table import csv_of, show_table, sorted_runs, table_rows
    from runner.tracking.selection import select

    if as_csv and as_json:
        raise UsageError("--csv and --json are two forms of one result: use one of them")
    run_folders("ls")
    all_runs = listing(Workspace())
    selected = select(all_runs, where or (), recipe, since, kind)
    runs = sorted_runs(selected, sort, reverse)
    none = f"none of {len(all_runs)} matches" if all_runs else ""
    names = [name.strip() for name in columns.split(",")] if columns else []
    if as_csv:
        emit(csv_of(table_rows(runs, names)))
        return
    if names and not as_json:
        output(as_json, dict, show_table, table_rows(runs, names), none)
        return
    output(as_json, lambda: {"runs": runs}, show, runs, none)
