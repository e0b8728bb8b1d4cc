"""Names that a stranger has chosen, printed by every command: a terminal never receives what it would obey."""

import io
import json
import os
import pty
import subprocess
import sys

import pytest
import typer
from hostile import NAME, commands_in, texts
from hypothesis import HealthCheck, given, settings
from points import with_points
from run_folders import run_folder, seed_group
from running import tiny

from runner.cli import app, main
from runner.plugin.registry import Registry
from runner.recipe.dumping import dump
from runner.recipe.lock import write_lock
from runner.system.escapes import escape, escape_line
from runner.tracking import Workspace
from runner.tracking.tracker import Tracker

COMMAND = typer.main.get_command(app)
PLUGIN = '''
"""A model whose every name is hostile."""
import logging
import sys
from typing import ClassVar

import torch

from runner.api import GradientLearner, GradientLearnerConfig, Loss, Source, SourceConfig

NAME = {name!r}


class HostileConfig(GradientLearnerConfig):
    __doc__ = NAME
    kind: ClassVar[str] = "hostile"
    implementation = "Hostile"
    learns_from: ClassVar[str] = "points"
    raises: bool = False
    label: str = NAME


class Hostile(GradientLearner):
    def build(self, config, shapes, context):
        logging.getLogger("hostile").warning(NAME)
        sys.stdout.write(NAME + "\\n")
        sys.stderr.write(NAME + "\\n")
        if config.raises:
            raise type(NAME.replace("\\0", ""), (RuntimeError,), {{}})(NAME)
        return torch.nn.Linear(2, 1)

    def loss(self, batch, noise, progress):
        return Loss(self.slots.forward(batch["x"]).square().mean(1).sum(), len(batch["x"]), {{NAME: 1.0}})
'''
RECIPE = """\
name: hostile
device: cpu
model: {kind: hostile}
data: {kind: points}
train: {updates: 4, batch_size: 4, log_every: 2, evaluate_every: 4}
tracking: {system_metrics: false}
"""
SETTING = f"model.{NAME}={NAME}"
KUBERNETES = ["digits_classifier", "--note", NAME, "--kind", "kubernetes", "--image", "x", "--claim", "x", "--print"]
COMMANDS = {
    "run": [["NAME.yaml"], ["NAME"], ["raises.yaml", "--plugin", "NAME.py"], ["digits_classifier", SETTING],
            ["digits_classifier", "--tag", "mlflow.NAME"],
            ["trains.yaml", "--plugin", "NAME.py", "--note", NAME, "--tag", f"{NAME}={NAME}"]],
    "submit": [["NAME.yaml", "--print"], [NAME], ["digits_classifier", SETTING], ["study.yaml"],
               ["digits_classifier", "--option", NAME], ["digits_classifier", "--time", NAME], KUBERNETES,
               ["trains.yaml", "--plugin", "NAME.py", "--note", NAME, "--tag", f"{NAME}={NAME}", "--print"]],
    "resume": [[NAME], ["RUN", SETTING], ["FAILED"]],
    "evaluate": [[NAME], ["RUN", f"--render={NAME}"], ["TRAINED", "--plugin", "NAME.py"]],
    "serve": [[NAME], ["RUN", SETTING], ["digits_classifier", f"--host={NAME}"]],
    "ls": [[], ["--recipe", NAME], ["--where", NAME], ["--since", NAME], ["--kind", NAME]],
    "rm": [[NAME], ["nothing", NAME], ["--purge", NAME]],
    "sync": [[NAME], ["RUN"]],
    "verify": [["NAME.yaml"], [NAME], ["digits_classifier", "--stage", NAME], ["digits_classifier", "--of", NAME],
               ["raises.yaml", "--plugin", "NAME.py"]],
    "ablate": [["NAME.yaml"], [NAME], ["digits_classifier", SETTING]],
    "profile": [["NAME.yaml"], [NAME], ["digits_classifier", SETTING], ["raises.yaml", "--plugin", "NAME.py"]],
    "validate": [["NAME.yaml"], ["broken.yaml"], ["extends.yaml"], ["digits_classifier", SETTING],
                 ["kind.yaml", "NAME.yaml"]],
    "show": [["NAME.yaml"], ["RUN"], ["FAILED"], ["GROUP"], ["TRAINED"], [NAME], ["RUN_DIR/recipe.lock.yaml"],
             ["trains.yaml", "--plugin", "NAME.py", "--origin"]],
    "recipes": [[], ["--copy", NAME]],
    "init": [[NAME], [f"{NAME}/net"]],
    "plugins": [[], ["--plugin", "NAME.py"], ["hostile", "--plugin", "NAME.py"], [NAME], ["--plugin", "broken.py"]],
    "schema": [["recipe", "--plugin", "NAME.py"], [NAME]],
    "compare": [["RUN", "FAILED"], ["RUN", NAME], ["GROUP", "LATER"], ["TRAINED", "RUN", "--all"]],
    "ui": [[]],
    "doctor": [["--plugin", "NAME.py"], ["--plugin", "broken.py"]],
    "study plan": [["NAME.yaml"], ["study.yaml"], [NAME]],
    "study run": [["NAME.yaml"], ["study.yaml"], [NAME, SETTING]],
    "study worker": [[NAME], ["study.yaml"]],
    "study show": [[NAME]],
    "study best": [[NAME]],
    "data list": [[], ["--plugin", "broken.py"]],
    "data get": [[NAME]],
    "data where": [[NAME]],
    "data prepare": [
        [NAME, "--tokenizer", "bytes", "--out", "out.bin"], ["NAME.yaml", "--tokenizer", NAME, "--out", NAME],
    ],
    "data show": [["NAME.yaml"], [NAME], ["digits_classifier", SETTING], ["raises.yaml", "--plugin", "NAME.py"]],
    "plan": [["NAME.yaml"], [NAME], ["digits_classifier", SETTING], ["raises.yaml", "--plugin", "NAME.py"]],
    "models register": [[NAME], ["RUN", "--name", NAME]],
    "models list": [[], [NAME]],
    "models promote": [[NAME, NAME], ["a", NAME]],
}  # fmt: skip
"""Arguments of every command, with the name in all places that take text."""
STUDY = {
    "kind": "study", "name": NAME, "recipe": "digits_classifier", "space": {f"optimizer.{NAME}": {"float": [1, 2]}},
    "objectives": {f"eval/{NAME}": "minimize"}, "budget": {"trials": 1},
}  # fmt: skip


class Screen(io.BytesIO):
    """What a terminal receives."""

    def isatty(self):
        return True


def leaves(command, *above):
    """The commands that do something, as words."""
    if not getattr(command, "commands", None):
        yield " ".join(above)
    for name, each in getattr(command, "commands", {}).items():
        yield from leaves(each, *above, name)


def write_files(folder):
    """A project whose files are named, and filled, by a stranger."""
    (folder / f"{NAME}.py").write_text(with_points(PLUGIN.format(name=NAME), '{"zero": 0.0, NAME: 1.0}'))
    (folder / "broken.py").write_text(f"raise RuntimeError({NAME!r})\n")
    (folder / "trains.yaml").write_text(RECIPE)
    (folder / "raises.yaml").write_text(RECIPE.replace("kind: hostile", "kind: hostile, raises: true"))
    (folder / f"{NAME}.yaml").write_text(dump({"extends": "digits_classifier", "name": NAME, NAME: {NAME: NAME}}))
    (folder / "kind.yaml").write_text(dump({"name": "x", "model": {"kind": NAME}, "data": {"kind": [NAME]}}))
    (folder / "broken.yaml").write_text(f"name: [{escape(NAME)}\n'\t{{: *{escape_line(NAME)}\n")
    (folder / "extends.yaml").write_text(dump({"name": "x", "extends": f"{NAME}.txt"}))
    (folder / "study.yaml").write_text(dump(STUDY))


def tracked():
    """The folder of a run that MLflow knows, with the name in all that its record has."""
    recipe, registry = tiny("digits_classifier"), Registry()
    tracker = Tracker.open(Workspace(), recipe, {"stages": NAME}, {NAME: NAME}, NAME)
    tracker.artifact(write_lock(recipe, tracker.run_dir, registry))
    tracker.log({f"eval/{NAME}": 0.5, f"train/{NAME}": 0.5}, 1)
    tracker.close("FAILED", NAME, 30.0)
    return tracker.run_dir


@pytest.fixture(scope="module")
def site(tmp_path_factory, migrated_database):
    """A project and a workspace of a stranger, and what stands for the names of its runs."""
    folder = tmp_path_factory.mktemp("hostile")
    root = folder / ".runner"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RUNNER_WORKSPACE", str(root))
        root.mkdir()
        (root / "mlflow.db").write_bytes(migrated_database.read_bytes())
        write_files(folder)
        run = tracked()
        failed = run_folder("failed", status="FAILED", reason=NAME, note=NAME, tags={NAME: NAME},
                            overrides={NAME: NAME}, headline=(f"eval/{NAME}",), metrics={f"eval/{NAME}": 1.0},
                            unit=NAME, experiment=NAME)  # fmt: skip
        (group, _), (later, _) = seed_group(10, 14, note=NAME), seed_group(11, 17, began=9.0, tags={NAME: NAME})
        (root / "runs" / NAME).mkdir()
        record = json.loads((failed.path / "run.json").read_text()) | {"name": NAME}
        (root / "runs" / NAME / "run.json").write_text(json.dumps(record))
        names = {"RUN": run.name, "FAILED": failed.name, "GROUP": group.name, "LATER": later.name, "NAME": NAME}
        names |= {"RUN_DIR": str(run)}
        printed = shown(patch, ["run", f"{folder}/trains.yaml", "--plugin", f"{NAME}.py", "--json"])
        assert printed[0] == 0, printed[2]
        names["TRAINED"] = json.loads(printed[1])["run_name"]
        yield folder, names


def shown(monkeypatch, words, terminal=False):
    """The exit code of a command, and what it wrote to stdout and stderr."""
    kind = Screen if terminal else io.BytesIO
    outputs = {"stdout": kind(), "stderr": kind()}
    with monkeypatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "100")
        patch.setenv("PYTHONSAFEPATH", os.environ.get("PYTHONSAFEPATH", ""))
        patch.setattr("runner.cli.app", COMMAND)
        patch.setattr(sys, "argv", ["runner", *words])
        for name, output in outputs.items():
            patch.setattr(sys, name, io.TextIOWrapper(output, encoding="utf-8", errors="surrogateescape"))
        with pytest.raises(SystemExit) as ended:
            main()
        streams = sys.stdout, sys.stderr
        for stream in streams:
            stream.flush()
        texts = [output.getvalue().decode("utf-8", "surrogateescape") for output in outputs.values()]
    return ended.value.code, *texts


def filled(words, names):
    """The words with names in place of what stands for them."""
    for name in sorted(names, key=len, reverse=True):
        words = [word if NAME in word else word.replace(name, names[name]) for word in words]
    return words


def test_every_command_is_among_them():
    assert set(leaves(COMMAND)) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("copied_children")
def test_no_command_passes_on_what_a_terminal_obeys(command, site, monkeypatch):
    folder, names = site
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RUNNER_WORKSPACE", str(folder / ".runner"))
    if command == "ui":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{NAME}.example")
    for arguments in COMMANDS[command]:
        words = [*command.split(), *filled(arguments, names)]
        _, out, err = shown(monkeypatch, words)
        assert commands_in(out + err) == [], words
        assert out + err
        _, out, err = shown(monkeypatch, words, terminal=True)
        assert commands_in(out + err, of_consoles=True) == [], words
        if "--json" in [option for each in options_of(command) for option in each.opts]:
            _, out, err = shown(monkeypatch, [*words, "--json"])
            assert commands_in(out + err) == [], words
            assert not out or json.loads(out)["schema_version"]


def options_of(command):
    """The options of a command."""
    found = COMMAND
    for word in command.split():
        found = found.commands[word]
    return found.params


def test_what_a_command_prints_of_a_name_can_be_read(site, monkeypatch):
    folder, names = site
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RUNNER_WORKSPACE", str(folder / ".runner"))
    for words in (
        ["validate", f"{NAME}.yaml"], ["ls"], ["show", names["FAILED"]], ["rm", NAME],
        ["compare", names["RUN"], names["TRAINED"], "--all"], ["plugins", "hostile", "--plugin", f"{NAME}.py"],
    ):  # fmt: skip
        _, out, err = shown(monkeypatch, words)
        assert "\\u001b]0;OWNED\\u0007" in out + err, words
    _, out, _ = shown(monkeypatch, ["ls", "--json"])
    records = {run["name"]: run for run in json.loads(out)["runs"]}
    assert records[names["FAILED"]]["tags"] == {NAME: NAME}


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts)
def test_no_text_in_a_recipe_or_a_record_commands_the_terminal(tmp_path, monkeypatch, text):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump({"extends": text, "name": text, text: {text: text}, "model": {"kind": text}}))
    folder = run_folder("x", status="FAILED", reason=text, note=text, tags={text: text}, overrides={text: text})
    for words in (["validate", str(recipe)], ["ls"], ["show", folder.name]):
        for terminal in (False, True):
            _, out, err = shown(monkeypatch, words, terminal)
            assert commands_in(out + err, of_consoles=terminal) == []
    for path in sorted(folder.path.iterdir()):
        path.unlink()
    folder.path.rmdir()


def test_a_real_terminal_shows_colours_and_no_foreign_ones(tmp_path):
    (tmp_path / "recipe.yaml").write_text(dump({"name": "x", NAME: 1}))
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    printed = {}
    for words in (["--help"], ["study", "--help"], ["run", "--help"], ["validate", str(tmp_path / "recipe.yaml")],
                  ["run", "--nothing"]):  # fmt: skip
        master, slave = pty.openpty()
        command = [sys.executable, "-m", "runner", *words]
        subprocess.run(command, stdin=slave, stdout=slave, stderr=slave, env=environment, check=False, cwd=tmp_path)
        os.close(slave)
        chunks = []
        while chunk := read(master):
            chunks.append(chunk)
        os.close(master)
        printed[" ".join(words[-2:])] = b"".join(chunks).decode()
    for words, text in printed.items():
        assert "\x1b[" in text, words
        assert commands_in(text, of_consoles=True) == [], words
        assert "\\u001b[3" not in text, words


def read(descriptor):
    """The next bytes of a terminal; none after its end."""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""
