"""Commands of ``runner models``: versions of trained models."""

import time
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option, Typer

from runner.cli.common import AsJson, Quiet, Run, output, say, working
from runner.cli.help import Verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.system.console import Console
    from runner.tracking.versions import Version

_TITLES = ("version", "alias", "verified", "run", "created", "weights")
_ENDLESS = 10_000
app = Typer(no_args_is_help=True, rich_markup_mode="rich")
Name = Annotated[
    str | None,
    Option("--name", metavar="NAME", help="Name of the model; by default that of the recipe."),
]
Only = Annotated[
    str | None,
    Argument(metavar="[NAME]", help="List only versions of this model.", show_default=False),
]
Promoted = Annotated[str, Argument(metavar="NAME", help="Name of the model.")]
Number = Annotated[int, Argument(metavar="VERSION", min=1, help="Number of the version.")]


@app.callback()
def models() -> None:
    """Register trained models as versions, and promote a version to champion.

    A version is named [bold]NAME/3[/], the champion [bold]NAME@champion[/]. Both names work
    wherever a trained model is named: runner serve, runner verify --of, runner.load_model.
    """


@app.command(cls=Verb)
def register(run: Run = "latest", name: Name = None, quiet: Quiet = False, as_json: AsJson = False) -> None:
    """Register the model of a finished run as a version, with the digest of its weights.

    [bold]runner models register grasp_diffusion-3f2a91c0 --name grasps[/]
    """
    with working("models register", f"looking at {run}", quiet):
        from runner.training.model_versions import register as registered

        version = registered(run, name)
    output(as_json, version.data, _show, [version])


@app.command("list", cls=Verb)
def list_versions(name: Only = None, as_json: AsJson = False) -> None:
    """List the versions with aliases, run, result of ``runner verify``, and digest of the weights."""
    with working("models list", "querying MLflow"):
        from runner.tracking import Workspace
        from runner.tracking.store import EmptyError, Store
        from runner.tracking.versions import Versions

        try:
            versions = Versions(Store(Workspace(), reading=True)).all(name)
        # A workspace without runs has no models, which is not an error.
        except EmptyError:
            versions = []
    output(as_json, lambda: {"versions": [version.data() for version in versions]}, _show, versions)


@app.command(cls=Verb)
def promote(name: Promoted, version: Number, quiet: Quiet = False, as_json: AsJson = False) -> None:
    """Promote a version to champion, if ``runner verify RECIPE --of NAME/VERSION`` has passed it.

    The exit code is 3 if it has not been passed.

    [bold]runner models promote grasps 3[/]
    """
    with working("models promote", f"looking at {name}/{version}", quiet):
        from runner.training.model_versions import promote as promoted

        champion = promoted(name, version)
    output(as_json, champion.data, _show, [champion])


def _show(versions: "Sequence[Version]", console: "Console") -> None:
    """Prints a row for every version."""
    from rich.table import Table

    from runner.system.text_lines import print_wrapped

    if not versions:
        say("no model is registered yet; register one with: runner models register RUN")
        return
    rows = [_row(version) for version in versions]
    # Words are never split: a narrow screen gets fewer columns.
    for titles in (_TITLES, _TITLES[:-1], _TITLES[:-2]):
        table = Table(box=None, pad_edge=False)
        for title in titles:
            table.add_column(title, no_wrap=True)
        for row in rows:
            table.add_row(*row[: len(titles)])
        if console.measure(table, options=console.options.update(width=_ENDLESS)).maximum <= console.width:
            console.print(table)
            return
    for row in rows:
        for number, (title, cell) in enumerate(zip(_TITLES, row, strict=True)):
            print_wrapped(cell if not number else f"    {title}: {cell or '-'}", console, hang=8)


def _row(version: "Version") -> list[str]:
    """Returns the cells of a version, the most important first."""
    judgement = version.judgement
    verified = "-" if judgement is None else f"{judgement.outcome} ({judgement.recipe})"
    created = time.strftime("%Y-%m-%d %H:%M", time.localtime(version.created))
    aliases = ", ".join(version.aliases)
    return [version.reference, aliases, verified, version.run, created, version.weights[:12]]
