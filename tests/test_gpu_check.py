"""``experiments/gpu/check.py`` without a GPU: its settings are valid, and its judges and limits work."""

import importlib.util
import itertools
import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from runner.plugin.registry import Registry
from runner.recipe.loader import load

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "gpu"


def module_of(name):
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


check = module_of("check")


def test_names_of_checks_differ():
    names = [each.name for each in check.CHECKS]
    assert len({*names}) == len(names)


@pytest.mark.parametrize("case", check.CHECKS, ids=lambda case: case.name)
def test_the_recipe_of_a_check_is_valid(case):
    """A check that is refused on a lent machine has wasted its time."""
    for command in ("verify", "run"):
        if command in case.command and "study" not in case.command:
            recipe, *rest = case.command[case.command.index(command) + 1 :]
            settings = [text for text in rest if "=" in text]
            loaded = load(ROOT / "recipes" / f"{recipe}.yaml", settings, Registry())
            stages = {name for option, name in itertools.pairwise(rest) if option == "--stage"}
            assert stages <= set(loaded.stages)
            return
    paths = [Path(text) for text in case.command if text.endswith((".py", ".yaml"))]
    assert paths
    assert all((ROOT / path).is_file() for path in paths)


def stage(verdict):
    return {"name": "amp", "verdict": verdict, "contract": "Statistical", "summary": "as it is"}


@pytest.mark.parametrize(
    ("found", "right"),
    [
        (["PASS"], True),
        (["PASS", "FAIL"], True),
        (["INCONCLUSIVE"], False),
        (["PASS", "INCONCLUSIVE"], False),
        ([], False),
    ],
)
def test_a_verification_is_right_if_every_stage_has_a_verdict(found, right):
    report = {"stages": [stage(verdict) for verdict in found], "inactive": {}, "seconds": 1.0}
    is_right, facts = check.verdicts("PASS", "FAIL")(check.Outcome(0, json.dumps(report), "", 1.0))
    assert is_right is right
    assert facts["seconds"] == 1.0


@pytest.mark.parametrize(("verdict", "right"), [("FAIL", True), ("PASS", False), ("INCONCLUSIVE", False)])
def test_a_race_has_to_fail(verdict, right):
    rows = {"a race": {"expected": "FAIL", "verdict": verdict}}
    assert check.judge_races(check.Outcome(0, json.dumps(rows), "", 1.0))[0] is right


def test_a_check_that_prints_something_else_is_not_right(tmp_path):
    row = check.run(check.Check("odd", [sys.executable, "-c", "print('odd')"], 30, check.judge_races), tmp_path)
    assert row["ok"] is False
    assert "ValueError" in row["problem"]
    assert "odd" in (tmp_path / "logs.txt").read_text()


def test_a_check_that_takes_too_long_ends_with_all_that_it_has_started(tmp_path):
    """A training has a process group of its own, and holds the pipe of its parent."""
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
    child += "start_new_session=True); print('started', flush=True); time.sleep(600)"
    started = time.monotonic()
    row = check.run(check.Check("slow", [sys.executable, "-c", child], 2, check.succeeds), tmp_path)
    assert row["ok"] is False
    assert time.monotonic() - started < 60
    assert not [each for each in psutil.Process().children(recursive=True) if "sleep(600)" in " ".join(each.cmdline())]


def test_the_committed_results_are_of_checks_that_exist():
    machine, *rows = [json.loads(line) for line in (FOLDER / "results.jsonl").read_text().splitlines()]
    assert machine["gpu"].startswith("NVIDIA")
    assert {row["check"] for row in rows} <= {each.name for each in check.CHECKS}
