"""Secrets in names: whatever text of a user becomes a key, a name or a path, no file and no output has it."""

import base64
import html
import json
import re
import shlex
import shutil
import unicodedata
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from children import start
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from matplotlib.text import Text
from points import with_points
from run_folders import recipe, run_folder

from runner.plugin.configs import ServedRequest, ServedResponse
from runner.plugin.registry import Registry
from runner.recipe.dumping import dump
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.serve.model import served
from runner.system import plots, secrets
from runner.system.errors import UsageError
from runner.system.escapes import escape, escape_line
from runner.system.secrets import MASK, has_secret, redact, redact_values, register
from runner.tracking import Workspace
from runner.tracking.store import Store
from runner.tracking.tracker import Tracker
from runner.tracking.versions import Versions
from runner.tracking.workspace import RunFolder

SECRETS = [
    "s3cr3tT0ken", 'quo"te\'d\\-s3cr3t', "s3cr3t<&>html", "s3cr3t/+=%20 x", "sécr3t-ñ-\U0001f511",
    "\uff57\uff49\uff44\uff45-s3cr3t",
    "s3cr3t\ttab\u202e", "$(s3cr3t)", "s3cr3t:[x]{y}", "17171717171717",
]  # fmt: skip
ENCODINGS = {
    "plain": str,
    "json": lambda text: json.dumps(text)[1:-1],
    "unescaped json": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "json in json": lambda text: json.dumps(json.dumps(text)),
    "python": repr,
    "ascii": ascii,
    "yaml": lambda text: dump({"key": text}),
    "yaml key": lambda text: dump({text: "value"}),
    "url": lambda text: quote(text, safe=""),
    "lower url": lambda text: re.sub("%..", lambda octet: octet[0].lower(), quote(text, safe="")),
    "path of a url": quote,
    "query": quote_plus,
    "html": html.escape,
    "shell": shlex.quote,
    "terminal": escape,
    "line": escape_line,
    "composed": lambda text: unicodedata.normalize("NFC", text),
    "decomposed": lambda text: unicodedata.normalize("NFD", text),
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "basic login": lambda text: base64.b64encode(f"user:{text}".encode()).decode(),
    "url of base64": lambda text: base64.urlsafe_b64encode(f"ab{text}cd".encode()).decode(),
}
PLACES = st.sampled_from(
    ["{}", "a{}", "{}b", "prefix-{}-suffix", "x={};", "{}{}", "eval/{}/x", "{}.gif", "é{}模", '"{}"']
)
characters = st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp", "Zs"))
secret_texts = st.one_of(st.sampled_from(SECRETS), st.text(characters, min_size=8, max_size=20)).filter(
    lambda text: "*" not in text and not text.isdecimal()
)
per_example = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


@contextmanager
def known(*texts):
    """These are the secrets inside, and no others."""
    before = secrets._known, secrets._pattern
    secrets._known, secrets._pattern = frozenset(), None
    register(*texts)
    try:
        yield
    finally:
        secrets._known, secrets._pattern = before


@pytest.mark.parametrize(("secret", "encoding"), list(product(SECRETS, ENCODINGS)))
def test_a_secret_is_masked_in_every_encoding_and_key(secret, encoding):
    with known(secret):
        written = ENCODINGS[encoding](secret)
        assert MASK in redact(f"before {written} after")
        clean = redact_values({f"a{written}b": [written], written: {written: 1}})
        assert secret not in json.dumps(clean, ensure_ascii=False)
        assert written not in json.dumps(clean, ensure_ascii=False)
        assert has_secret(written)


@settings(max_examples=100)
@given(st.text("abc12", min_size=6, max_size=9), st.text("abc12", min_size=6, max_size=9), st.data())
def test_nothing_is_left_of_secrets_that_overlap(first, second, data):
    shared = data.draw(st.integers(0, min(len(first), len(second)) - 1))
    second = first[len(first) - shared :] + second[shared:]
    assume(not first.isdecimal() and not second.isdecimal())  # shorter numbers are not looked for
    with known(first, second):
        text = f"<{first}{second[shared:]}>"
        clean = redact(text)
        assert first not in clean
        assert second not in clean
        assert set(clean) <= set("<>*")


@per_example
@given(secret_texts, PLACES)
def test_keys_are_masked_and_no_value_is_lost(secret, place):
    with known(secret):
        name = place.format(secret, secret)
        other = name.replace(secret, secret + secret)
        clean = redact_values({name: 1, other: 2, "plain": {name: [name]}})
        assert sorted(map(str, (value for value in clean.values() if isinstance(value, int)))) == ["1", "2"]
        assert secret not in json.dumps(clean, ensure_ascii=False)


@per_example
@given(secret_texts, PLACES, st.sampled_from(["name", "experiment", "key", "tag", "model", "workspace"]))
def test_a_name_that_contains_a_secret_is_refused(tmp_path, migrated_workspace, secret, place, kind):
    with known(secret):
        name = place.format(secret, secret)
        with pytest.raises((UsageError, RecipeError)) as caught:
            make_named(kind, name, tmp_path)
        assert caught.value.exit_code == 2
        assert secret not in redact(str(caught.value))
        for path in migrated_workspace.rglob("*"):
            assert secret not in path.name
            assert path.is_dir() or secret.encode() not in path.read_bytes()


NAMED_PLUGIN = '''
from typing import ClassVar

import torch

from runner.api import GradientLearner, GradientLearnerConfig, Loss, Source, SourceConfig

NAME = {name!r}


class NamedConfig(GradientLearnerConfig):
    """Has names that are secret."""

    kind: ClassVar[str] = "named"
    implementation = "Named"
    learns_from: ClassVar[str] = "points"
    raises: bool = False
    label: str = ""


class Named(GradientLearner):
    def build(self, config, shapes, context):
        self.label = config.label
        return torch.nn.Linear(2, 1)

    def loss(self, batch, noise, progress):
        if self.config.raises:
            raise RuntimeError(NAME)
        return Loss(self.slots.forward(batch["x"]).square().mean(1).sum(), len(batch["x"]), {{NAME: 1.0}})
'''
NAMED_RECIPE = """\
# {name}
name: example
device: cpu
model: {{kind: named}}
data: {{kind: points}}
train: {{updates: 4, batch_size: 4, log_every: 2, evaluate_every: 4}}
tracking: {{system_metrics: false}}
"""


def make_named(kind, name, folder):
    """Gives something this name."""
    if kind == "tag":
        Tracker.open(Workspace(), recipe(), {}, {name: "1"})
    elif kind == "model":
        Versions(Store(Workspace())).create(name, "0" * 32, {"model": "x"}, "x")
    elif kind == "workspace":
        RunFolder.create(Path(folder, name.replace("\0", "_"), "runs"), "x")
    elif kind == "experiment":
        Store(Workspace()).experiment(name)
    else:
        values = {"name": name} if kind == "name" else {"model": {"kind": "mlp", name: 1}}
        load({"extends": "digits_classifier", **values}, (), Registry())


@per_example
@given(secret_texts, PLACES)
def test_a_record_has_no_secret_and_reads_back(migrated_workspace, secret, place):
    with known(secret):
        name = place.format(secret, secret)
        folder = run_folder(tags={name: name}, overrides={name: name}, note=name, reason=name, metrics={name: 1.0},
                            headline=(name,))  # fmt: skip
        text = (folder.path / "run.json").read_text() + folder.spool.read_text()
        assert secret not in text
        assert json.dumps(secret)[1:-1] not in text
        record = folder.record()
        assert record is not None
        assert list(record.metrics.values()) == [1.0]
        shutil.rmtree(folder.path)


@pytest.mark.parametrize("secret", SECRETS[:3])
def test_no_picture_shows_a_secret(tmp_path, secret):
    name = f"a{secret}b"
    shown = []

    def picture(canvas):
        axes = canvas.subplots()
        axes.plot([0, 1], label=name)
        axes.set_title(name)
        axes.set_xticks([0, 1], labels=[name, "b"])
        axes.legend()
        shown.append(canvas)  # which is drawn after this

    with known(secret):
        plots.draw_all({"picture": (picture, (3, 2))}, tmp_path)
        texts = [text.get_text() for text in shown[0].findobj(Text)]
    assert any(MASK in text for text in texts)
    assert [text for text in texts if secret in text] == []


class NoExample:
    """Stands for a learner that offers no example of a request."""

    def example_request(self):
        return None

    def refused(self, request):
        return None


def test_the_description_of_a_server_has_no_secret():
    with known(*SECRETS):
        for secret in SECRETS:
            values = {"kind": "x", "request": ServedRequest, "response": ServedResponse, "page": None}
            config = type("ConfigOfAModel", (), values | {"__module__": __name__})()
            model = served(f"{secret}/1", NoExample(), config, {secret: secret})
            assert has_secret(model.name + json.dumps(model.about)) is False


def test_a_run_with_secrets_in_all_names_leaves_none(tmp_path, migrated_workspace):
    secret = "Tr0ub4dor-and-3"
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / f"{secret}.py").write_text(with_points(NAMED_PLUGIN.format(name=secret), "{NAME: 1.0}"))
    (folder / f"{secret}.yaml").write_text(NAMED_RECIPE.format(name=secret))
    words = [f"{secret}.yaml", "--plugin", f"{secret}.py", "--note", secret, "--tag", f"a={secret}"]
    words.append(f"model.label=a{secret}")
    secrets_given = {"RUNNER_SECRETS": "TOKEN", "TOKEN": secret, "RUNNER_WORKSPACE": str(migrated_workspace)}
    printed = ""
    for code, command in (
        (0, ["run", *words]), (0, ["ls", "--json"]), (0, ["show", "latest"]),
        (1, ["run", *words, "model.raises=true"]), (2, ["run", *words, "--tag", f"{secret}=1"]),
        (2, ["run", *words, f"tracking.experiment={secret}"]), (2, ["run", *words, f"name={secret}"]),
        (2, ["run", *words, f"model.{secret}=1"]),
    ):  # fmt: skip
        child = start(tmp_path / "output", *command, within=folder, **secrets_given)
        assert child.wait() == code, child.stderr
        printed += child.stdout + child.stderr
    assert MASK in printed
    assert secret not in printed
    for path in migrated_workspace.rglob("*"):
        assert secret not in path.name
        assert path.is_dir() or secret.encode() not in path.read_bytes(), path
