"""The command ``compare``: prints the differences between runs."""

from typing import Annotated

from typer import Argument, Option

from runner.cli import completion
from runner.cli.common import AsJson, output, working

Runs = Annotated[
    list[str],
    Argument(
        metavar="RUN RUN...",
        help="Ids, unique beginnings of ids, names, or 'latest'.",
        autocompletion=completion.comparable,
    ),
]
Everything = Annotated[
    bool,
    Option("--all", help="Also show what always differs or cannot matter: speed, load, process, tools."),
]


def compare(runs: Runs, everything: Everything = False, as_json: AsJson = False) -> None:
    """Print the differences between runs: primary metrics, settings, environment, other metrics.

    For two groups that were trained with --seeds or with --folds, it prints the difference of the
    means with a confidence interval, of pairs if they have the same seeds or folds.

    [bold]runner compare latest 3f2a91c0[/]
    """
    with working("compare", "reading the runs"):
        from runner.tracking import Workspace, comparison, comparison_view, group_comparison

        groups = group_comparison.compare(Workspace(), runs)
        compared = {} if groups is not None else comparison.compare(Workspace(), runs)
    if groups is not None:
        from runner.cli.seeds import show_comparison

        output(as_json, lambda: groups, show_comparison, groups)
        return
    output(as_json, lambda: compared, comparison_view.show, compared, everything)
