"""The command line: verbs only, heavy imports inside the verb."""

import os
import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer

from runner import __version__
from runner.cli import data, evaluate, models, plan, plugins, prove, recipes, runs, serve, study, workspace
from runner.cli.common import Verb, Verbs, emit, report, say, use_own_console
from runner.system.errors import TRACEBACK, ExitCode, RunnerError, print_traceback
from runner.system.secrets import redact
from runner.system.terminal import clean_streams, print_exception

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (
    runs.run, runs.resume, evaluate.evaluate, serve.serve, workspace.ls, workspace.rm, workspace.sync, prove.verify,
    prove.ablate, prove.profile, plan.plan, recipes.validate, recipes.show, recipes.recipes, plugins.plugins,
    recipes.schema, workspace.compare, workspace.ui, workspace.doctor,
):  # fmt: skip
    app.command(cls=Verb)(verb)
for group, verbs in (("study", study.app), ("data", data.data), ("models", models.app)):
    app.add_typer(verbs, name=group, cls=Verbs)

_OPTION = "--traceback"


def _version(asked: bool) -> None:
    if asked:
        emit(f"runner {__version__}")
        raise typer.Exit


@app.callback()
def runner(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    complete: Annotated[
        bool, typer.Option("--traceback", help="After an error, print the complete traceback; also after a verb.")
    ] = False,
) -> None:
    """Runs PyTorch training experiments that are declared in YAML, and proves their speed-ups.

    A recipe is a YAML file, or the bare name of one that ships:

        [bold]runner recipes[/]                              list them

        [bold]runner run marl_phase2[/]                      train one

        [bold]runner validate marl_phase2[/]                 check one

        [bold]runner show marl_phase2 --origin[/]            where does every value come from?

        [bold]runner show marl_phase2 train.batch_size=256[/]

    Exit codes: 0 done, 1 the run failed, 2 the command line or the recipe is wrong, 3 a gate failed, 4 inconclusive,
    5 storage unavailable, 6 diverged, 7 no usable checkpoint, 75 preempted, 129 hung up, 130 interrupted,
    143 terminated.
    """


def main() -> NoReturn:
    """The ``runner`` command; a failure becomes one message on stderr and its exit code, and no secret is printed."""
    # Measures from here on what other programs take of the processor.
    import_module("runner.system.contention")
    clean_streams()
    os.environ["PYTHONSAFEPATH"] = "1"  # for what starts Python by itself, as data loaders do
    words = sys.argv[1:]
    if _OPTION in words:
        words.remove(_OPTION)
        os.environ[TRACEBACK] = "1"  # also for child processes
    try:
        code = app(words, standalone_mode=False)
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
        code = _refuse(error) if hasattr(error, "format_message") and not _is_of_plugin(error) else _fail(error)
    sys.exit(code)


def _is_of_plugin(error: Exception) -> bool:
    from runner.plugin.mistakes import mistake

    return mistake(error) is not None


def _fail(error: Exception) -> int:
    """Reports what a plugin's code raised; an error of the runner itself has its complete traceback."""
    from runner.plugin.mistakes import mistake

    message = mistake(error)
    if message is None:
        print_exception(error)
    else:
        print_traceback(error)
        report(message)
    return ExitCode.FAILED


def _refuse(error: Any) -> int:
    """Says what is wrong with the command line; masked before it is wrapped, which would tear a secret in two."""
    from typer.rich_utils import rich_format_error

    use_own_console()
    error.message = redact(error.message)
    rich_format_error(error)
    return int(error.exit_code)
