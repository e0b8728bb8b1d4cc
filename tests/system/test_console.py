import io
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
from hostile import MARKUP, NAME, SEQUENCES, commands_in, console_on, texts
from hypothesis import given, settings
from rich.columns import Columns
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from runner.system import secrets
from runner.system.console import CleanText, Console, PrintedLines
from runner.system.escapes import escape
from runner.system.secrets import MASK, register
from runner.system.text_lines import labelled, print_wrapped, wrapped


def printed(*things, **options):
    file = io.StringIO()
    console_on(file).print(*things, **options)
    return file.getvalue()


def table_of(*cells):
    table = Table(title=cells[0], caption=cells[-1])
    table.add_column(cells[0])
    table.add_column(CleanText(cells[0]))
    for cell in cells:
        table.add_row(cell, CleanText(cell))
    return table


@settings(max_examples=60)
@given(texts)
def test_nothing_that_is_printed_commands_the_terminal(text):
    foreign = [
        text, CleanText(text, "red"), CleanText.assemble((text, "bold"), text), CleanText("a").append(text, "cyan"),
        Text(text), table_of(text, text), Panel(text, title=CleanText(text)), Columns([text, text]),
    ]  # fmt: skip
    for thing in foreign:
        assert commands_in(printed(thing), of_consoles=True) == []
    assert commands_in(printed(text, style="bold", soft_wrap=True), of_consoles=True) == []


@pytest.mark.parametrize("text", [*SEQUENCES, *MARKUP, NAME])
def test_what_is_printed_can_be_read(text):
    assert escape(text) in printed(text, highlight=False, soft_wrap=True)
    assert escape(text) in printed(CleanText(text), highlight=False, soft_wrap=True)


def test_own_colours_stay():
    assert printed(CleanText("go", "green")) == "\x1b[32mgo\x1b[0m\n"
    assert printed(CleanText.assemble("a", ("b", "bold"))) == "a\x1b[1mb\x1b[0m\n"


def test_cells_stay_in_line():
    lines = printed(table_of(NAME, "short")).splitlines()
    assert len({Text.from_ansi(line).cell_len for line in lines[1:-1]}) == 1


@settings(max_examples=60)
@given(texts)
def test_wrapped_lines_are_clean_and_no_longer_than_their_width(text):
    assert commands_in("".join(wrapped(text, 40))) == []
    for _, part in labelled("label ", [text], 40):
        assert commands_in(part) == []
    file = io.StringIO()
    print_wrapped(text, console_on(file))
    assert commands_in(file.getvalue(), of_consoles=True) == []


def test_a_secret_is_masked_before_a_line_tears_it(monkeypatch):
    monkeypatch.setattr(secrets, "_known", frozenset())
    monkeypatch.setattr(secrets, "_pattern", None)
    secret = "Tr0ub4dor and more words than a line has room for, so that it is torn"
    register(secret)
    for thing in (secret, CleanText(secret), table_of(secret)):
        text = printed(thing)
        assert "Tr0ub4dor" not in text
        assert MASK in text


@settings(max_examples=30)
@given(texts)
def test_lines_above_a_live_display_are_clean(text):
    file = io.StringIO()
    console = console_on(file)
    with Live("working", console=console, redirect_stdout=False, redirect_stderr=False, auto_refresh=False):
        lines = PrintedLines(console, file)
        with redirect_stdout(lines), redirect_stderr(lines):
            sys.stdout.write(f"{text}\n")
            sys.stderr.write(text)
            lines.flush()
    assert commands_in(file.getvalue(), of_consoles=True) == []
    assert "\x1b[8m" not in file.getvalue()


def test_a_console_writes_beneath_a_stream_that_stands_for_another(monkeypatch):
    beneath = io.StringIO()

    class Above(io.StringIO):
        rich_proxied_file = beneath

    above = Above()
    monkeypatch.setattr(sys, "stderr", above)
    Console(stderr=True).print("hello")
    assert (above.getvalue(), beneath.getvalue()) == ("", "hello\n")
