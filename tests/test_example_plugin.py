"""The example of the docs, installed as a distribution of its own and trained by the command line."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import blocks_of
from running import forked, result_of

DOCS = Path(__file__).parent.parent / "docs"
EXAMPLE, PAGE = DOCS / "example_plugin", DOCS / "plugins.md"
FILES = [
    EXAMPLE / name for name in ("pyproject.toml", "runner_digits/__init__.py", "runner_digits/works.py", "digits.yaml")
]
KINDS = {"example_mlp", "example_digits", "recompute_activations"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the installed example; built in a copy, because a build leaves files behind."""
    folder = tmp_path_factory.mktemp("example")
    shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet"]
    paths = ["--target", str(folder / "site"), str(folder / "source")]
    command = [sys.executable, "-m", "pip", "install", *offline, *paths]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder / "site"


@pytest.fixture(autouse=True)
def installed(site, tmp_path, monkeypatch):
    """Child processes see the distribution, and stand in a folder with nothing but its recipe."""
    shutil.copy(EXAMPLE / "digits.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(site))


def train(*sets):
    arguments = [part for setting in sets for part in ("--set", setting)]
    return result_of(forked("run", "digits.yaml", "--quiet", "--json", *arguments))


def test_its_plugins_are_listed_under_its_own_name():
    cards = result_of(forked("plugins", "--json"))["plugins"]
    mine = {card["kind"] for card in cards if "runner-digits" in str(card)}
    assert mine == KINDS
    assert "one more forward pass" in forked("plugins", "recompute_activations").stdout


def test_its_recipe_is_valid_and_its_faces_import_no_torch():
    assert "digits.yaml: valid" in forked("validate", "digits.yaml").stdout
    check = "import runner_digits, sys; assert not {'torch', 'sklearn'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.usefixtures("migrated_workspace")
def test_it_learns_and_its_stage_changes_no_bit():
    with_stage = train()
    assert with_stage["status"] == "FINISHED"
    assert with_stage["metrics"]["eval/accuracy"] > 0.92
    assert with_stage["stages"]["recompute_activations"]["active"] is True
    without = train("optimization.recompute_activations=off")
    for name in ("train/loss", "eval/accuracy"):
        assert with_stage["metrics"][name] == without["metrics"][name]


@pytest.mark.usefixtures("migrated_workspace", "traced_only")
def test_stages_of_the_runner_work_with_it_unchanged():
    result = train("train.epochs=2", "optimization.amp=on", "optimization.compile=on")
    assert result["status"] == "FINISHED"
    assert result["stages"]["fused_optimizer"]["active"] is True
    for stage in result["stages"].values():
        assert stage["active"] is (stage["reason"] is None)


def test_all_its_stages_keep_what_they_promise():
    report = result_of(forked("verify", "digits.yaml", "--json", "--horizon", "0", "--updates", "3"))
    assert {row["name"]: row["verdict"] for row in report["stages"]} == dict.fromkeys(
        ["recompute_activations", "fused_optimizer", "all"], "PASS"
    )


def test_it_takes_fewer_than_50_lines_of_code():
    assert sum(lines_of_code(file) for file in EXAMPLE.rglob("*.py")) < 50


def test_the_page_shows_every_line_of_its_files():
    shown = {line for block in blocks_of(PAGE) for line in block.splitlines()}
    files = [(EXAMPLE / name).read_text() for name in FILES]
    assert [line for text in files for line in text.splitlines() if line not in shown] == []


def lines_of_code(file):
    """Lines that are neither blank nor part of a docstring."""
    text = file.read_text()
    strings = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    documentation = {
        line
        for string in strings
        if isinstance(string, ast.Constant) and isinstance(string.value, str)
        for line in range(string.lineno, string.end_lineno + 1)
    }
    return sum(bool(line) and number not in documentation for number, line in enumerate(text.splitlines(), 1))
