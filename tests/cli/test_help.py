"""Help texts fit every screen, and their examples are commands that work."""

import io
import shlex
from contextlib import redirect_stdout
from itertools import pairwise

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from runner.cli import app
from runner.cli.help import split_help
from runner.recipe.loader import shipped

WIDTHS = (60, 80, 100, 160)
LIGHT = ("recipes", "validate", "show", "schema", "plugins", "data list", "data where")
"""Commands that take a moment and need no run."""
PLACEHOLDERS = ("3f2a91c0", "latest", "marl_*")


def commands(group=None, path=()):
    """Yields the words and the object of every command."""
    group = get_command(app) if group is None else group
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


ALL = list(commands())
EXAMPLES = [(path, example) for path, command in ALL for example, _ in getattr(command, "examples", ())]


def test_every_command_that_does_something_has_help_and_most_have_examples():
    leaves = [command for _, command in ALL if not hasattr(command, "commands")]
    assert all(command.help for command in leaves)
    assert sum(bool(command.examples) for command in leaves) > 0.7 * len(leaves)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("path", [path for path, _ in ALL], ids=" ".join)
def test_help_fits_the_screen_and_leaves_no_short_line_inside_of_a_paragraph(path, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", width)
    monkeypatch.setenv("TERM", "dumb")
    result = CliRunner().invoke(app, [*path, "--help"], color=False)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert all(len(line) <= width for line in lines)
    assert "<bool>" not in result.output
    prose = [line.strip() for line in lines[3:] if not line.startswith(("╭", "│", "╰"))]
    if "Examples" in prose:
        prose = prose[: prose.index("Examples")]
    for line, following in pairwise(prose):
        # A line ends where the next word would not fit.
        if line and following:
            assert len(line) + len(following.split()[0]) >= width - 6, (line, following)


@pytest.mark.parametrize(("path", "example"), EXAMPLES, ids=lambda value: value if isinstance(value, str) else None)
def test_examples_are_commands_of_recipes_that_exist(path, example):
    words = shlex.split(example.partition(" > ")[0])
    while "=" in words[0]:
        words = words[1:]
    program, *words = words
    assert program == "runner"
    command = get_command(app)
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    context = command.make_context(name, words)
    recipe = context.params.get("recipe")
    for reference in recipe if isinstance(recipe, list | tuple) else [recipe]:
        if reference and "/" not in reference and not reference.startswith(PLACEHOLDERS):
            assert reference in shipped(), example


@pytest.mark.parametrize(
    "example",
    sorted(
        example
        for _, example in EXAMPLES
        if example.removeprefix("runner ").startswith(LIGHT) and "3f2a91c0" not in example and "*" not in example
    ),
)
def test_examples_of_light_commands_run(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(example.partition(" > ")[0])[1:]
    with redirect_stdout(io.StringIO()):
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("word", "meant"),
    [("train", "run"), ("list", "ls"), ("search", "study run"), ("eval", "evaluate"), ("diff", "compare")],
)
def test_words_of_other_programs_have_a_suggestion(word, meant):
    result = CliRunner().invoke(app, [word])
    assert result.exit_code == 2
    assert f"runner {meant}" in result.output


def test_prose_and_examples_are_told_apart():
    prose, examples = split_help("One\ntwo.\n\nMore\nhere.\n\n[bold]runner run x[/] train\n\n[bold]A=1 runner ls[/]")
    assert prose == "One two.\n\nMore here."
    assert examples == [("runner run x", "train"), ("A=1 runner ls", "")]
