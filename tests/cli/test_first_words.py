"""Every verb that takes more than a moment says so before it imports what takes the moment."""

import subprocess
import sys
from pathlib import Path

import pytest

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
        (("run", "marl_phase1"), "marl_phase1: 0/40,000 env_steps (0%), starting"),
        (("verify", "marl_phase1"), "runner verify: 0 s, verifying marl_phase1"),
        (("ablate", "marl_phase1"), "runner ablate: 0 s, starting"),
        (("profile", "marl_phase1"), "runner profile: 0 s, profiling marl_phase1"),
        (("compare", "latest", "latest"), "runner compare: 0 s, reading the runs"),
        (("doctor",), "runner doctor: 0 s, looking at this machine"),
        (("ui",), "starting MLflow's server"),
        (("study", "plan", STUDY), "runner study plan: 0 s, reading the study"),
        (("study", "run", STUDY), "runner study run: 0 s, reading the study"),
        (("study", "worker", STUDY), "runner study worker: 0 s, reading the study"),
        (("study", "show", "mine"), "runner study show: 0 s, reading the study"),
        (("study", "best", "mine"), "runner study best: 0 s, reading the study"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_something_is_said_before_anything_heavy_is_imported(tmp_path, arguments, said):
    command = [sys.executable, "-c", SPY, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip() == f"[] {said}"
