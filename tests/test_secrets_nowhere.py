"""Real runs of a recipe full of secrets; afterwards none is found in any file, nor in anything that was printed."""

import json
import shutil
import subprocess
from pathlib import Path
from urllib.parse import quote

import pytest
from children import start

from runner.system.secrets import MASK

ROOT = Path(__file__).parents[1]
SECRETS = {
    name: f"{name}-Tr0ub4dor&3-é"
    for name in ("declared", "token", "list", "url", "set", "default", "environment", "tracking", "other", "hardcoded")
}
PLUGIN = '''
import logging
import os
import sys
import warnings

import torch
from pydantic import Field, SecretStr

from runner.api import Exact, Learner, LearnerConfig, Source, SourceConfig, Stage, StageConfig


class GuardedConfig(LearnerConfig):
    """Has secrets of every sort."""

    kind = "guarded"
    learns_from = "points"
    card: SecretStr
    found: SecretStr = Field(default_factory=lambda: SecretStr(os.environ["FOUND_HERE"]))
    api_token: str
    tokens: list[str]
    url: str
    explodes: bool = False
    scale: float = 0.01

    def implementation(self):
        return Guarded


class Guarded(Learner):
    def __init__(self, config, shapes, context):
        super().__init__(config, shapes, context)
        self.layer = torch.nn.Linear(2, 1)
        self.role("model", self.layer)
        self.known = [config.card.get_secret_value(), config.found.get_secret_value(), config.api_token, config.url]
        self.known += config.tokens
        self.explodes = config.explodes
        self.scale = config.scale
        logging.getLogger("somebody").warning("logged in: %s", self.known)
        warnings.warn(f"deprecated: {self.known}", stacklevel=1)
        print(*self.known, file=sys.stderr)

    def update(self, batch, noise, progress):
        if self.explodes:
            raise RuntimeError(f"login with {self.known} failed: {' '.join(self.known)}")
        self.roles["model"].zero_grad()
        loss = self.scale * self.layer(batch["x"]).square().mean()
        self.slots.backward(loss)
        self.roles["model"].step()
        return {"loss": loss.detach()}

    def predict(self, inputs):
        return self.layer(inputs)

    def inputs(self, batch):
        return batch["x"]


class PointsConfig(SourceConfig):
    """Random points."""

    kind = "points"
    provides = "points"

    def implementation(self):
        return Points


class Points(Source):
    shapes = {"x": (2,)}

    def __init__(self, config, context):
        self.generator = context.generator("points", "cpu")

    def draw(self, batch_size, progress):
        return {"x": torch.rand(batch_size, 2, generator=self.generator)}

    def evaluate(self, learner):
        return {"zero": 0.0}


class TalkConfig(StageConfig):
    """Says what it should not."""

    kind = "talk"
    phase = 1

    def contract(self, setting):
        return Exact()

    def implementation(self):
        return Talk


class Talk(Stage):
    def attach(self, pipeline):
        for secret in pipeline.learner.known:
            pipeline.note(f"it is {secret}")


class IdleConfig(StageConfig):
    """Says why it does nothing."""

    kind = "idle"
    phase = 1

    def contract(self, setting):
        return Exact()

    def inactive(self, setting):
        return f"the token is {setting.model.api_token}"

    def implementation(self):
        raise AssertionError("inactive, so never attached")
'''
RECIPE = f"""\
# api_token: {SECRETS["other"]}
name: guarded
device: cpu
data: {{kind: points}}
train: {{updates: 40, batch_size: 4, log_every: 10, checkpoint_every: 20}}
tracking: {{system_metrics: false}}
optimization: {{talk: on, idle: on}}
model:
  {{kind: guarded, card: "{SECRETS["declared"]}", tokens: ["{SECRETS["list"]}"], api_token: '{SECRETS["token"]}',
   url: 'postgresql://me:{quote(SECRETS["url"])}@db:5432/x', scale: 0.01}}
"""
WRONG = {
    "number": RECIPE.replace("scale: 0.01", "scale: many"),
    "type": RECIPE.replace("card: ", "card: [1], found: ").replace("tokens: [", "tokens: [3, "),
    "syntax": RECIPE.replace("-é', ", "-é, ").replace("scale: 0.01}", "scale: 0.01"),
    "key": RECIPE.replace("scale: 0.01", "scal: 0.01"),
}  # fmt: skip


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
        (self.folder / "plugin.py").write_text(PLUGIN)
        self.commit({"recipe.yaml": "name: empty\n", "settings.ini": "", "client.py": "", "notes.txt": ""})
        for name, text in {
            "recipe.yaml": RECIPE,
            "settings.ini": f"[login]\nAPI_TOKEN = {SECRETS['other']}\n",
            "client.py": f"token = '{SECRETS['hardcoded']}'\ntokens = tokens[1:]\n",
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
            "SOME_API_KEY": SECRETS["environment"], "GIT_CEILING_DIRECTORIES": str(ROOT), "COLUMNS": "60", **variables,
        }  # fmt: skip
        child = start(self.output, *arguments, within=self.folder, **environment)
        assert child.wait() == code, child.stderr
        self.printed[" ".join([*variables, *arguments])] = child.stdout + child.stderr
        return child.stdout


ARGUMENTS = ("recipe.yaml", "--plugin", "plugin.py", "--set", f"model.tokens=[{SECRETS['set']}, ab]")


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
    site.run("show", "recipe.yaml", f"model.api_token={SECRETS['set'] * 9}", code=2)
    site.run("show", *ARGUMENTS, "--set", f"model.api_token='{SECRETS['set']}", code=2)
    uri = f"http://me:{quote(SECRETS['tracking'])}@127.0.0.1:1"
    for verb in (("run", *ARGUMENTS), ("compare", "a", "b"), ("doctor",)):
        site.run(*verb, code=1 if verb == ("doctor",) else 5, MLFLOW_TRACKING_URI=uri)
    return site


@pytest.mark.parametrize("name", SECRETS)
def test_no_secret_is_in_any_file_of_the_workspace(site, name):
    forms = spellings(SECRETS[name])
    files = [path for path in site.workspace.rglob("*") if path.is_file()]
    assert {"mlflow.db", "recipe.lock.yaml", "recipe.yaml", "source.patch", "spool.jsonl"} <= {
        each.name for each in files
    }
    found = [str(path) for path in files if any(form in path.read_bytes() for form in forms)]
    assert found == []


@pytest.mark.parametrize("name", SECRETS)
def test_no_secret_is_printed(site, name):
    forms = spellings(SECRETS[name])
    assert [command for command, text in site.printed.items() if any(form in text.encode() for form in forms)] == []


def test_no_file_is_named_after_a_secret(site):
    names = "\n".join(map(str, site.workspace.rglob("*")))
    assert "Tr0ub4dor" not in names


def test_what_was_printed_has_masks_in_their_place(site):
    told = site.printed["run " + " ".join(ARGUMENTS)]
    assert f"logged in: ['{MASK}', '{MASK}', '{MASK}', 'postgresql://me:{MASK}@db:5432/x'" in told
    assert f"it is {MASK}" in told
    crash = site.printed["run " + " ".join(ARGUMENTS) + " --set model.explodes=true"]
    assert f"RuntimeError: login with ['{MASK}'" in crash
    assert "in update" in crash  # the traceback is whole
    assert "raise RuntimeError(f\"login with {self.known} failed: {' '.join(self.known)}\")" in crash


def test_what_was_written_has_masks_in_their_place(site):
    (folder, *_) = sorted(site.workspace.glob("runs/*"))
    assert f"api_token: '{MASK}'" in (folder / "recipe.lock.yaml").read_text()
    assert f"api_token: '{MASK}'" in (folder / "recipe.yaml").read_text()
    patch = (folder / "source.patch").read_text()
    assert f"+mine is {MASK}" in patch
    assert f"+API_TOKEN = {MASK}" in patch
    assert f"+token = '{MASK}'\n+tokens = tokens[1:]" in patch


def spellings(secret: str) -> set[bytes]:
    """How a file may hold it; the beginning alone counts, in case the end was cut off."""
    start = secret[: secret.index("&")]
    forms = {start, start.replace("-", "_"), quote(secret), json.dumps(secret)[1:-1], secret}
    return {form.encode() for form in forms}
