import io
import json
import sys
import traceback

import pytest

from runner.cli.common import print_json, say
from runner.cli.trouble import report
from runner.system import secrets
from runner.system.errors import RunnerError
from runner.system.secrets import MASK, register
from runner.system.terminal import clean_streams

SECRET = 'hunter2-"quoted"-é'


@pytest.fixture(autouse=True)
def one_secret(monkeypatch):
    monkeypatch.setattr(secrets, "_known", frozenset())
    monkeypatch.setattr(secrets, "_pattern", None)
    register(SECRET)


def streams(monkeypatch):
    """What reaches stdout and stderr of a process whose streams are clean."""
    out, err = io.BytesIO(), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="utf-8"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(err, encoding="utf-8", line_buffering=True))
    clean_streams()
    return out, err


def test_verbs_talk_without_secrets(monkeypatch):
    out, err = streams(monkeypatch)
    print_json({"a": SECRET, "api_token": "ab", "n_tokens": 2, "list": [f"x{SECRET}"]})
    say(f"it is {SECRET} (password=ab)")
    report(RunnerError(f"first {SECRET}\n    see http://me:pass@host"))
    sys.stdout.flush()
    expected = {"schema_version": 1, "a": MASK, "api_token": "ab", "n_tokens": 2, "list": [f"x{MASK}"]}
    assert json.loads(out.getvalue()) == expected
    told = f"it is {MASK} (password=ab)\nerror: first {MASK}\n    see http://me:{MASK}@host\n"
    assert err.getvalue().decode() == told


def test_whatever_is_written_to_a_stream_is_clean(monkeypatch):
    out, err = streams(monkeypatch)
    sys.stdout.write(f"{SECRET} {json.dumps(SECRET)} api_token: str, required http://me:pass@host\n")
    sys.stderr.write(f"{SECRET} token_count: 3\n")
    assert not out.getvalue()  # buffered, as before
    sys.stdout.flush()
    assert out.getvalue().decode() == f'{MASK} "{MASK}" api_token: str, required http://me:{MASK}@host\n'
    assert err.getvalue().decode() == f"{MASK} token_count: 3\n"
    assert sys.stdout.write("four") == 4


def test_streams_that_are_no_files_stay_as_they_are(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    clean_streams()
    assert sys.stdout is sys.stderr is stream


def test_a_traceback_shows_code_and_hides_what_it_held(monkeypatch):
    _, err = streams(monkeypatch)
    token = SECRET
    try:
        raise ValueError(f"wrong: {token}") from KeyError(token)
    except ValueError as error:
        traceback.print_exception(error)
    text = err.getvalue().decode()
    assert "hunter2" not in text
    assert f"ValueError: wrong: {MASK}\n" in text
    assert '    raise ValueError(f"wrong: {token}")' in text
    assert "KeyError: " in text
