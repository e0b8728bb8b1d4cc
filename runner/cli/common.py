"""What verbs share: their options, and how they talk."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runner.system.errors import RunnerError
from runner.system.secrets import redact, redact_values

if TYPE_CHECKING:
    from runner.plugin.registry import Registry

SCHEMA_VERSION = 1
"""Of everything that ``--json`` prints."""

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, the lock of a run, or the name of a recipe that ships.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B.C=VALUE", help="Override a value of the recipe; may be repeated."),
]
PluginOption = Annotated[
    list[Path] | None,
    typer.Option("--plugin", metavar="FILE", help="A Python file with plugins of your own; may be repeated."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def open_registry(plugin_files: list[Path] | None) -> "Registry":
    """The plugins of this environment and of the files on the command line."""
    from runner.plugin.registry import Registry

    return Registry(plugin_files or ())


def print_json(data: dict[str, Any]) -> None:
    """Prints one JSON object with its schema version on stdout, secrets masked."""
    whole = {"schema_version": SCHEMA_VERSION, **redact_values(data)}
    typer.echo(json.dumps(whole, indent=2, ensure_ascii=False))


def report(error: RunnerError) -> None:
    """Tells the user on stderr what went wrong, without wrapping a line and without secrets."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for line in redact(str(error)).split("\n"):
        console.print(Text(line, style="dim" if line.startswith("    ") else "red"))


def say(text: str) -> None:
    """Talks to the user on stderr."""
    typer.echo(text, err=True)
