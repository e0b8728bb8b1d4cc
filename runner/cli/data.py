"""The verbs of published data: ``data list``, ``get`` and ``where``."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from runner.cli.common import AsJson, PluginFiles, print_json, registry_of, say
from runner.system.errors import RunnerError, UsageError

if TYPE_CHECKING:
    from runner.plugin.files import DataFile
    from runner.plugin.registry import Registry

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""List, fetch and find the published files that data sources read.

They are looked for in a recipe's [bold]data.root[/], then in RUNNER_DATA, then in the user's cache; they are fetched
into RUNNER_DATA if it is set, or else into the cache.

[bold]runner data get tinyshakespeare.txt[/]
""",
)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The name of a file that 'runner data list' shows.")]


@app.command("list")
def list_files(plugin: PluginFiles = None, as_json: AsJson = False) -> None:
    """List the files: what each is, which sources read it, and whether it is here."""
    from runner.plugin.files import find

    shown: list[dict[str, Any]] = []
    for file, kinds in _files(registry_of(plugin)).items():
        path = find(file.name)
        facts = {"name": file.name, "size": file.size, "sources": kinds, "about": file.about, "url": file.url}
        shown.append({**facts, "sha256": file.sha256, "path": None if path is None else str(path)})
    if as_json:
        print_json({"files": shown})
        return
    for each in shown:
        where = each["path"] or "not here"
        typer.echo(f"{each['name']}  {each['size']:,} bytes, for {', '.join(each['sources'])}: {where}")
        typer.echo(f"    {each['about']}")


@app.command()
def get(name: NameArgument, plugin: PluginFiles = None) -> None:
    """Download a file from its pinned address, and check its SHA-256; prints its path."""
    typer.echo(fetched(_named(name, registry_of(plugin))))


@app.command()
def where(name: NameArgument, plugin: PluginFiles = None) -> None:
    """Print the path of a file that is here."""
    from runner.plugin.files import find, folders

    file = _named(name, registry_of(plugin))
    path = find(name, None, [file])
    if path is None:
        looked = ", ".join(map(str, folders()))
        raise UsageError(f"no '{name}' in {looked}; get it with: runner data get {name}")
    typer.echo(path)


def fetched(file: "DataFile") -> str:
    """Downloads a file unless it is here, and says so; returns its path."""
    from runner.plugin.files import fetch

    path, downloaded = fetch(file)
    if downloaded:
        say(f"fetched {file.name} ({file.size:,} bytes) from {file.url}")
    return str(path)


def _files(registry: "Registry") -> "dict[DataFile, list[str]]":
    """Every published file with the kinds that read it; a source that cannot be imported has none."""
    found: dict[DataFile, list[str]] = {}
    for kind in registry.kinds("data"):
        try:
            face = registry.get("data", kind)
        except RunnerError as error:
            say(str(error))
            continue
        for file in face.files:
            found.setdefault(file, []).append(kind)
    return found


def _named(name: str, registry: "Registry") -> "DataFile":
    from runner.system.names import suggestion

    files = {file.name: file for file in _files(registry)}
    if name not in files:
        raise UsageError(f"no source reads a published file '{name}'{suggestion(name, files)}")
    return files[name]
