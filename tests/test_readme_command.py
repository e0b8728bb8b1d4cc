"""The README's first command, executed literally in a clean clone."""

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIRST_UPDATE = "perf/first_update_seconds"
SECONDS = 240


def offline() -> dict[str, str]:
    """Returns an environment in which pip installs the clone without a network, next to the packages of these tests."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RUNNER_", "MLFLOW_"))}
    return {
        **inherited,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": sysconfig.get_paths()["purelib"],
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        # pip reads the variable of this option as the value of its opposite.
        "PIP_NO_BUILD_ISOLATION": "0",
    }


def has_updated(folder: Path) -> bool:
    """Returns whether a run in the folder has made its first update."""
    return any(FIRST_UPDATE in path.read_text() for path in folder.glob(".runner/runs/*/spool.jsonl"))


@pytest.mark.long
@pytest.mark.timeout(2 * SECONDS)
def test_the_first_command_trains_the_main_recipe_in_a_clean_clone(tmp_path):
    (command,) = re.findall(r"```bash\n(.*runner run.*)\n```", (ROOT / "README.md").read_text())
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    log = tmp_path / "log"
    with log.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-c", command], cwd=clone, env=offline(), stdout=output, stderr=output, start_new_session=True,
            # A shell that runs the tests in the background has made them ignore it.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
    try:
        deadline = time.monotonic() + SECONDS
        while not has_updated(clone):
            assert shell.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
    finally:
        # The shell and its training are one group of processes.
        os.killpg(shell.pid, signal.SIGINT)
    assert shell.wait(timeout=SECONDS) != 0
    (run,) = clone.glob(".runner/runs/marl_phase2-*")
    assert list(run.glob("checkpoints/step-*")) != [], log.read_text()
    assert json.loads((run / "run.json").read_text())["overrides"] == {}
