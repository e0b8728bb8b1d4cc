"""The verbs of ``runner models``: versions of what runs have trained."""

import time
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option, Typer

from runner.cli.common import AsJson, Quiet, Verb, output, say, working
from runner.cli.runs import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.system.console import Console
    from runner.tracking.versions import Version

app = Typer(no_args_is_help=True, rich_markup_mode="rich")
Name = Annotated[str | None, Option("--name", metavar="NAME", help="Of the model; the recipe's unless told.")]
Only = Annotated[str | None, Argument(metavar="[NAME]", help="Versions of this model alone.", show_default=False)]
Promoted = Annotated[str, Argument(metavar="NAME", help="Of the model.")]
Number = Annotated[int, Argument(metavar="VERSION", min=1, help="Which of its versions.")]


@app.callback()
def models() -> None:
    """Give the models of runs versions, and say which is the champion.

    A version is named [bold]NAME/3[/], the champion [bold]NAME@champion[/], wherever a trained model is named:
    runner serve, runner verify --of, runner.load_model.
    """


@app.command(cls=Verb)
def register(run: Run = "latest", name: Name = None, quiet: Quiet = False, as_json: AsJson = False) -> None:
    """Give the model of a finished run a version, with the digest of its weights.

    [bold]runner models register grasp_diffusion-3f2a91c0 --name grasps[/]
    """
    with working("models register", f"looking at {run}", quiet):
        from runner.train.versions import register as registered

        version = registered(run, name)
    output(as_json, version.data, _show, [version])


@app.command("list", cls=Verb)
def list_versions(name: Only = None, as_json: AsJson = False) -> None:
    """List versions: number, aliases, run, what ``runner verify`` said, digest of the weights."""
    with working("models list", "asking MLflow"):
        from runner.tracking import Workspace
        from runner.tracking.store import Store
        from runner.tracking.versions import Versions

        found = Versions(Store(Workspace(), reading=True)).all(name)
    output(as_json, lambda: {"versions": [each.data() for each in found]}, _show, found)


@app.command(cls=Verb)
def promote(name: Promoted, version: Number, quiet: Quiet = False, as_json: AsJson = False) -> None:
    """Make a version the champion of its model, if ``runner verify RECIPE --of NAME/VERSION`` has passed it.

    The exit code is 3 if it has not.

    [bold]runner models promote grasps 3[/]
    """
    with working("models promote", f"looking at {name}/{version}", quiet):
        from runner.train.versions import promote as promoted

        champion = promoted(name, version)
    output(as_json, champion.data, _show, [champion])


def _show(versions: "Sequence[Version]", console: "Console") -> None:
    """Prints a row for every version."""
    from rich.table import Table

    if not versions:
        say("no model has a version yet; give one to a run's: runner models register RUN")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("version", "alias", "run", "verified", "weights", "since"):
        table.add_column(title, overflow="fold")
    for each in versions:
        told = each.judgement
        verified = "-" if told is None else f"{told.outcome} ({told.recipe})"
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.created))
        table.add_row(each.reference, ", ".join(each.aliases), each.run, verified, each.weights[:12], since)
    console.print(table)
