"""The command line: commands only. Heavy imports are inside of a command."""

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from runner import __version__
from runner.cli import (
    ablate,
    compare,
    data,
    doctor,
    evaluate,
    init,
    ls,
    models,
    plan,
    plugins,
    processes,
    profile,
    recipes,
    resume,
    rm,
    run,
    schema,
    serve,
    show,
    study,
    submit,
    sync,
    ui,
    validate,
    verify,
)
from runner.cli.common import emit, say
from runner.cli.exit import QuickExit
from runner.cli.help import Verb, Verbs
from runner.cli.trouble import report, report_usage, show_warnings
from runner.system.errors import TRACEBACK, ExitCode, RunnerError, UsageError, print_traceback
from runner.system.terminal import clean_streams, print_exception

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_GROUPS: dict[str, tuple[Callable[..., Any], ...]] = {
    "Train": (run.run, submit.submit, resume.resume, evaluate.evaluate, serve.serve),
    "Prove": (verify.verify, ablate.ablate, profile.profile, plan.plan),
    "Recipes": (recipes.recipes, init.init, validate.validate, show.show, plugins.plugins, schema.schema),
    "Runs": (ls.ls, compare.compare, ui.ui, rm.rm, sync.sync),
    "This machine": (doctor.doctor,),
}
"""Commands by the heading under which the help lists them."""
for heading, verbs in _GROUPS.items():
    for verb in verbs:
        app.command(cls=Verb, rich_help_panel=heading)(verb)
for name, group, heading in (
    ("study", study.app, "Prove"),
    ("data", data.data, "Recipes"),
    ("models", models.app, "Runs"),
):
    app.add_typer(group, name=name, cls=Verbs, rich_help_panel=heading)

_OPTION = "--traceback"


def _version(asked: bool) -> None:
    if asked:
        emit(f"runner {__version__}")
        raise typer.Exit


@app.callback()
def runner(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    complete: Annotated[
        bool,
        typer.Option(
            "--traceback",
            help="After an error, print the complete traceback. Also after a command.",
        ),
    ] = False,
) -> None:
    """Train PyTorch models from recipes in YAML, and prove that speed-ups are real and harmless.

    A recipe is a YAML file, or the bare name of a recipe that ships.

    Exit codes: 0 done, 1 the run failed, 2 wrong command line or recipe, 3 a gate failed, 4
    inconclusive, 5 storage unavailable, 6 diverged, 7 no usable checkpoint, 75 preempted, 129 hung
    up, 130 interrupted, 143 terminated.

    [bold]runner recipes[/] list the recipes that ship

    [bold]runner run marl_phase2[/] train one

    [bold]runner validate marl_phase2[/] check one

    [bold]runner show marl_phase2 --origin[/] print the origin of values

    [bold]runner show marl_phase2 train.batch_size=256[/] change a value
    """


def command() -> NoReturn:
    """The ``runner`` program: as ``main``, and ends without the second that tearing down torch would take."""
    ending = QuickExit()
    try:
        main()
    except SystemExit as error:
        ending.code = error.code
        raise


def main() -> NoReturn:
    """Runs a command line. A failure becomes one message on stderr and its exit code, and no secret is printed."""
    # Measures from here on what other programs take of the processor.
    import_module("runner.system.contention")
    clean_streams()
    show_warnings()
    # Some containers set 0, a width without room for text.
    if os.environ.get("COLUMNS", "").strip() == "0":
        del os.environ["COLUMNS"]
    # Data loaders and others that start Python by themselves must not import from the working directory.
    os.environ["PYTHONSAFEPATH"] = "1"
    interrupts = _note_interrupts()
    words = sys.argv[1:]
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if _OPTION in words:
        words.remove(_OPTION)
        # A variable, because child processes need it as well.
        os.environ[TRACEBACK] = "1"
    try:
        _refuse_missing_folder()
        with processes.membership(words) as record_exit:
            code = app(words, standalone_mode=False)
            record_exit(code or 0)
        if code == ExitCode.INTERRUPTED and interrupts:
            say("Interrupted.")
    except RunnerError as error:
        print_traceback(error)
        report(error)
        code = error.exit_code
    except typer.Abort as error:
        say("Aborted.")
        is_interrupted = isinstance(error.__cause__, KeyboardInterrupt)
        code = ExitCode.INTERRUPTED if is_interrupted else ExitCode.FAILED
    except Exception as error:
        # Only errors of the command line itself have this method and came through no plugin.
        code = report_usage(error) if hasattr(error, "format_message") and not _is_of_plugin(error) else _fail(error)
    sys.exit(code)


def _refuse_missing_folder() -> None:
    """Raises a UsageError if the working directory has been removed."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError("the working directory does not exist any more: change to another one") from None


def _note_interrupts() -> list[int]:
    """Returns a list that gets an element for every Ctrl-C that no command handles."""
    interrupts: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> NoReturn:
        interrupts.append(number)
        raise KeyboardInterrupt

    # A process in the background of a script ignores Ctrl-C, and continues to do so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    return interrupts


def _is_of_plugin(error: Exception) -> bool:
    from runner.plugin.plugin_errors import mistake

    return mistake(error) is not None


def _fail(error: Exception) -> int:
    """Reports what a plugin's code raised; an error of the runner itself has its complete traceback."""
    from runner.plugin.plugin_errors import mistake

    message = mistake(error)
    if message is None:
        print_exception(error)
    else:
        print_traceback(error)
        report(message)
    return ExitCode.FAILED
