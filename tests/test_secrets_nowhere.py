"""Real runs of a recipe full of secrets; afterwards none is found in any file, nor in anything that was printed."""

import json
import shutil
import subprocess
from pathlib import Path
from urllib.parse import quote

import pytest
from children import start
from points import with_points

from runner.system.secrets import MASK

ROOT = Path(__file__).parents[1]
SECRETS = {
    name: f"{name}-Tr0ub4dor&3-é"
    for name in (
        "declared", "bytes", "list", "nested", "set", "replaced", "default", "stage", "environment", "url", "tracking",
        "storage",
    )
}  # fmt: skip
PLUGIN = '''
import logging
import os
import sys
import warnings
from typing import ClassVar

import torch
from pydantic import Field, SecretBytes, SecretStr

from runner.api import Config, Exact, GradientLearner, GradientLearnerConfig, Loss
from runner.api import Source, SourceConfig, Stage, StageConfig


class Login(Config):
    user: str
    key: SecretStr


class GuardedConfig(GradientLearnerConfig):
    """Has secrets of every sort."""

    kind: ClassVar[str] = "guarded"
    implementation = "Guarded"
    learns_from: ClassVar[str] = "points"
    card: SecretStr
    raw: SecretBytes
    found: SecretStr = Field(default_factory=lambda: SecretStr(os.environ["FOUND_HERE"]))
    many: list[SecretStr]
    logins: list[Login] = Field([])
    url: str
    token_count: int = 7
    explodes: bool = False


class TalkConfig(StageConfig):
    """Says what it should not."""

    kind: ClassVar[str] = "talk"
    implementation = "Talk"
    phase: ClassVar[int] = 1
    pin: SecretStr

    def contract(self, setting):
        return Exact()


class Talk(Stage):
    def attach(self, pipeline):
        for secret in [self.config.pin.get_secret_value(), *pipeline.learner.known]:
            pipeline.note(f"it is {secret}")


class IdleConfig(StageConfig):
    """Says why it does nothing."""

    kind: ClassVar[str] = "idle"
    implementation = "Missing"
    phase: ClassVar[int] = 1

    def contract(self, setting):
        return Exact()

    def inactive(self, setting):
        return f"the card is {setting.model.card.get_secret_value()}, the url {setting.model.url}"


class Guarded(GradientLearner):
    def build(self, config, shapes, context):
        self.known = [config.card.get_secret_value(), config.raw.get_secret_value().decode(), config.url]
        self.known += [config.found.get_secret_value(), os.environ["SOME_KEY"]]
        self.known += [each.get_secret_value() for each in config.many]
        self.known += [each.key.get_secret_value() for each in config.logins]
        logging.getLogger("somebody").warning("logged in: %s", self.known)
        warnings.warn(f"deprecated: {self.known}", stacklevel=1)
        print(*self.known, file=sys.stderr)
        return torch.nn.Linear(2, config.token_count)

    def loss(self, batch, noise, progress):
        if self.config.explodes:
            raise RuntimeError(f"login with {self.known} failed: {' '.join(self.known)}")
        return Loss(self.slots.forward(batch["x"]).square().mean(1).sum(), len(batch["x"]))
'''
RECIPE = f"""\
name: guarded
device: cpu
data: {{kind: points}}
train: {{updates: 40, batch_size: 4, log_every: 10, checkpoint_every: 20}}
tracking: {{system_metrics: false}}
optimization: {{talk: {{pin: '{SECRETS["stage"]}'}}, idle: on}}
model:
  {{kind: guarded, card: "{SECRETS["declared"]}", many: ["{SECRETS["replaced"]}"], raw: '{SECRETS["bytes"]}',
   logins: [{{user: me, key: '{SECRETS["nested"]}'}}], url: 'postgresql://me:{quote(SECRETS["url"])}@db:5432/x',
   token_count: 8}}
"""
WRONG = {
    "number": RECIPE.replace("token_count: 8", "token_count: many"),
    "type": RECIPE.replace("card: ", "card: [1], found: ").replace("many: [", "many: [3, "),
    "nested": RECIPE.replace("user: me", "user: 3"),
    "key": RECIPE.replace("token_count: 8", "token_counts: 8"),
}  # fmt: skip
STUDY = """\
kind: study
name: searched
recipe: recipe.yaml
space: {optimizer.lr: {float: [1e-4, 1e-2], log: true}}
objectives: {eval/zero: minimize}
budget: {trials: 1}
"""


class Site:
    """A checkout with a recipe, and a workspace beside it."""

    def __init__(self, folder: Path, database: Path) -> None:
        self.folder = folder / "checkout"
        self.workspace = folder / "workspace"
        self.output = folder / "output"
        self.printed: dict[str, str] = {}
        self.folder.mkdir()
        self.workspace.mkdir()
        shutil.copy(database, self.workspace / "mlflow.db")
        (self.folder / "plugin.py").write_text(with_points(PLUGIN, '{"zero": 0.0}'))
        self.commit({"recipe.yaml": "name: empty\n", "settings.ini": "", "client.py": "", "notes.txt": ""})
        for name, text in {
            "recipe.yaml": RECIPE,
            "study.yaml": STUDY,
            "settings.ini": f"[login]\nSOME_KEY = {SECRETS['environment']}\n",
            "client.py": f"token = 'redis://:{quote(SECRETS['url'])}@host'\ntokens = tokens[1:]\n",
            "notes.txt": f"mine is {SECRETS['declared']}\n",
            **{f"{name}.yaml": text for name, text in WRONG.items()},
        }.items():
            (self.folder / name).write_text(text)

    def commit(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            (self.folder / name).write_text(text)
        identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
            subprocess.run(["git", *command], cwd=self.folder, check=True)

    def run(self, *arguments: str, code: int = 0, **variables: str) -> str:
        """What a ``runner`` process printed on stdout."""
        environment = {
            "RUNNER_WORKSPACE": str(self.workspace), "FOUND_HERE": SECRETS["default"],
            "SOME_KEY": SECRETS["environment"], "RUNNER_SECRETS": "SOME_KEY",
            "GIT_CEILING_DIRECTORIES": str(ROOT), "COLUMNS": "60", **variables,
        }  # fmt: skip
        child = start(self.output, *arguments, within=self.folder, **environment)
        assert child.wait() == code, child.stderr
        self.printed[" ".join([*variables, *arguments])] = child.stdout + child.stderr
        return child.stdout


ARGUMENTS = ("recipe.yaml", "--plugin", "plugin.py", "--set", f"model.many=[{SECRETS['set']}, ab]")


@pytest.fixture(scope="module")
def site(tmp_path_factory, migrated_database):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    site = Site(tmp_path_factory.mktemp("secrets"), migrated_database)
    first = json.loads(site.run("run", *ARGUMENTS, "--json"))
    site.run("run", *ARGUMENTS)
    site.run("run", *ARGUMENTS, "--set", "model.explodes=true", code=1)
    site.run("run", first["lock"], "--plugin", "plugin.py", code=2)
    site.run("compare", first["run_id"], "latest")
    site.run("compare", first["run_id"], "latest", "--json")
    site.run("show", *ARGUMENTS, "--origin")
    site.run("show", *ARGUMENTS, "--json", "--origin")
    for name in WRONG:
        for form in ((), ("--json",)):
            site.run("validate", f"{name}.yaml", "--plugin", "plugin.py", *form, code=2)
    site.run("show", *ARGUMENTS, "--set", f"model.raw=[{SECRETS['set']}]", code=2)
    study = ("study", "run", "study.yaml", *ARGUMENTS[1:])
    site.run(*study)
    uri = f"http://me:{quote(SECRETS['tracking'])}@127.0.0.1:1"
    for verb in (("run", *ARGUMENTS), ("compare", "a", "b"), ("doctor",)):
        site.run(*verb, code=1 if verb == ("doctor",) else 5, MLFLOW_TRACKING_URI=uri)
    site.run(*study, code=5, OPTUNA_STORAGE=f"postgresql://me:{quote(SECRETS['storage'])}@127.0.0.1:1/studies")
    return site


def test_no_secret_is_in_any_file_of_the_workspace(site):
    files = {path: path.read_bytes() for path in site.workspace.rglob("*") if path.is_file()}
    expected = {"mlflow.db", "optuna.db", "recipe.lock.yaml", "recipe.yaml", "source.patch", "spool.jsonl", "run.json"}
    assert expected <= {path.name for path in files}
    assert found_in(files) == {}


def test_no_secret_is_printed(site):
    assert found_in({command: text.encode() for command, text in site.printed.items()}) == {}


def test_no_file_is_named_after_a_secret(site):
    names = "\n".join(map(str, site.workspace.rglob("*")))
    assert "Tr0ub4dor" not in names


def test_what_was_printed_has_masks_in_their_place(site):
    told = site.printed["run " + " ".join(ARGUMENTS)]
    assert f"logged in: ['{MASK}', '{MASK}', 'postgresql://me:{MASK}@db:5432/x', '{MASK}', '{MASK}', '{MASK}'" in told
    assert f"it is {MASK}" in told
    crash = site.printed["run " + " ".join(ARGUMENTS) + " --set model.explodes=true"]
    assert f"RuntimeError: login with ['{MASK}'" in crash
    assert ".loss in " in crash
    assert "raise RuntimeError(f\"login with {self.known} failed: {' '.join(self.known)}\")" in crash


def test_what_was_written_has_masks_in_their_place(site):
    (folder, *_) = sorted(site.workspace.glob("runs/*"))
    for name in ("recipe.lock.yaml", "recipe.yaml"):
        text = (folder / name).read_text()
        assert f"card: '{MASK}'" in text
        assert f"pin: '{MASK}'" in text
        assert "token_count: 8" in text
    patch = (folder / "source.patch").read_text()
    assert f"+mine is {MASK}\n" in patch
    assert f"+SOME_KEY = {MASK}\n" in patch
    assert f"+token = 'redis://:{MASK}@host'\n+tokens = tokens[1:]" in patch


def found_in(texts):
    """The names of secrets that are in some of the texts, with the keys of these."""
    found = {
        name: [where for where, text in texts.items() if any(form in text for form in spellings(secret))]
        for name, secret in SECRETS.items()
    }
    return {name: places for name, places in found.items() if places}


def spellings(secret: str) -> set[bytes]:
    """How a file may hold it; the beginning alone counts, in case the end was cut off."""
    start = secret[: secret.index("&")]
    forms = {start, start.replace("-", "_"), quote(secret), json.dumps(secret)[1:-1], secret}
    return {form.encode() for form in forms}
