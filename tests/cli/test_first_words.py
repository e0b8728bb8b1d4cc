"""Every verb that takes more than a moment says so before it imports what takes the moment."""

import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import run_folder

from runner.system.processes import Owner

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SPY = """
import io, os, sys

class First(io.StringIO):
    def write(self, text):
        if not isinstance(text, str):
            raise TypeError("a stream of text")
        if not text.strip():
            return 0
        heavy = sorted({"torch", "mlflow", "optuna"} & sys.modules.keys())
        os.write(1, f"{heavy} {text}".encode())
        os._exit(0)

sys.stdout = sys.stderr = First()
from runner.cli import main
main()
"""
STUDY = str(EXPERIMENTS / "marl_search.yaml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "marl_phase1"), "marl_phase1: 0/140,000 env_steps (0%), starting"),
        (("run", "marl_phase1", "--seeds", "2"), "marl_phase1: 0/280,000 env_steps (0%), starting"),
        (("evaluate",), "runner evaluate: 0 s, reading the run"),
        (("rm", "--purge"), "runner rm: 0 s, removing"),
        (("sync",), "runner sync: 0 s, sending"),
        (("verify", "marl_phase1"), "runner verify: 0 s, reading the recipe"),
        (("ablate", "marl_phase1"), "runner ablate: 0 s, starting"),
        (("profile", "marl_phase1"), "runner profile: 0 s, reading the recipe"),
        (("compare", "latest", "latest"), "runner compare: 0 s, reading the runs"),
        (("doctor",), "runner doctor: 0 s, looking at this machine"),
        (("ui",), "runner ui: 0 s, importing MLflow"),
        (("study", "plan", STUDY), "runner study plan: 0 s, reading the study"),
        (("study", "run", STUDY), "runner study run: 0 s, reading the study"),
        (("study", "worker", STUDY), "runner study worker: 0 s, reading the study"),
        (("study", "show", "mine"), "runner study show: 0 s, reading the study"),
        (("study", "best", "mine"), "runner study best: 0 s, reading the study"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_something_is_said_before_anything_heavy_is_imported(tmp_path, arguments, said):
    assert first_words(tmp_path, *arguments) == f"[] {said}"


@pytest.mark.parametrize("verb", [("ls",), ("show", "latest"), ("resume",)], ids=" ".join)
def test_who_tells_mlflow_of_dead_runs_says_so_before(tmp_path, verb):
    run_folder(owner=Owner.this_process().model_copy(update={"born": 1.0}))
    assert first_words(tmp_path, *verb) == f"[] runner {verb[0]}: 0 s, recording crashed runs in MLflow"


def first_words(folder, *arguments):
    """What a verb says first, behind what is imported by then."""
    command = [sys.executable, "-c", SPY, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.rstrip()
