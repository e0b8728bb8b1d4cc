"""A training on a GPU that is killed and resumed, beside one that runs through.

    python experiments/gpu/resume.py [RECIPE] [SETTING ...]

Fails if the resumed training does not end, or ends in other weights than the one that ran through.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RUNNER = [sys.executable, "-m", "runner"]
WAIT_SECONDS = 100.0


def weights(run: Path) -> str:
    """Returns a digest of the weights in the last checkpoint of a run."""
    last = max((run / "checkpoints").iterdir())
    digest = hashlib.sha256()
    for file in sorted(last.rglob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def start(name: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts a training."""
    return subprocess.Popen([*RUNNER, "run", *arguments, f"name={name}", "--quiet"], start_new_session=True)


def folder(name: str) -> Path | None:
    """Returns the folder of a run, once it exists."""
    return next(iter(Path(os.environ["RUNNER_WORKSPACE"]).glob(f"runs/{name}*")), None)


def main() -> int:
    """Runs, kills, resumes and compares."""
    arguments = sys.argv[1:] or [
        "marl_phase3",
        "train.env_steps=12000",
        "train.checkpoint_every=2000",
        "system.deterministic=true",
    ]
    if start("whole", *arguments).wait():
        return 1
    killed = start("killed", *arguments)
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        run = folder("killed")
        if run and len(list((run / "checkpoints").glob("step-*"))) > 1:
            break
        time.sleep(0.1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    resumed = subprocess.run([*RUNNER, "resume", "killed", "--quiet"], check=False).returncode
    subprocess.run([*RUNNER, "compare", "whole", "killed"], check=False)
    runs = [folder(name) for name in ("whole", "killed")]
    digests = [weights(run) for run in runs if run]
    print(f"resumed with {resumed}; weights {' and '.join(digests)}")
    return 0 if resumed == 0 and len(set(digests)) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
