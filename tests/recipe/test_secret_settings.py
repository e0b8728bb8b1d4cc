import json
import os
from typing import ClassVar

import pytest
from faces import FakeCatalog, Net, write_recipe
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import Field, SecretBytes, SecretStr

from runner.api import Config
from runner.recipe.dumping import dump
from runner.recipe.loader import load, secret_assignments
from runner.recipe.lock import copy_recipe, write_lock
from runner.recipe.recipe import flatten
from runner.recipe.rendering import render
from runner.recipe.yaml_nodes import RecipeError, parse, read
from runner.system import secrets
from runner.system.secrets import MASK


class Server(Config):
    host: str
    key: SecretStr | None = None


class Guarded(Net):
    """Has secrets of every sort."""

    kind: ClassVar[str] = "guarded"
    pin: SecretStr | None = None
    raw: SecretBytes = SecretBytes(b"")
    found: SecretStr = Field(default_factory=lambda: SecretStr(os.environ.get("FOUND_HERE", "")))
    cards: list[SecretStr] = Field([])
    url: str = ""
    servers: list[Server] = Field([])
    headers: dict[str, SecretStr] = Field({})
    token_count: int = 3
    api_token: str = ""


class Guardians(FakeCatalog):
    faces: ClassVar = FakeCatalog.faces | {"model": (Net, Guarded)}


RECIPE = """\
name: guarded
data: {{kind: table}}
train: {{updates: 10}}
model: {{kind: guarded{settings}}}
"""


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(secrets, "_known", frozenset())
    monkeypatch.setattr(secrets, "_pattern", None)


def loaded(folder, settings="", *sets):
    return load(write_recipe(folder, RECIPE.format(settings=settings)), sets, Guardians())


def failure(folder, settings="", *sets):
    with pytest.raises(RecipeError) as caught:
        loaded(folder, settings, *sets)
    return secrets.redact(str(caught.value))  # as the command line shows it


SETTINGS = ", pin: '12', raw: hunter2-raw, url: 'http://me:hunter2-url@h/x', cards: [abc, hunter2-list]"


def test_values_are_masked_and_the_child_that_needs_them_gets_them(tmp_path, monkeypatch):
    monkeypatch.setenv("FOUND_HERE", "hunter2-found")
    servers = "model.servers=[{host: a, key: hunter2-server}]"
    recipe = loaded(tmp_path, SETTINGS, servers, "model.headers={a: hunter2-header}")
    model = recipe.values()["model"]
    assert model["pin"] == model["raw"] == model["found"] == MASK
    assert model["url"] == f"http://me:{MASK}@h/x"
    assert model["cards"] == [MASK, MASK]
    assert model["servers"] == [{"host": "a", "key": MASK}]
    assert model["headers"] == {"a": MASK}
    assert "hunter2" not in json.dumps(recipe.values())
    clear = recipe.values(masked=False)
    assert clear["model"]["pin"] == "12"
    assert clear["model"]["raw"] == "hunter2-raw"
    assert clear["model"]["found"] == "hunter2-found"
    again = load(write_recipe(tmp_path, json.dumps(clear), "clear.yaml"), (), Guardians())
    assert again.values(masked=False) == clear


def test_what_is_not_declared_secret_is_an_ordinary_setting_whatever_its_name(tmp_path):
    recipe = loaded(tmp_path, ", token_count: 7, api_token: ordinary-text")
    assert recipe.values()["model"]["token_count"] == 7
    assert recipe.values()["model"]["api_token"] == "ordinary-text"
    assert secret_assignments(recipe) == []
    assert "got 'ordinary-text'" in failure(tmp_path, ", token_count: ordinary-text")


def test_the_digest_does_not_depend_on_secrets(tmp_path):
    assert loaded(tmp_path, SETTINGS).digest == loaded(tmp_path, SETTINGS.replace("hunter2", "hunter3")).digest


def test_a_clear_dump_counts_as_no_reading(tmp_path):
    recipe = loaded(tmp_path, SETTINGS)
    recipe.values(masked=False)
    assert "pin" in recipe.model.recorded().unread()


def test_origins_cite_no_secret(tmp_path):
    sets = ("model.pin='12'", "model.raw=hunter2 and more", "model.cards=[ab, cd]", "model.url='http://me:pw@h'")
    recipe = loaded(tmp_path, "", *sets)
    (tmp_path / "run").mkdir()
    lock = write_lock(recipe, tmp_path / "run", Guardians()).read_text()
    shown = "\n".join(render(recipe.values(), recipe.origins))
    assert "# override\n" in shown
    for secret in ("hunter2", "and more", "'12'", "ab,", "cd]", "pw"):
        assert secret not in shown
        assert secret not in lock


def test_a_lock_wants_its_secrets_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FOUND_HERE", "hunter2-found")
    recipe = loaded(tmp_path, SETTINGS)
    (tmp_path / "run").mkdir()
    lock = write_lock(recipe, tmp_path / "run", Guardians())
    assert "hunter2" not in lock.read_text()
    with pytest.raises(RecipeError) as caught:
        load(lock, (), Guardians())
    told = str(caught.value)
    for name in ("pin", "raw", "url", "cards"):
        assert f"model.{name}: a secret is not kept in a run's files; give it again: --set model.{name}=VALUE" in told
    assert "model.found" not in told  # it is found again where it was
    sets = ("model.pin='12'", "model.raw=hunter2-raw", "model.url=http://me:hunter2-url@h/x", "model.cards=[a,b]")
    again = load(lock, sets, Guardians())
    assert again.digest == recipe.digest
    assert again.values(masked=False)["model"]["found"] == "hunter2-found"


def test_a_recipe_completes_its_own_lock(tmp_path):
    recipe = loaded(tmp_path, SETTINGS, "model.servers=[{host: a, key: 'b: [c'}]", "model.pin='\U0001f511: #\\'")
    (tmp_path / "run").mkdir()
    again = load(write_lock(recipe, tmp_path / "run", Guardians()), secret_assignments(recipe), Guardians())
    assert again.values(masked=False) == recipe.values(masked=False)
    assert secret_assignments(loaded(tmp_path)) == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (", pin: hunter2-secret, lr: many", "model.lr: should be a number, got 'many'"),
        (", pin: 12345678", "model.pin: should be text, got **********"),
        (", pin: [12345678]", "model.pin: should be text, got a list"),
        (", pin: hunter2-secret, order: x", "model.order: should be 'forward' or 'backward'"),
        (", servers: [{host: 1, key: hunter2-secret}]", "model.servers.0.host: should be text"),
        (", headers: {a: hunter2-secret, b: 12345678}", "model.headers.b: should be text"),
        (", pin: hunter2-secret, lr: 0.1, lr: 0.1", "duplicate key"),
        (
            ", url: 'http://me:hunter2-secret@host/and/a/path/that/is/too/long/to/be/shown/as/a/whole', lr: x",
            "model.lr",
        ),
        (", lr: 'http://me:hunter2-secret@host/and/a/path/that/is/too/long/to/be/shown/as/a/whole'", "model.lr"),
    ],
)
def test_what_is_wrong_is_said_without_secrets(tmp_path, settings, told):
    text = failure(tmp_path, settings)
    assert told in text
    for secret in ("hunter2-", "12345678"):
        assert secret not in text


def test_an_assignment_that_is_wrong_is_quoted_without_secrets(tmp_path):
    text = failure(tmp_path, "", "model.raw=[hunter2-secret, 3]")
    assert text.startswith("override: model.raw: should be ")
    assert "hunter2" not in text


def test_the_caret_stays_below_what_is_wrong(tmp_path):
    _, line, caret = failure(tmp_path, ", pin: a-hunter2-secret-that-is-long, lr: many").splitlines()
    assert line[caret.index("^") :].startswith("many}")


def test_a_line_that_is_cut_short_shows_no_half_of_a_secret(tmp_path):
    for blanks in range(40, 130, 3):
        text = failure(tmp_path, f", pin: hunter2-secret-of-some-length, {' ' * blanks}lr: many")
        assert "hunter" not in text
        assert "length" not in text


@pytest.mark.parametrize(
    "spelled",
    [
        "hunter2", "'hunter2'", '"hunter2"', '"h\\x75nter2"', "&a hunter2", "&a 'it''s hunter2'", "abc", "'a#b: [c'",
        "|\n    hunter2\n    hunter3\n", ">-\n    hunter2\n\n    hunter3\n", "a hunter2\n    over lines\n",
    ],
)  # fmt: skip
def test_a_copy_reads_back_with_its_secrets_masked(tmp_path, spelled):
    text = f"# mine\r\nname: x\nmodel:\n  kind: guarded\n  pin: {spelled}\n  lr: 0.1 # fast\ntrain: {{updates: 1}}\n"
    path = write_recipe(tmp_path, text + "data: {kind: table}\n")
    copy_recipe(load(path, (), Guardians()), tmp_path / "copy.yaml")
    copied = (tmp_path / "copy.yaml").read_bytes().decode()
    assert read(tmp_path / "copy.yaml", []).get("model").plain() == {"kind": "guarded", "pin": MASK, "lr": 0.1}
    assert "hunter" not in copied
    assert copied.startswith("# mine\r\nname: x\n")
    assert "lr: 0.1 # fast" in copied


def test_a_copy_keeps_aliases_and_masks_lists(tmp_path):
    recipe = loaded(tmp_path, ", cards: [&t abc, 'de'], headers: {a: 'x', b: *t}")
    copy_recipe(recipe, tmp_path / "copy.yaml")
    model = read(tmp_path / "copy.yaml", []).get("model").plain()
    assert model == {"kind": "guarded", "cards": [MASK, MASK], "headers": {"a": MASK, "b": MASK}}


def test_a_secret_that_was_replaced_is_in_no_copy_and_in_no_patch(tmp_path):
    write_recipe(tmp_path, "name: base\nmodel: {kind: guarded, pin: hunter2-base}\n", "base.yaml")
    text = RECIPE.format(settings=", pin: hunter2-file") + "extends: base.yaml\n"
    recipe = load(write_recipe(tmp_path, text), ("model.pin=null",), Guardians())
    copy_recipe(recipe, tmp_path / "copy.yaml")
    assert "hunter2" not in (tmp_path / "copy.yaml").read_text()
    (tmp_path / "run").mkdir()
    write_lock(recipe, tmp_path / "run", Guardians())
    assert secrets.redact("+  pin: hunter2-file\n-  pin: hunter2-base") == f"+  pin: {MASK}\n-  pin: {MASK}"


def test_a_recipe_without_secrets_is_copied_as_it_is(tmp_path):
    recipe = loaded(tmp_path, ", lr: 0.5, api_token: abcdefgh")
    copy_recipe(recipe, tmp_path / "copy.yaml")
    assert (tmp_path / "copy.yaml").read_bytes() == recipe.path.read_bytes()


def test_a_recipe_that_is_no_longer_valid_is_copied_without_its_secrets(tmp_path):
    recipe = loaded(tmp_path, ", pin: hunter2-secret")
    recipe.path.write_text("model: [pin: hunter2-secret\nurl: http://me:other@host")
    copy_recipe(recipe, tmp_path / "copy.yaml")
    assert (tmp_path / "copy.yaml").read_text() == f"model: [pin: {MASK}\nurl: http://me:{MASK}@host"


texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(secret=texts, other=texts)
def test_whatever_the_secret_the_copy_holds_its_mask(tmp_path, secret, other):
    document = {
        "name": "x", "data": {"kind": "table"}, "train": {"updates": 1},
        "model": {"kind": "guarded", "pin": secret, "cards": [secret, other]},
    }  # fmt: skip
    secrets._known, secrets._pattern = frozenset(), None
    rest = dump(document | {"model": {"kind": "guarded", "pin": "", "cards": []}})
    assume(MASK not in secret + other and secret.strip() not in rest and other.strip() not in rest)
    recipe = load(write_recipe(tmp_path, dump(document)), (), Guardians())
    copy_recipe(recipe, tmp_path / "copy.yaml")
    copied = parse((tmp_path / "copy.yaml").read_text(), "copy", []).plain()
    assert copied == document | {"model": {"kind": "guarded", "pin": MASK, "cards": [MASK, MASK]}}
    assert dict(flatten(recipe.values()))["model.pin"] == MASK
