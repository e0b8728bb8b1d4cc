"""``experiments/gpu/check.py`` without a GPU: its settings are valid, and its judges and limits work."""

import argparse
import importlib.util
import io
import itertools
import json
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

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
gpt = module_of("gpt")
pairs = module_of("pairs")
start_up = module_of("start_up")


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


@pytest.mark.parametrize(("time", "memory", "right"), [(1.01, 1.0, True), (1.02, 1.0, False), (0.9, 1.05, False)])
def test_an_update_of_a_language_model_may_take_a_hundredth_more(time, memory, right):
    rows = {"65": {"time": [time, 0.9, 1.1], "memory": memory}, "50304": {"time": [1.0, 0.9, 1.1], "memory": 1.0}}
    assert check.judge_gpt(check.Outcome(0, json.dumps(rows), "", 1.0))[0] is right


@pytest.mark.parametrize(
    ("cold", "warm", "recompilations", "right"),
    [(10.0, 5.0, 0, True), (10.1, 5.0, 0, False), (9.0, 5.1, 0, False), (9.0, 4.0, 1, False)],
)
def test_a_training_may_start_a_few_seconds_later_than_a_script(cold, warm, recompilations, right):
    rows = {"cold": {"more_s": cold, "recompilations": 0}, "warm": {"more_s": warm, "recompilations": recompilations}}
    assert check.judge_start_up(check.Outcome(0, json.dumps(rows), "", 1.0))[0] is right


@pytest.mark.parametrize(("speed", "code", "right"), [(5000, 0, True), (4999, 0, False), (9000, 1, False)])
def test_a_captured_iteration_has_to_be_fast(speed, code, right):
    report = {"seconds": 1, "startup_seconds": 1, "metrics": {"perf/env_steps_per_second": speed}}
    assert check.judge_fast_run(check.Outcome(code, json.dumps(report), "", 1.0))[0] is right


@pytest.fixture
def small(monkeypatch):
    """Makes the language model of the checks a tiny one on a CPU, which is not compiled."""

    def settings(vocabulary):
        sizes = {"layers": 1, "width": 32, "heads": 2, "context": 16, "batch": 4, "vocabulary": vocabulary}
        return argparse.Namespace(**sizes, device="cpu", bf16=True)

    monkeypatch.setattr(gpt, "settings", settings)
    monkeypatch.setitem(sys.modules, "gpt", gpt)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    # The script has a process of its own; here, later tests would compute in another precision.
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 2**30)
    with torch.compiler.set_stance("force_eager"):
        yield


def test_both_variants_of_a_language_model_take_turns(small, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", itertools.count(2**31, 2**30).__next__)
    row = gpt.measure(65, rounds=2, updates=3)
    assert row["plain"]["tokens_per_s"] > 0
    assert row["time"][1] <= row["time"][0] <= row["time"][2]
    assert row["memory"] == 2.0


def test_the_training_of_the_start_up_check_is_valid(small, tmp_path):
    command = start_up.command_of(7, tmp_path)
    loaded = load(ROOT / "recipes" / "shakespeare_gpt.yaml", [text for text in command if "=" in text], Registry())
    assert loaded.train.tokens == 7 * 4 * 16


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


@pytest.mark.parametrize("name", pairs.PAIRS)
def test_both_sides_of_a_pair_are_valid_and_differ(name):
    pair = pairs.PAIRS[name]
    without, changed = (
        load(ROOT / "recipes" / f"{pair.recipe}.yaml", settings, Registry())
        for settings in (pair.settings, (*pair.settings, *pair.change))
    )
    assert without.digest != changed.digest


def test_a_pair_is_measured_in_turns(small, monkeypatch, capsys):
    pair = pairs.Pair("digits_classifier", ("device=cpu",), ("optimization.set_to_none=on",))
    monkeypatch.setattr(pairs, "PAIRS", {"zeros": pair, "wrong": pair._replace(recipe="missing")})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", itertools.count(2**31, 2**20).__next__)
    monkeypatch.setattr(sys, "argv", ["pairs.py", "--rounds", "3", "--updates", "2"])
    pairs.main()
    rows = json.loads(capsys.readouterr().out)
    middle, low, high = rows["zeros"]["speed"]
    assert low <= middle <= high
    assert rows["zeros"]["mib"]["with"] == rows["zeros"]["mib"]["without"] + 1
    assert "missing" in rows["wrong"]["problem"]


def test_no_check_starts_when_the_time_is_over(tmp_path, monkeypatch):
    quick = [
        check.Check(name, [sys.executable, "-c", "print('{}')"], 30, check.succeeds, name == "alone")
        for name in ("beside", "alone")
    ]
    monkeypatch.setattr(check, "CHECKS", quick)
    monkeypatch.setattr(sys, "argv", ["check.py", "--out", str(tmp_path), "--limit", "0"])
    assert check.main() == 1
    _, beside, alone = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert beside["ok"]
    assert alone["problem"] == "no time was left"


def test_the_committed_results_are_of_checks_that_exist():
    machine, *rows = [json.loads(line) for line in (FOLDER / "results.jsonl").read_text().splitlines()]
    assert machine["gpu"].startswith("NVIDIA")
    assert {row["check"] for row in rows} <= {each.name for each in check.CHECKS}
