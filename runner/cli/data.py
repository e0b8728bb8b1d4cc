"""Commands for data: ``data list``, ``get``, ``where``, ``prepare`` and ``show``."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option, Typer

from runner.cli.common import (
    AsJson,
    Bare,
    Plugins,
    Quiet,
    RecipeName,
    Sets,
    emit,
    load_recipe,
    print_json,
    registry_of,
    say,
    settings,
    sharing_processor,
    tell,
    working,
)
from runner.cli.help import Verb
from runner.system.errors import RunnerError, UsageError
from runner.system.suggestions import suggestion

if TYPE_CHECKING:
    from runner.plugin.files import DataFile
    from runner.plugin.registry import Registry

data = Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""List, fetch and locate published data files, convert texts to tokens, and draw the data of a recipe.

Files are searched in the recipe's data.root, then in RUNNER_DATA, then in the user's cache. They are fetched into
RUNNER_DATA if it is set, otherwise into the cache.

[bold]runner data get tinyshakespeare.txt[/]

[bold]runner data show graf --out cameras.png[/]
""",
)
FileName = Annotated[str, Argument(metavar="NAME", help="Name of a file that 'runner data list' prints.")]
Out = Annotated[
    Path | None,
    Option(
        "--out",
        metavar="FILE.png",
        help="File of the plot; by default NAME_data.png in the current folder.",
    ),
]
Texts = Annotated[list[Path], Argument(metavar="TEXT...", help="Text files in UTF-8, in this order.")]
TokenizerName = Annotated[
    str,
    Option("--tokenizer", metavar="NAME", help="bytes, characters, tiktoken:gpt2, or a file tokenizer.json."),
]
TokenFile = Annotated[Path, Option("--out", metavar="FILE", help="File of tokens, which replaces an older one.")]


@data.command("list", cls=Verb)
def list_files(plugin: Plugins = None, as_json: AsJson = False) -> None:
    """List the files: content, sources that read them, and path if present."""
    from runner.plugin.files import find

    entries: list[dict[str, Any]] = []
    for file, kinds in _files(registry_of(plugin)).items():
        path = find(file.name)
        entries.append({**asdict(file), "sources": kinds, "path": None if path is None else str(path)})
    if as_json:
        print_json({"files": entries})
        return
    for entry in entries:
        location = entry["path"] or "not on this machine"
        tell(f"{entry['name']}  {entry['size']:,} bytes, for {', '.join(entry['sources'])}: {location}")
        tell(f"    {entry['about']}")


@data.command(cls=Verb)
def get(name: FileName, plugin: Plugins = None) -> None:
    """Download a file from its pinned address, check its SHA-256, and print its path."""
    emit(fetched(_named(name, registry_of(plugin))))


@data.command(cls=Verb)
def where(name: FileName, plugin: Plugins = None) -> None:
    """Print the path of a file on this machine."""
    from runner.plugin.files import find, folders

    path = find(name, None, [_named(name, registry_of(plugin))])
    if path is None:
        raise UsageError(f"no '{name}' in {', '.join(map(str, folders()))}; get it with: runner data get {name}")
    emit(path)


@data.command(cls=Verb)
def prepare(texts: Texts, tokenizer: TokenizerName, out: TokenFile, plugin: Plugins = None) -> None:
    """Convert texts to a file of tokens for the source 'tokens', and print its path.

    A JSON file next to it describes it: tokenizer, vocabulary, type and digest. Texts are read in pieces, so they may
    be larger than the memory.

    [bold]runner data prepare letters.txt --tokenizer bytes --out letters.bin[/]

    [bold]runner data prepare a.txt b.txt --tokenizer tiktoken:gpt2 --out tokens.bin[/]
    """
    missing = next((path for path in texts if not path.is_file()), None)
    if missing is not None:
        raise UsageError(f"no such file: {missing}")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out: no such folder: {out.absolute().parent}")
    if out.resolve() in {path.resolve() for path in texts}:
        raise UsageError(f"--out: {out} is one of the texts; name another file")
    registry = registry_of(plugin)
    sources = (registry.get("data", kind) for kind in registry.kinds("data"))
    source = next(source for source in sources if source.prepares_text)
    say(f"{out.name}: {source.prepare_text(texts, tokenizer, out.absolute())}")
    emit(str(out))


@data.command(cls=Verb)
def show(
    recipe: RecipeName,
    bare: Bare = None,
    out: Out = None,
    sets: Sets = None,
    plugin: Plugins = None,
    quiet: Quiet = False,
) -> None:
    """Draw the training data of a recipe, and print the path of the plot.

    Images with poses are drawn with their cameras and with rays, so that a wrong convention is visible.

    [bold]runner data show graf[/]

    [bold]runner data show graf data.pose=opencv --out cameras.png[/]
    """
    loaded, registry = load_recipe("data show", recipe, settings(sets, bare), plugin)
    path = Path(f"{loaded.name}_data.png") if out is None else out
    with working("data show", f"drawing the data of {loaded.name}", quiet):
        from runner.training.show_data import show_data

        with sharing_processor(loaded):
            show_data(loaded, registry, path)
    emit(path)


def fetched(file: "DataFile") -> str:
    """Downloads a file unless it exists, reports the download, and returns the path."""
    from runner.plugin.files import fetch

    path, downloaded = fetch(file)
    if downloaded:
        say(f"fetched {file.name} ({file.size:,} bytes) from {file.url}")
    return str(path)


def _files(registry: "Registry") -> "dict[DataFile, list[str]]":
    """Every published file with the kinds that read it; a source that cannot be imported has none."""
    kinds_by_file: dict[DataFile, list[str]] = {}
    for kind in registry.kinds("data"):
        try:
            for file in registry.get("data", kind).files:
                kinds_by_file.setdefault(file, []).append(kind)
        except RunnerError as error:
            say(str(error))
    return kinds_by_file


def _named(name: str, registry: "Registry") -> "DataFile":
    files = {file.name: file for file in _files(registry)}
    if name not in files:
        raise UsageError(f"'{name}' is not a published file of any source{suggestion(name, files)}")
    return files[name]
