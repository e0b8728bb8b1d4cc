import json
import subprocess
import sys
from contextlib import contextmanager
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.recipe.dumping import dump
from runner.system import secrets
from runner.system.secrets import MASK, redact, redact_values, register, register_environment


@contextmanager
def forgotten():
    """Nothing is registered inside, nor remembered afterwards."""
    before = secrets._known, secrets._pattern
    secrets._known, secrets._pattern = frozenset(), None
    try:
        yield
    finally:
        secrets._known, secrets._pattern = before


@pytest.fixture(autouse=True)
def nothing_registered():
    with forgotten():
        yield


characters = st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp", "Zs"))
secret_texts = st.text(characters, min_size=8, max_size=20).filter(lambda text: "*" not in text)
fragments = st.sampled_from([": ", "=", '"', "'", "\\", "[", "}", ",", "\n", "  ", "#", "://u:", "@h/", "*", MASK])
messy = st.lists(st.one_of(fragments, st.text(max_size=5)), max_size=25).map("".join)
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), messy),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner)),
    max_leaves=12,
)

SPELLINGS = {
    "plain": str,
    "json": lambda text: json.dumps(text)[1:-1],
    "unescaped json": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "python": lambda text: repr(text)[1:-1],
    "yaml": lambda text: text.replace("'", "''"),
    "url": lambda text: quote(text, safe=""),
    "query": quote_plus,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@given(secret=secret_texts, before=messy, after=messy)
def test_a_registered_secret_is_found_in_no_spelling(spelling, secret, before, after):
    with forgotten():
        register(secret)
        written = SPELLINGS[spelling](secret)
        clean = redact(f"{before} {written} {after}")
        assert secret not in clean
        assert written not in clean
        assert MASK in clean


@given(secret=secret_texts, other=plain)
def test_a_registered_secret_is_nowhere_in_structured_values(secret, other):
    with forgotten():
        register(secret)
        clean = redact_values({"a": f"x{secret}y", "b": [secret, {"c": secret}], "d": (secret, 1)})
        assert clean == {"a": f"x{MASK}y", "b": [MASK, {"c": MASK}], "d": [MASK, 1]}
        values = redact_values(other)
        assert redact_values(values) == values
        for text in (json.dumps(clean), dump(clean)):
            assert secret not in text


def test_numbers_and_names_that_hold_no_secret_stay_as_they_are():
    register("hunter2-secret")
    record = {"token_count": 3, "password_length": "12", "api_token": "abc", "auth": None, "metrics": {"tokens": 0.5}}
    assert redact_values(record) == record
    for text in ("api_token: abc", "token = tokens[i]", "password=ab", json.dumps(record)):
        assert redact(text) is text


@given(
    user=st.text("abz09._-", max_size=5),
    password=st.text(
        st.characters(codec="ascii", exclude_characters="/?#@\"'\\", exclude_categories=("Cc", "Zs")), min_size=1
    ),
)
def test_the_password_of_a_url_is_masked(user, password):
    with forgotten():
        assert redact(f"see postgresql://{user}:{password}@db:5432/x") == f"see postgresql://{user}:{MASK}@db:5432/x"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("http://me:p%40ss%2Fword@host/x", f"http://me:{MASK}@host/x"),
        ("http://me:p@ss@host/x", f"http://me:{MASK}@host/x"),
        ("postgresql+psycopg://me:p/w@host/x", f"postgresql+psycopg://me:{MASK}@host/x"),
        ("redis://:hunter2@host", f"redis://:{MASK}@host"),
        ("a://b:c@d and e://f:g@h", f"a://b:{MASK}@d and e://f:{MASK}@h"),
        (f"http://me:{MASK}@host", f"http://me:{MASK}@host"),
        ("http://127.0.0.1:5000/a@b", "http://127.0.0.1:5000/a@b"),
        ("https://host:8080?mail=a@b.c", "https://host:8080?mail=a@b.c"),
        ("ssh://git@host/x:y", "ssh://git@host/x:y"),
    ],
)
def test_urls(text, clean):
    assert redact(text) == clean


def test_the_longest_of_secrets_that_begin_alike_is_masked_as_a_whole():
    for secret in ("hunter2-a", "hunter2-abc", "hunter2-ab"):
        register(secret)
    assert redact("hunter2-abc hunter2-ab hunter2-a") == f"{MASK} {MASK} {MASK}"


@pytest.mark.parametrize("short", ["", "  ", "abcde", "1234567", "******", MASK])
def test_what_is_short_is_not_looked_for_in_other_texts(short):
    register(short)
    text = f"a {short} b 0.12345678 abcdef"
    assert redact(text) is text


def test_every_line_of_a_long_secret_is_one():
    register("-----BEGIN KEY-----\nMIIEvQIBADAN\n  qkiG9w0BAQ\n-----END KEY-----")
    assert redact("+    MIIEvQIBADAN\n+    qkiG9w0BAQ\n") == f"+    {MASK}\n+    {MASK}\n"


def test_listed_environment_variables_are_secret_and_others_are_not(monkeypatch):
    monkeypatch.setenv("ONE", "hunter2-one")
    monkeypatch.setenv("OTHER", "hunter2-other")
    monkeypatch.setenv("API_TOKEN", "hunter2-unlisted")
    monkeypatch.setenv("RUNNER_SECRETS", "ONE, OTHER,MISSING,")
    register_environment()
    assert redact("hunter2-one hunter2-other hunter2-unlisted") == f"{MASK} {MASK} hunter2-unlisted"


def test_a_process_reads_the_list_when_it_starts(monkeypatch):
    monkeypatch.setenv("MINE", "hunter2-mine")
    monkeypatch.setenv("RUNNER_SECRETS", "MINE")
    code = "from runner.system.secrets import redact; print(redact('hunter2-mine'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{MASK}\n"
