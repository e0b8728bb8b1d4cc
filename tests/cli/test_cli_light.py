"""The light verbs, each in a process of its own: what it prints, how it ends, and what it does not import."""

import json
import os
import re
import subprocess
import sys

import pytest
from children import start
from faces import write_recipe
from run_folders import run_folder

from runner.tracking import Workspace

VALID = "name: mine\nextends: marl_phase1.yaml\n"
MISTAKES = """\
name: mistakes
model: {kind: masac, gamma: "0.9"}
data: {kind: uav_path_planing}
train: {env_steps: many, batchsize: 128}
seed: 1
seed: 2
"""
HEAVY = "print('heavy:', *sorted({'torch', 'mlflow', 'optuna', 'numpy'} & sys.modules.keys()), file=sys.stderr)"


def interpreted(*arguments, cwd, **environment):
    """Runs a verb in a new interpreter; the last line of stderr names the heavy modules that it imported."""
    code = f"import atexit, sys\natexit.register(lambda: {HEAVY})\nfrom runner.cli import main\nmain()"
    variables = os.environ | {"COLUMNS": "60", "TERM": "dumb"} | environment
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, env=variables, capture_output=True, text=True, check=False
    )


def runner(*arguments, cwd, **environment):
    """Runs a verb in a copy of a process that has imported everything, which takes a tenth of the time."""
    child = start(cwd, *arguments, within=cwd, **{"COLUMNS": "60", "TERM": "dumb"} | environment)
    return subprocess.CompletedProcess(arguments, child.wait(), child.stdout, child.stderr)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("validate", "--help"),
        ("validate", "marl_phase2"),
        ("show", "marl_phase3", "--origin"),
        ("schema",),
        ("schema", "study"),
        ("schema", "ablation"),
        ("plugins",),
        ("plugins", "amp"),
        ("recipes",),
    ],
)
def test_light_verbs_import_nothing_heavy(tmp_path, arguments):
    result = interpreted(*arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "heavy:\n"
    assert result.stdout
    assert "Traceback" not in result.stdout


def test_help_and_version_import_neither_recipes_nor_yaml(tmp_path):
    check = "assert not {'yaml', 'runner.recipe'} & sys.modules.keys()"
    code = f"import sys; from runner.cli import main\ntry: main()\nfinally: {check}"
    for argument in ("--help", "--version"):
        subprocess.run([sys.executable, "-c", code, argument], cwd=tmp_path, check=True, capture_output=True)


def test_validate_reports_every_mistake_unwrapped_and_exits_2(tmp_path):
    name = f"{'long' * 30}.yaml"
    write_recipe(tmp_path, MISTAKES, name)
    result = runner("validate", name, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    heads = [line.split(" ")[0] for line in result.stderr.splitlines() if line.startswith("long")]
    assert heads == [f"{name}:{place}:" for place in ("2:29", "3:14", "4:20", "4:26", "6:1")]
    assert "\x1b" not in result.stderr
    assert "Traceback" not in result.stderr


def test_validate_checks_all_files_that_it_is_given(tmp_path):
    write_recipe(tmp_path, MISTAKES, "bad.yaml")
    write_recipe(tmp_path, VALID, "good.yaml")
    result = runner("validate", "bad.yaml", "good.yaml", "missing.yaml", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout.startswith("good.yaml: valid (masac on uav_path_planning with ")
    assert "missing.yaml: no such file" in result.stderr


def test_validate_as_json(tmp_path):
    write_recipe(tmp_path, MISTAKES, "bad.yaml")
    result = runner("validate", "bad.yaml", "marl_phase2", "--json", cwd=tmp_path)
    assert result.returncode == 2
    printed = json.loads(result.stdout)
    assert printed["schema_version"] == 1
    assert [each["valid"] for each in printed["recipes"]] == [False, True]
    first = printed["recipes"][0]["problems"][0]
    assert (first["line"], first["column"], first["path"]) == (2, 29, "model.gamma")


def test_show_prints_yaml_or_json(tmp_path):
    write_recipe(tmp_path, VALID, "mine.yaml")
    text = runner("show", "mine.yaml", "--set", "seed=5", "--origin", cwd=tmp_path).stdout
    assert "# override seed=5" in text
    assert "# mine.yaml:1:7" in text
    assert "# default" in text
    printed = json.loads(runner("show", "mine.yaml", "--json", "--origin", cwd=tmp_path).stdout)
    assert printed["recipe"]["name"] == "mine"
    assert printed["origins"]["name"] == "mine.yaml:1:7"


def test_a_failure_is_a_message_without_a_traceback(tmp_path):
    for arguments in (
        ("show", "nothing"),
        ("plugins", "ampp"),
        ("recipes", "--copy", "nothing"),
        ("nothing",),
        ("show",),
    ):
        result = runner(*arguments, cwd=tmp_path)
        assert result.returncode == 2, arguments
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
    assert "did you mean 'amp'" in runner("plugins", "ampp", cwd=tmp_path).stderr


def test_recipes_are_listed_and_copied_but_never_overwritten(tmp_path):
    listed = json.loads(runner("recipes", "--json", cwd=tmp_path).stdout)["recipes"]
    assert {"marl_baseline", "marl_phase2"} <= {each["name"] for each in listed}
    assert all(each["summary"] for each in listed)
    copied = runner("recipes", "--copy", "marl_phase2", cwd=tmp_path)
    assert copied.stdout == "marl_phase2.yaml\n"
    assert runner("validate", "marl_phase2.yaml", cwd=tmp_path).returncode == 0
    again = runner("recipes", "--copy", "marl_phase2", cwd=tmp_path)
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_the_card_of_a_learner_shows_what_it_optimizes_and_how(tmp_path):
    card = runner("plugins", "masac", cwd=tmp_path).stdout
    assert "\nhidden: list[int], default [256, 256]\n" in card
    assert re.search(r"^roles: actor \{kind: adam, .*, critic \{.*, temperature \{kind: adam, ", card, re.MULTILINE)
    card = runner("plugins", "uav_path_planning", cwd=tmp_path).stdout
    assert "\nunits: updates, samples, env_steps\n" in card


def test_plugins_tell_what_they_are(tmp_path):
    card = runner("plugins", "amp", cwd=tmp_path).stdout
    assert card.startswith("optimization.amp, inference.amp (proven-runner ")
    assert "When it helps" in card
    assert "dtype: Literal['bf16', 'fp16'], default bf16" in card
    assert re.search(r"^measured: alone \d+\.\d\dx \[.*\(experiments/marl_phases\)$", card, re.MULTILINE)
    printed = json.loads(runner("plugins", "--json", cwd=tmp_path).stdout)["plugins"]
    assert {"model", "data", "lr_scheduler", "optimization", "inference"} == {each["section"] for each in printed}
    cards = {(each["section"], each["kind"]): each for each in printed}
    assert {"updates", "env_steps"} <= set(cards["data", "uav_path_planning"]["units"])
    assert cards["model", "masac"]["roles"]["temperature"] == {"kind": "adam", "lr": 3e-4}
    contracts = {kind: each["contract"] for (section, kind), each in cards.items() if section == "optimization"}
    assert contracts["forward_cache"] == ["Exact"]
    assert contracts["async_transfer"] == ["Exact", "Statistical"]
    assert all(contracts.values())
    assert not [each for each in printed if "error" in each]


def test_a_local_plugin_is_listed_and_a_broken_one_is_an_error(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from runner.api import Close, Exact, StageConfig\n"
        "class Mine(StageConfig):\n"
        "    'Mine.'\n"
        "    kind = 'mine'\n"
        "    phase = 1\n"
        "    implementation = 'Missing'\n"
        "    def contract(self, setting) -> Exact | Close:\n"
        "        'The same bits, or nearly.'\n"
    )
    assert "mine" in runner("plugins", "--plugin", "mine.py", cwd=tmp_path).stdout
    card = runner("plugins", "mine", "--plugin", "mine.py", cwd=tmp_path).stdout
    assert "contract: Exact, Close\npromise: The same bits, or nearly.\n" in card
    arguments = ("show", "marl_phase1", "--plugin", "mine.py", "--set", "optimization.mine=on")
    assert "mine: on" in runner(*arguments, cwd=tmp_path).stdout
    (tmp_path / "mine.py").write_text("import nothing_of_that_name")
    result = runner("plugins", "--plugin", "mine.py", cwd=tmp_path)
    assert result.returncode == 2
    assert "plugin mine.py cannot be imported" in result.stderr


def test_the_schema_is_json(tmp_path):
    assert json.loads(runner("schema", cwd=tmp_path).stdout)["title"] == "Recipe"


def test_no_color_is_honoured(tmp_path):
    coloured = runner("show", "nothing", cwd=tmp_path, FORCE_COLOR="1", TERM="xterm")
    plain = runner("show", "nothing", cwd=tmp_path, FORCE_COLOR="1", TERM="xterm", NO_COLOR="1")
    assert "\x1b[31m" in coloured.stderr
    assert "\x1b[31m" not in plain.stderr


@pytest.mark.parametrize(
    "arguments", [("seed=5", "train.batch_size=64"), ("--set", "seed=5", "train.batch_size=64"), ("seed=4", "seed=5")]
)
def test_a_setting_needs_no_option(tmp_path, arguments):
    write_recipe(tmp_path, VALID, "mine.yaml")
    printed = json.loads(runner("show", "mine.yaml", "--json", *arguments, cwd=tmp_path).stdout)
    assert printed["recipe"]["seed"] == 5
    assert printed["recipe"]["train"]["batch_size"] == (128 if "seed=4" in arguments else 64)


def test_validate_takes_settings_among_its_recipes(tmp_path):
    write_recipe(tmp_path, VALID, "a=b.yaml")
    result = runner("validate", "a=b.yaml", "marl_phase2", "train.batch_size=many", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("train.batch_size: should be an integer, got 'many'") == 2
    assert "a=b.yaml: valid" in runner("validate", "a=b.yaml", "seed=3", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("marl_phase3", "settings are written as A.B.C=VALUE"),
        ("optimizer.lr", "did you mean optimizer.lr=VALUE?"),
        ("optimizer.lr:1e-3", "did you mean optimizer.lr=1e-3?"),
    ],
)
def test_what_is_no_setting_is_refused(word, hint, tmp_path):
    result = runner("show", "marl_phase2", word, cwd=tmp_path)
    assert result.returncode == 2
    assert f"'{word}' is not a setting; {hint}" in result.stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--optimizer.lr=1e-3"], "settings have no dashes: optimizer.lr=VALUE"),
        (["--lr", "0.1"], "settings have no dashes: optimizer.lr=VALUE"),
        (["--multirun"], "separate the values of a setting by commas"),
        (["--config", "a.yaml"], "the recipe is the first word: runner run FILE"),
        (["--print_config"], "runner show RECIPE prints the complete recipe"),
        (["--sedes", "3"], "Possible options: --nodes, --seeds, --set"),
    ],
)
def test_options_of_other_tools_are_answered_with_what_to_write(words, hint, tmp_path):
    result = runner("run", "marl_phase2", *words, cwd=tmp_path)
    assert result.returncode == 2
    text = " ".join(result.stderr.replace("│", " ").split())
    assert f"No such option: {words[0].partition('=')[0]}" in text
    assert hint in text


def test_a_run_is_shown_by_its_digits_or_folder_and_a_recipe_goes_first(tmp_path):
    folder = run_folder("marl_phase2", status="FINISHED", metrics={"eval/return": 1.5})
    assert interpreted("show", folder.name, cwd=tmp_path).stderr == "heavy:\n"
    for reference in (folder.name, folder.name[-8:], str(folder.path), "latest"):
        result = runner("show", reference, cwd=tmp_path)
        assert result.stdout.split("\n")[0].rstrip() == f"{folder.name}: FINISHED", result.stderr
    assert json.loads(runner("show", "latest", "--json", cwd=tmp_path).stdout)["run"]["metrics"] == {"eval/return": 1.5}
    assert runner("show", "marl_phase2", cwd=tmp_path).stdout.startswith("name: marl_phase2\n")
    refused = runner("show", folder.name, "seed=3", cwd=tmp_path)
    assert refused.returncode == 2
    assert "is a run, whose settings are in" in " ".join(refused.stderr.split())
    nothing = runner("show", "nothing", cwd=tmp_path)
    assert "no recipe of that name ships" in nothing.stderr
    assert f"no run 'nothing' in {Workspace().runs}; there are: {folder.name}" in nothing.stderr
