"""Options and output that commands share. No secret passes through the output."""

import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVarTuple

from typer import Argument, Option

from runner.cli import completion
from runner.cli.results import results
from runner.system.errors import UsageError
from runner.system.secrets import redact_values
from runner.system.stored_json import json_text
from runner.system.terminal import write
from runner.system.text_lines import wrapped

if TYPE_CHECKING:
    from runner.cli.live import LiveBar
    from runner.plugin.registry import Registry
    from runner.recipe.lock import Drift
    from runner.recipe.recipe import Recipe
    from runner.system.console import Console
    from runner.tracking import RunFolder

_Arguments = TypeVarTuple("_Arguments")
# Version of the form of everything that --json prints.
SCHEMA_VERSION = 1

RecipeName = Annotated[
    str,
    Argument(
        metavar="RECIPE",
        help="Recipe file, lock of a run, or name of a recipe that ships.",
        autocompletion=completion.recipes,
    ),
]
Run = Annotated[
    str,
    Argument(
        metavar="[RUN]",
        help="Name, digits or MLflow id of a run, a unique beginning of one, or 'latest'.",
        autocompletion=completion.runs,
    ),
]
OfRun = Annotated[
    str | None,
    Option(
        "--of",
        metavar="RUN",
        help="Use the recipe's inference section, with the model of this run.",
    ),
]
Sets = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="A.B.C=VALUE",
        help="Override a recipe value. Repeatable; the word --set is optional.",
    ),
]
Bare = Annotated[
    list[str] | None,
    Argument(metavar="[A.B.C=VALUE...]", help="The same as --set A.B.C=VALUE.", show_default=False),
]
Plugins = Annotated[
    list[Path] | None,
    Option("--plugin", metavar="FILE", help="Python file with your plugins. Repeatable."),
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Hide the progress.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]


def settings(sets: list[str] | None, bare: list[str] | None) -> list[str]:
    """Returns the assignments of the command line, with --set or without.

    Raises:
        UsageError: A word is not an assignment.
    """
    for text in bare or ():
        if "=" not in text:
            path, colon, value = text.partition(":")
            hint = "settings are written as A.B.C=VALUE"
            if "." in path:
                hint = f"did you mean {path}={value if colon else 'VALUE'}?"
            raise UsageError(f"'{text}' is not a setting; {hint}")
    return [*(sets or ()), *(bare or ())]


def run_and_settings(run: str, bare: list[str] | None) -> tuple[str, list[str] | None]:
    """Returns a run and the settings that follow it; the latest run if only settings are given."""
    # The path of a run may contain an equals sign.
    if "=" in run and not Path(run).exists():
        return "latest", [run, *(bare or ())]
    return run, bare


def registry_of(plugin_files: list[Path] | None, quiet: bool = False) -> "Registry":
    """Returns the plugins of this environment and of the files on the command line.

    Files are imported inside of a bar, because they usually import torch, which takes seconds.
    """
    from runner.plugin.registry import Registry

    if not plugin_files:
        return Registry(())
    from runner.cli.live import LiveBar

    # Two bars would overwrite each other.
    if LiveBar.shown:
        return Registry(plugin_files)
    with working("", f"importing {', '.join(path.name for path in plugin_files)}", quiet):
        return Registry(plugin_files)


def load_recipe(verb: str, recipe: str, sets: list[str], plugin_files: list[Path] | None) -> "tuple[Recipe, Registry]":
    """Returns the recipe that a command was given, and the registry of its plugins."""
    from runner.recipe.loader import find, load
    from runner.recipe.yaml_nodes import is_lock

    registry = registry_of(plugin_files)
    path = find(recipe)
    if is_lock(path):
        loaded, complete_registry, _ = load_lock(path, sets, registry, f"runner {verb} {shlex.quote(recipe)}")
        return loaded, complete_registry
    return load(path, sets, registry), registry


def load_lock(
    lock: Path, sets: Sequence[str], registry: "Registry", command: str, accept: str = ""
) -> "tuple[Recipe, Registry, list[Drift]]":
    """Loads a lock like ``load_locked``; an error names the command with the plugins that it needs.

    With plugins that have changed, it needs the option ``accept``.
    """
    from runner.tracking.locked_recipe import load_locked

    def remedy(files: Mapping[Path, str]) -> str:
        has_changes = any(files.values())
        option = f" {accept}" if accept and has_changes else ""
        return f"the command is: {registry.command(command, files)}{option}"

    recipe, complete_registry, changes = load_locked(lock, lock.parent.name, sets, registry, remedy)
    # The files of the lock come after those of the command line.
    for path in complete_registry.files[len(registry.files) :]:
        say(f"using the plugins of {path}, which is unchanged")
    return recipe, complete_registry, changes


def run_folders(verb: str, quiet: bool = False) -> "list[RunFolder]":
    """Returns all runs, the newest first, after setting the status of runs whose process has crashed."""
    from runner.tracking.lookup import folders
    from runner.tracking.recovery import reap
    from runner.tracking.workspace import Workspace

    workspace = Workspace()
    reap(workspace, partial(working, verb, "recording crashed runs in MLflow", quiet))
    return folders(workspace.runs)


@contextmanager
def sharing_processor(recipe: "Recipe", locked_threads: int | None = None) -> Iterator[None]:
    """Computes inside the ``with`` with the processor settings of the recipe's section ``system``;
    ``locked_threads`` is the number of threads of a run that is continued.
    """
    from runner.system.processor import share_processor
    from runner.tracking.lookup import computing
    from runner.tracking.workspace import Workspace

    system = recipe.system
    with share_processor(system.threads, system.wait, locked_threads, computing(Workspace())):
        yield


def working(verb: str, doing: str, quiet: bool = False) -> "LiveBar":
    """Returns a bar that shows on stderr, inside of the ``with``, what a command is doing."""
    from runner.cli.live import LiveBar
    from runner.system.console import Console

    return LiveBar(Console(stderr=True, quiet=quiet), f"runner {verb}".strip(), doing=doing)


def output(
    as_json: bool,
    data: Callable[[], dict[str, Any]],
    show: "Callable[[*_Arguments, Console], None]",
    *arguments: *_Arguments,
) -> None:
    """Prints the result of a command: its data as JSON, or a display for a person."""
    if as_json:
        print_json(data())
        return
    from runner.system.console import Console

    show(*arguments, Console(file=results.stream))


def print_json(data: dict[str, Any]) -> None:
    """Prints one JSON object with its schema version on stdout, secrets masked."""
    document = {"schema_version": SCHEMA_VERSION, **redact_values(data)}
    emit(json_text(document, indent=2, ensure_ascii=False))


def emit(text: object, nl: bool = True) -> None:
    """Prints a part of a result."""
    write(results.stream, f"{text}\n" if nl else str(text))


def say(text: str) -> None:
    """Prints a message on stderr."""
    tell(text, err=True)


def tell(text: str, hang: int = 0, err: bool = False) -> None:
    """Prints text for a person: wrapped on a terminal, unchanged elsewhere."""
    stream = sys.stderr if err else results.stream
    if stream.isatty():
        text = "\n".join(wrapped(text, shutil.get_terminal_size().columns, hang))
    write(stream, f"{text}\n")
