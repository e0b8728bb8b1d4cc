import json
from contextlib import contextmanager
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.recipe.scalars import dump
from runner.system import secrets
from runner.system.secrets import (
    MASK,
    looks_secret,
    may_hold_secret,
    redact,
    redact_known,
    redact_values,
    register,
    register_environment,
    register_url,
)


@contextmanager
def forgotten():
    """Nothing is registered inside, nor remembered afterwards."""
    before, secrets._known = secrets._known, secrets._Known()
    try:
        yield
    finally:
        secrets._known = before


@pytest.fixture(autouse=True)
def nothing_registered():
    with forgotten():
        yield


characters = st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp", "Zs"))
secret_texts = st.text(characters, min_size=6, max_size=20).filter(
    lambda text: not text.isdecimal() and "*" not in text and text != redact_values({"password": text})["password"]
)
fragments = st.sampled_from(
    [
        "token",
        "api_key",
        ": ",
        "=",
        '"',
        "'",
        "\\",
        "[",
        "]",
        "{",
        "}",
        ",",
        "\n",
        "  ",
        "+",
        "- ",
        "#",
        "://u:",
        "@h/",
        "*",
    ]
)
messy = st.lists(st.one_of(fragments, st.text(max_size=5), st.just(MASK)), max_size=25).map("".join)
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), messy),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.text(max_size=8), st.sampled_from(["api_token", "n_tokens", "a.password"])), inner
        ),
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(
    "key",
    [
        "token", "api_token", "apiToken", "api-key", "APIKey", "API_KEY", "apikey", "access_key", "SECRET_ACCESS_KEY",
        "private_key", "password", "dbPassword", "PGPASSWORD", "passwd", "client_secret", "credential", "credentials",
        "auth", "auth_token", "Authorization", "HF_TOKEN", "password2", "tokens", "tokens.0", "data.api_token",
        "credentials.user", "special_password",
    ],
)  # fmt: skip
def test_names_of_secrets(key):
    assert looks_secret(key)


@pytest.mark.parametrize(
    "key",
    [
        "", "author", "tokenizer", "secretary", "keyboard", "key", "max_tokens", "n_tokens", "eos_token",
        "token_merging", "auth_type", "auth.kind", "password_file", "private_key_path",
        "train/token_accuracy", "hidden", "passes",
    ],
)  # fmt: skip
def test_names_of_something_else(key):
    assert not looks_secret(key)


SPELLINGS = {
    "plain": str,
    "json": json.dumps,
    "unescaped json": lambda text: json.dumps(text, ensure_ascii=False),
    "python": repr,
    "yaml": lambda text: "'" + text.replace("'", "''") + "'",
    "url": lambda text: quote(text, safe=""),
    "query": quote_plus,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@given(secret=secret_texts, before=messy, after=messy)
def test_a_registered_secret_is_found_in_no_spelling(spelling, secret, before, after):
    with forgotten():
        register(secret)
        written = SPELLINGS[spelling](secret)
        inner = written[1:-1] if spelling in ("json", "unescaped json", "python", "yaml") else written
        for masked in (redact, redact_known, lambda text: redact(text, code=True)):
            clean = masked(f"{before} {written} {after}")
            assert secret not in clean
            assert inner not in clean
            assert MASK in clean


@given(secret=secret_texts, other=plain)
def test_a_registered_secret_is_nowhere_in_structured_values(secret, other):
    with forgotten():
        register(secret)
        values = {"a": f"x{secret}y", secret: [secret, {"b": secret}], "c": other}
        for text in (str(redact_values(values)), json.dumps(redact_values(values)), dump(redact_values(values))):
            assert secret not in text


@given(known=st.lists(st.one_of(secret_texts, messy), max_size=3), text=messy)
def test_what_is_clean_stays_as_it_is(known, text):
    with forgotten():
        for secret in known:
            register(secret)
        for masked in (redact, lambda text: redact(text, code=True), redact_values):
            clean = masked(text)
            assert masked(clean) == clean


@given(known=st.lists(secret_texts, max_size=2), value=plain)
def test_values_stay_values_and_json_stays_json(known, value):
    with forgotten():
        for secret in known:
            register(secret)
        clean = redact_values(value)
        assert redact_values(clean) == clean
        json.loads(redact_known(json.dumps(clean)))
        json.loads(json.dumps(clean))
    assert redact_values([1, 2.5, None, True]) == [1, 2.5, None, True]


def test_a_text_without_secrets_is_given_back_itself():
    text = json.dumps({"metrics": {f"train/loss_{number}": number / 7 for number in range(20)}})
    assert not may_hold_secret(text)
    assert redact(text) is text


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("api_token: hunter2", f"api_token: '{MASK}'"),
        ("  api_token: correct horse battery # mine", f"  api_token: '{MASK}' # mine"),
        ("+  password: correct horse", f"+  password: '{MASK}'"),
        ("{kind: net, api_token: hunter2, lr: 1}", f"{{kind: net, api_token: '{MASK}', lr: 1}}"),
        ("x: {password: 'it''s me', y: 2}", f"x: {{password: '{MASK}', y: 2}}"),
        ('{"api_token":"a\\"b","x":1}', f'{{"api_token":"{MASK}","x":1}}'),
        ('a \\"token\\": \\"hunter2\\" b', f'a \\"token\\": \\"{MASK}\\" b'),
        ("api_token: \"hunter2 is not closed", f'api_token: "{MASK}'),
        ("tokens: [abc, 'de', 3]", f"tokens: ['{MASK}', '{MASK}', 3]"),
        ("--set #1 data.api_token=hunter2", f"--set #1 data.api_token={MASK}"),
        ("login failed (password=hunter2).", f"login failed (password={MASK})."),
        ("https://host/x?token=hunter2&page=2", f"https://host/x?token={MASK}&page=2"),
        ("Authorization: Bearer hunter2", f"Authorization: '{MASK}'"),
        ("header authorization=Bearer hunter2 x", f"header authorization={MASK} x"),
        ("API_TOKEN=hunter2", f"API_TOKEN={MASK}"),
        ("error: x='password=hunter2'", f"error: x='password={MASK}'"),
        ("note=message: {a: token=hunter2}", f"note=message: {{a: token={MASK}}}"),
        ("password=a;b&c;host=db", f"password={MASK};host=db"),
        ("{'password': 'hunter2'}", f"{{'password': '{MASK}'}}"),
    ],
)  # fmt: skip
def test_what_a_name_gives_away(text, clean):
    assert redact(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: 512",
        "n_tokens=512, token: null",
        "password: ''",
        "auth: on",
        "recipe.yaml:3:4: data.api_token: is missing",
        "recipe.yaml:3:4: api_token: unknown key - did you mean 'x'?",
        "give it again: --set data.api_token=VALUE",
        "  google-auth: 2.40.3",
        '"api_token": {"type": "string"}',
        "if token == 'x'",
        "data.api_token: default",
    ],
)
def test_what_is_no_secret_can_be_read(text):
    assert redact(text) == text


@pytest.mark.parametrize(
    "line",
    ["token = tokens[i]", "def f(token: str, auth: Auth = None): ...", "    self.token = token  # the next one"],
)
def test_code_is_no_setting(line):
    assert redact(line, code=True) == line


@pytest.mark.parametrize(
    "line", ['token = "hunter2"', "{'token': 'hunter2'}", 'token: str | None = "hunter2"', "token=f'hunter2'"]
)
def test_a_secret_in_code_is_masked(line):
    clean = redact(line, code=True)
    assert "hunter2" not in clean
    assert MASK in clean


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
        ("http://127.0.0.1:5000/a@b", "http://127.0.0.1:5000/a@b"),
        ("https://host:8080?mail=a@b.c", "https://host:8080?mail=a@b.c"),
        ("ssh://git@host/x:y", "ssh://git@host/x:y"),
    ],
)
def test_urls(text, clean):
    assert redact(text) == clean


def test_the_password_of_a_url_is_masked_without_its_url():
    register_url("http://me:s3cret%2Fpass@host/x")
    assert redact("wrong: s3cret/pass or s3cret%2Fpass") == f"wrong: {MASK} or {MASK}"


def test_short_secrets_and_numbers_are_masked_behind_their_key_alone():
    register("1234", "pin")
    register("ab", "code")
    register("20261104", "birthday")
    text = "pin: '1234', \"pin\": 1234, code=ab, ab 1234 12345678 0.20261104"
    assert redact(text) == f"pin: '{MASK}', \"pin\": {MASK}, code={MASK}, ab 1234 12345678 0.20261104"
    assert redact("born 20261104.") == f"born {MASK}."


def test_every_line_of_a_long_secret_is_one():
    register("-----BEGIN KEY-----\nMIIEvQIBADAN\n  qkiG9w0BAQ\n-----END KEY-----")
    clean = redact("+    MIIEvQIBADAN\n+    qkiG9w0BAQ\n")
    assert clean == f"+    {MASK}\n+    {MASK}\n"


@pytest.mark.parametrize("word", ["", "  ", "none", "password", "default", MASK, "******"])
def test_words_are_no_secrets(word):
    register(word, "token")
    assert redact(f"a {word} b default password none") == f"a {word} b default password none"


def test_the_environment_is_searched(monkeypatch, tmp_path):
    monkeypatch.setenv("SOME_API_KEY", "hunter2-of-the-environment")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunt3r")
    monkeypatch.setenv("https_proxy", "http://me:proxy-password@proxy:8080")
    monkeypatch.setenv("OTHER_TOKEN", "short")
    monkeypatch.setenv("SERVICE_CREDENTIALS", str(tmp_path))
    register_environment()
    text = f"hunter2-of-the-environment hunt3r proxy-password short {tmp_path}"
    assert redact(text) == f"{MASK} {MASK} {MASK} short {tmp_path}"


def test_numbers_and_names_of_metrics_survive():
    record = {"step": 5, "metrics": {"train/token": "nan", "perf/tokens": 12.5, "auth": "-inf"}}
    assert redact_values(record) == record
