"""Help of commands: joined paragraphs, groups of commands, and examples under a heading."""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from runner.cli.results import results
from runner.system.errors import ExitCode, RunnerError

_EXAMPLE = re.compile(r"\[bold\]((?:[A-Z_]+=\S+ )?runner .*?)\[/\] *(.*)")
"""A line of a docstring with a command, and what it is for."""


def split_help(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Splits a docstring into prose and examples.

    Returns: Prose whose paragraphs are single lines, because the width of the screen breaks them;
        and examples, each a command and a description, which may be empty.
    """
    prose = []
    examples = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        # An example is a paragraph with a command in bold and a description.
        if match := _EXAMPLE.fullmatch(paragraph.strip()):
            examples.append((match[1], match[2]))
        else:
            prose.append(" ".join(paragraph.split()))
    return "\n\n".join(prose), examples


def _epilog(examples: list[tuple[str, str]]) -> str | None:
    """Returns the examples below a heading, in rich's markup."""
    if not examples:
        return None
    width = max((len(command) for command, description in examples if description), default=0)
    lines = [
        f"  {command:{width}}  [dim]{description}[/]" if description else f"  {command}"
        for command, description in examples
    ]
    return "\n".join(["[bold]Examples[/]", *lines])


def use_own_console() -> None:
    """Lets typer print help and its errors in colour: another console's codes would be escaped as foreign text."""
    from typer import rich_utils

    from runner.system.console import Console

    # Texts of the commands contain markup; text that a user typed is not rendered as markup.
    setattr(rich_utils, "Console", partial(Console, markup=True))  # noqa: B010


def _without_types_of_flags(parameters: list[Any]) -> list[Any]:
    """Removes the type from the help of options that take no value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.display_type_rich = lambda **_: None
    return parameters


class Verbs(TyperGroup):
    """A group of verbs."""

    def __init__(self, *, help: str | None = None, **options: Any) -> None:  # noqa: A002 (typer's name)
        prose, self.examples = split_help(help or "")
        super().__init__(**options | {"help": prose, "epilog": _epilog(self.examples)})

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the options."""
        return _without_types_of_flags(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help."""
        use_own_console()
        super().format_help(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command; words of other programs are suggested by ours."""
        word = args[0] if args else ""
        meant = _OTHER_WORDS.get(word)
        if meant is not None and self.get_command(ctx, word) is None and self.get_command(ctx, meant.split()[0]):
            ctx.fail(f"No such command '{word}'. Did you mean 'runner {meant}'?")
        return super().resolve_command(ctx, args)


_OTHER_WORDS = {
    **dict.fromkeys(("train", "fit", "start"), "run"),
    **dict.fromkeys(("eval", "test"), "evaluate"),
    **dict.fromkeys(("list", "runs", "ps"), "ls"),
    **dict.fromkeys(("delete", "remove"), "rm"),
    **dict.fromkeys(("search", "sweep", "tune", "optimize"), "study run"),
    **dict.fromkeys(("predict", "infer"), "serve"),
    **dict.fromkeys(("check", "lint"), "validate"),
    **dict.fromkeys(("download", "get"), "data get"),
    **dict.fromkeys(("continue", "restart"), "resume"),
    "diff": "compare",
    "dashboard": "ui",
    "benchmark": "ablate",
    "prove": "verify",
    "version": "doctor",
}
"""Commands of other programs, and the command here that does the same."""


@contextmanager
def _surroundings() -> Iterator[None]:
    """Reserves stdout for a verb's result.

    Raises:
        RunnerError: Something in the verb called ``sys.exit``.
    """
    with results.reserved():
        try:
            yield
        except SystemExit as error:
            # The command has a handler of SIGTERM.
            if isinstance(error.code, ExitCode):
                raise typer.Exit(error.code) from error
            from runner.plugin.plugin_errors import mistake

            raise mistake(error) or RunnerError(f"sys.exit({error.code!r}) was called") from error


class Verb(TyperCommand):
    """A verb: what it prints on stdout is its result."""

    def __init__(self, *arguments: Any, help: str | None = None, **options: Any) -> None:  # noqa: A002 (typer's name)
        prose, self.examples = split_help(help or "")
        super().__init__(*arguments, **options | {"help": prose, "epilog": _epilog(self.examples)})

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the arguments and options."""
        return _without_types_of_flags(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help."""
        use_own_console()
        super().format_help(ctx, formatter)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Returns the context of a call, in which stdout is reserved for the verb's result."""
        context = super().make_context(info_name, args, parent, **extra)
        # A shell that completes words calls nothing. A function around a call would be in every traceback.
        if not context.resilient_parsing:
            context.with_resource(_surroundings())
        return context
