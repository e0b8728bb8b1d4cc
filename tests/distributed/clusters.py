"""Jobs of clusters that are not here: scripts run with programs that write down how they were called."""

import os
import subprocess
from dataclasses import replace

from runner.distributed.batch_job import BatchJob

JOB = BatchJob(
    name="toy",
    words=("run", "toy.yaml", "--resume"),
    retry_code=75,
    folder="/",
    workspace="/tmp/workspace",
)
PROGRAM = {
    "srun": 'printf "%s\\0" "$@" > "$CALLED/srun"; pwd > "$CALLED/folder"; env > "$CALLED/env"; exit "$CODE"',
    "scontrol": 'if [ "$1" = show ]; then printf "%s\\n" first second; else echo "$@" >> "$CALLED/scontrol"; fi',
}


def job(**changes):
    """Returns a small job with these attributes."""
    return replace(JOB, **changes)


def put_programs(folder, programs):
    """Writes shell scripts of these names, to be found in PATH before others."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)


def run_script(script, folder, code=0, **variables):
    """Runs a batch script as Slurm does.

    Returns:
        Its exit code, the words that srun has got, and the requests to scontrol.
    """
    put_programs(folder / "bin", PROGRAM)
    called = folder / f"called-{len(list(folder.glob('called-*')))}"
    called.mkdir()
    environment = {**os.environ, "CALLED": str(called), "CODE": str(code), "SLURM_JOB_ID": "30007", **variables}
    environment["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
    command = ["bash", "-s"]
    done = subprocess.run(command, input=script.encode(), env=environment, capture_output=True, check=False)
    words = []
    if (called / "srun").exists():
        words = [os.fsdecode(word) for word in (called / "srun").read_bytes().split(b"\0")[:-1]]
    requests = called / "scontrol"
    return done.returncode, words, requests.read_text() if requests.exists() else ""
