import io
import logging
import sys
import warnings

import pytest
from hostile import CONTROLS, MARKS, NAME, SEQUENCES, commands_in, console_on, texts
from hypothesis import HealthCheck, given, settings

from runner.system.escapes import escape
from runner.system.terminal import CleanStream, Rendered, clean, clean_streams, print_error, print_exception, write

per_example = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def streams(monkeypatch):
    """Bytes that reach stdout and stderr of a process whose streams are clean."""
    outputs = io.BytesIO(), io.BytesIO()
    for name, output in zip(("stdout", "stderr"), outputs, strict=True):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(output, encoding="utf-8", write_through=True))
    clean_streams()
    return outputs


@per_example
@given(texts)
def test_whatever_is_written_is_clean(monkeypatch, text):
    out, err = streams(monkeypatch)
    sys.stdout.write(text)
    sys.stderr.write(text)
    print_error(text)
    write(sys.stdout, text)
    print_exception(ValueError(text))
    handler = logging.StreamHandler()
    handler.emit(logging.LogRecord("anybody", 30, text, 1, text, (), None))
    sys.stderr.write(warnings.formatwarning(text, UserWarning, text, 1, text))
    for output in (out, err):
        assert commands_in(output.getvalue().decode()) == []


@pytest.mark.parametrize("text", [*CONTROLS, *MARKS, *SEQUENCES, NAME, "\udcff"])
def test_every_kind_of_command_becomes_an_escape(monkeypatch, text):
    out, _ = streams(monkeypatch)
    write(sys.stdout, f"<{text}>\n")
    assert out.getvalue().decode() == f"<{escape(text)}>\n"
    assert escape(text) != text


def test_a_bar_that_returns_to_the_begin_of_its_line_has_lines_of_its_own():
    assert clean("\r 10%\r 20%\r\n") == "\n 10%\n 20%\n"


def test_colours_of_a_console_pass_and_those_of_others_do_not(monkeypatch):
    out, _ = streams(monkeypatch)
    console_on(sys.stdout).print("go", style="green")
    sys.stdout.write("\x1b[32mgo\x1b[0m\n")
    assert out.getvalue().decode() == "\x1b[32mgo\x1b[0m\n\\u001b[32mgo\\u001b[0m\n"


def test_a_stream_reports_the_length_that_it_was_given():
    stream = CleanStream(io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert stream.write("\x1b[8m") == 4
    assert stream.write(Rendered("\x1b[1m")) == 4


def test_a_closed_stream_receives_nothing():
    write(None, "anything")
