"""Verbs that train or measure take the same options, and an option means the same wherever it is."""

import typer

from runner.cli import app

VERBS = [
    ("run",), ("resume",), ("evaluate",), ("verify",), ("ablate",), ("profile",), ("study", "plan"), ("study", "run"),
    ("study", "worker"),
]  # fmt: skip
SHARED = {"--quiet", "-q", "--json", "--set", "--plugin"}


def options(*verb):
    """Of a verb, by name."""
    command = typer.main.get_command(app)
    for name in verb:
        command = command.commands[name]
    return {name: each for each in command.params for name in (*each.opts, *each.secondary_opts)}


def test_what_trains_or_measures_can_be_quiet_print_json_and_takes_settings_and_plugins():
    for verb in VERBS:
        found = options(*verb)
        assert found.keys() >= SHARED | {"bare"}, verb


def test_an_option_has_one_name_for_its_value_everywhere():
    for name in ("--budget", "--set", "--plugin", "--out", "--note", "--quiet", "--json", "bare"):
        assert len({found[name].metavar for verb in VERBS if name in (found := options(*verb))}) == 1, name
    assert options("verify")["--budget"].metavar == options("ablate")["--budget"].metavar == "SECONDS"


def commands(group, path=()):
    """Yields every command of a group with the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def test_a_command_is_in_the_file_of_its_name():
    for words, command in commands(typer.main.get_command(app)):
        assert command.callback.__module__ == f"runner.cli.{words[0]}", words
