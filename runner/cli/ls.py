"""The command ``ls``: lists the runs of the workspace."""

from typing import Annotated, Literal

from typer import Option

from runner.cli import completion
from runner.cli.common import AsJson, output, run_folders

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
    Literal["run", "ablation", "study", "seeds"] | None,
    Option("--kind", help="Only this kind; seeds are groups of runs."),
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
    as_json: AsJson = False,
) -> None:
    """List the runs, ablations, studies and groups of seeds of this workspace.

    The list contains status, progress, objective and overridden settings. A group of seeds has the
    mean of its runs with the 95 % interval; its runs are listed below it.

    Runs whose process has crashed are set to KILLED, here and in MLflow.

    [bold]runner ls[/]

    [bold]runner ls --recipe 'marl_*' --since 2d --where 'eval/return>0'[/]
    """
    from runner.tracking import Workspace
    from runner.tracking.listing import listing, show
    from runner.tracking.selection import select

    run_folders("ls")
    all_runs = listing(Workspace())
    runs = select(all_runs, where or (), recipe, since, kind)
    none = f"none of {len(all_runs)} matches" if all_runs else ""
    output(as_json, lambda: {"runs": runs}, show, runs, none)
