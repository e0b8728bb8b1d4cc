"""What verbs share: their options, and how they talk, through which no secret passes."""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVarTuple

from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from runner.cli import completion
from runner.system.errors import RunnerError, UsageError
from runner.system.lines import wrapped
from runner.system.secrets import redact, redact_values
from runner.system.terminal import CleanStream, write

if TYPE_CHECKING:
    from runner.cli.live import LiveBar
    from runner.plugin.registry import Registry
    from runner.recipe.lock import Drift
    from runner.recipe.recipe import Recipe
    from runner.system.console import Console
    from runner.tracking import RunFolder

_Shown = TypeVarTuple("_Shown")
SCHEMA_VERSION = 1  # of everything that --json prints

RecipeName = Annotated[
    str,
    Argument(
        metavar="RECIPE", help="A recipe file, the lock of a run, or the name of a recipe that ships.",
        autocompletion=completion.recipes,
    ),
]  # fmt: skip
Sets = Annotated[
    list[str] | None,
    Option("--set", metavar="A.B.C=VALUE", help="Override a value of the recipe; may be repeated, and --set left out."),
]
Bare = Annotated[
    list[str] | None, Argument(metavar="[A.B.C=VALUE...]", help="The same as --set A.B.C=VALUE.", show_default=False)
]
Plugins = Annotated[
    list[Path] | None,
    Option("--plugin", metavar="FILE", help="A Python file with plugins of your own; may be repeated."),
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Show no progress.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]


def settings(sets: list[str] | None, bare: list[str] | None) -> list[str]:
    """What is assigned on the command line, with --set or without; anything else that stands there is refused."""
    for text in bare or ():
        if "=" not in text:
            raise UsageError(f"'{text}' is no setting: should be A.B.C=VALUE")
    return [*(sets or ()), *(bare or ())]


def run_and_settings(run: str, bare: list[str] | None) -> tuple[str, list[str] | None]:
    """A run and the settings that stand behind it; if no run is named there, the latest."""
    return ("latest", [run, *(bare or ())]) if "=" in run and not Path(run).exists() else (run, bare)


def registry_of(plugin_files: list[Path] | None) -> "Registry":
    """The plugins of this environment and of the files on the command line."""
    from runner.plugin.registry import Registry

    return Registry(plugin_files or ())


def load_recipe(verb: str, recipe: str, sets: list[str], plugin_files: list[Path] | None) -> "tuple[Recipe, Registry]":
    """A recipe as a verb is given it, and where its plugins come from."""
    from runner.recipe.document import is_lock
    from runner.recipe.loader import find, load

    registry, path = registry_of(plugin_files), find(recipe)
    if is_lock(path):
        return load_lock(path, sets, registry, f"runner {verb} {recipe}")[:2]
    return load(path, sets, registry), registry


def load_lock(
    lock: Path, sets: Sequence[str], registry: "Registry", command: str, accept: str = ""
) -> "tuple[Recipe, Registry, list[Drift]]":
    """As ``load_locked``, with what has changed since; who has to name plugins is told the command.

    With plugins that have changed, it needs the option ``accept``.
    """
    from runner.recipe.lock import drift
    from runner.tracking.locked import load_locked

    def remedy(files: Mapping[Path, str]) -> str:
        needed = f" {accept}" if accept and any(files.values()) else ""
        return f"the command is: {registry.command(command, files)}{needed}"

    recipe, whole = load_locked(lock, lock.parent.name, sets, registry, remedy)
    for path in whole.files[len(registry.files) :]:
        say(f"with the plugins of {path}, which is unchanged")
    return recipe, whole, drift(lock, recipe, whole)


def run_folders(verb: str, quiet: bool = False) -> "list[RunFolder]":
    """All runs, the newest first; those whose process died without a word have been given their end."""
    from runner.tracking.recovery import reap
    from runner.tracking.workspace import Workspace, folders

    here = Workspace()
    reap(here, partial(working, verb, "telling MLflow which runs are dead", quiet))
    return folders(here.runs)


@contextmanager
def sharing_processor(recipe: "Recipe", locked_threads: int | None = None) -> Iterator[None]:
    """Computes inside the ``with`` as the recipe's section ``system`` says; ``locked_threads`` are those of a run."""
    from runner.system.processor import share_processor
    from runner.tracking.workspace import Workspace, computing

    system = recipe.system
    with share_processor(system.threads, system.wait, locked_threads, computing(Workspace())):
        yield


def working(verb: str, doing: str, quiet: bool = False) -> "LiveBar":
    """Shows on stderr, inside the ``with``, what a verb is doing that takes more than a moment; at once."""
    from runner.cli.live import LiveBar
    from runner.system.console import Console

    return LiveBar(Console(stderr=True, quiet=quiet), f"runner {verb}", doing=doing)


def output(
    as_json: bool, data: Callable[[], dict[str, Any]], show: "Callable[[*_Shown, Console], None]", *shown: *_Shown
) -> None:
    """Prints the result of a verb: its data as JSON, or what a person is shown of it."""
    if as_json:
        print_json(data())
        return
    from runner.system.console import Console

    show(*shown, Console(file=results.stream))


def print_json(data: dict[str, Any]) -> None:
    """Prints one JSON object with its schema version on stdout, secrets masked."""
    emit(json.dumps({"schema_version": SCHEMA_VERSION, **redact_values(data)}, indent=2, ensure_ascii=False))


def emit(text: object, nl: bool = True) -> None:
    """Prints a part of a verb's result."""
    write(results.stream, f"{text}\n" if nl else str(text))


def report(error: RunnerError) -> None:
    """Tells the user on stderr what went wrong, without secrets; on a terminal no word is torn at its edge."""
    from runner.system.console import CleanText, Console

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for line in redact(str(error)).split("\n"):
        excerpt = line.startswith("    ")  # with a caret below, which points into it
        for part in wrapped(line, console.width) if console.is_terminal and not excerpt else [line]:
            console.print(CleanText(part, style="dim" if excerpt else "red"))


def say(text: str) -> None:
    """Talks to the user on stderr."""
    tell(text, err=True)


def tell(text: str, hang: int = 0, err: bool = False) -> None:
    """Prints text for a person: on a terminal as ``wrapped``, elsewhere as it is."""
    stream = sys.stderr if err else results.stream
    if stream.isatty():
        text = "\n".join(wrapped(text, shutil.get_terminal_size().columns, hang))
    write(stream, f"{text}\n")


class Results:
    """Where verbs print their results: stdout, which belongs to nothing else while a verb runs."""

    def __init__(self) -> None:
        self._reserved: TextIO | None = None

    @property
    def stream(self) -> TextIO:
        """The stream of the results."""
        return self._reserved or sys.stdout

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Sends to stderr what anything but the verb itself prints inside the ``with``.

        That is what plugins and libraries print, in Python or in C, in this process or in its children. If stdout is a
        file descriptor it remains so afterwards, because functions that run at exit print, too.
        """
        stdout = sys.stdout
        self._reserved = _moved(stdout)
        if self._reserved is stdout:
            sys.stdout = sys.stderr
        try:
            yield
        finally:
            self._reserved.flush()
            self._reserved = None
            if sys.stdout is sys.stderr:
                sys.stdout = stdout


results = Results()
"""The results of the verb that runs in this process."""


def _moved(stream: TextIO) -> TextIO:
    """The same file behind another descriptor, after which 1 is stderr; or the stream itself if 1 is not its own."""
    try:
        if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != 1:
            return stream
        stream.flush()
        copy = os.fdopen(os.dup(1), "w", encoding=stream.encoding, errors=stream.errors)
        os.dup2(2, 1)
    except OSError:  # stdout or stderr is closed, or is not a file
        return stream
    stream.reconfigure(line_buffering=True)  # as stderr
    return CleanStream(copy)


def use_own_console() -> None:
    """Lets typer print help and its errors in colour: another console's codes would be escaped as foreign text."""
    from typer import rich_utils

    from runner.system.console import Console

    # Its own texts are in markup; what a user typed is not rendered as such.
    setattr(rich_utils, "Console", partial(Console, markup=True))  # noqa: B010


class Verbs(TyperGroup):
    """A group of verbs."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help."""
        use_own_console()
        super().format_help(ctx, formatter)


class Verb(TyperCommand):
    """A verb: what it prints on stdout is its result, and a plugin's ``sys.exit`` is an error of the plugin."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help."""
        use_own_console()
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        """Runs the verb; a RunnerError reports what called ``sys.exit``."""
        with results.reserved():
            try:
                return super().invoke(ctx)
            except SystemExit as error:
                from runner.plugin.mistakes import mistake

                raise mistake(error) or RunnerError(f"sys.exit({error.code!r}) was called") from error
