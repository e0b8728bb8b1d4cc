import json

import yaml
from hostile import CONTROLS, MARKS, commands_in, texts
from hypothesis import given, settings

from runner.system.escapes import escape, escape_line, is_printable


@settings(max_examples=100)
@given(texts)
def test_no_command_to_a_terminal_is_left_and_the_text_is_the_same_in_quotes(text):
    written = escape(text)
    assert commands_in(written) == []
    assert escape(written) is written
    quoted = escape(json.dumps(text, ensure_ascii=False))
    assert commands_in(quoted) == []
    assert json.loads(quoted) == text


@settings(max_examples=100)
@given(texts)
def test_a_name_is_one_line(text):
    assert not set("\n\t") & set(escape_line(text))
    assert escape(escape_line(text)) == escape_line(text)


def test_every_character_of_the_kind_is_escaped():
    for character in [*CONTROLS, *MARKS, "\ud800", "\udcff"]:
        assert escape(f"a{character}b") == f"a\\u{ord(character):04x}b"
        assert not is_printable(character)
        assert yaml.safe_load(f'"{escape(character)}"') == character or "\ud800" <= character <= "\udfff"


def test_what_is_printable_stays():
    for text in ("", "plain", "tab\tand\nlines", "模型 é ñ", "\\u001b", "👩\u200d🔬", "[8m"):
        assert escape(text) is text
        assert is_printable(text)
