"""Kills processes of trainings on several processes, and compares what they learn with trainings that are left alone.

    python experiments/scale/kills.py --kills 120   # continues where it was interrupted
    python experiments/scale/kills.py --table       # writes kills.md from kills.jsonl

A training is started by `runner run --nproc` or by torchrun, and killed ten times at random moments: the first
process, another one, the launcher, or a process that is stopped so that it hangs. The same command then resumes it. At
the end, its newest checkpoint (bit by bit) and every point of its `train/` and `eval/` metrics in MLflow are compared
with those of a training that nothing has killed. Results are appended to kills.jsonl after each training.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import psutil

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS, TABLE = HERE / "kills.jsonl", HERE / "kills.md"
KILLS = 10
"""Kills of one training."""
STALL_SECONDS = 10
"""Time after which a process that does not answer is missing (train.stall_s)."""
HANG_SECONDS = 60.0
"""Longest time from a kill to the end of all processes, beyond which a training counts as hanging."""
START_SECONDS = 240.0
TARGETS = ("first process", "another process", "launcher", "hanging process")


class Training(NamedTuple):
    """A training that is killed."""

    recipe: str
    processes: int
    sets: tuple[str, ...]


class Attempt(NamedTuple):
    """A training from its start to a kill."""

    target: str
    ended_after_s: float
    exit_code: int


TRAININGS = (
    Training(
        "digits_classifier",
        2,
        ("train={epochs: 40, batch_size: 64, log_every: 1, evaluate_every: 5, checkpoint_every: 2}",),
    ),
    Training(
        "shakespeare_gpt",
        2,
        (
            *("model.layers=1", "model.width=32", "model.heads=2", "data.context=32", "optimization.compile=off"),
            "train={tokens: 102400, batch_size: 16, log_every: 512, evaluate_every: 25600, checkpoint_every: 5120}",
        ),
    ),
    Training(
        "digits_classifier",
        4,
        (
            "train={epochs: 30, batch_size: 64, log_every: 1, evaluate_every: 5, checkpoint_every: 2, ema: 0.9}",
            "optimization.compressed_gradients={format: powersgd, rank: 1}",
        ),
    ),
    Training(
        "digits_classifier",
        2,
        (
            "train={epochs: 30, batch_size: 64, log_every: 1, evaluate_every: 5, checkpoint_every: 2, ema: 0.9}",
            "optimization.fsdp=on",
        ),
    ),
)


def commands(training: Training, launcher: str) -> list[str]:
    """Returns the command line of a training."""
    sets = (*training.sets, f"train.stall_s={STALL_SECONDS}", "tracking.system_metrics=false", "device=cpu")
    words = ["run", training.recipe, "--resume", "--quiet", "--json", *sets]
    if launcher == "runner":
        return [sys.executable, "-m", "runner", *words, "--nproc", str(training.processes)]
    options = [f"--nproc-per-node={training.processes}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m", "runner", *words]


def start(command: list[str], workspace: Path, output: Path) -> subprocess.Popen[bytes]:
    """Starts a training in a session of its own."""
    variables = {"RUNNER_WORKSPACE": str(workspace), "OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with output.open("wb") as stdout, output.with_suffix(".err").open("wb") as stderr:
        return subprocess.Popen(
            command, stdout=stdout, stderr=stderr, env={**os.environ, **variables}, start_new_session=True
        )


def ranks_of(launcher: int) -> dict[int, psutil.Process]:
    """Returns the processes that a launcher has started, by rank."""
    ranks: dict[int, psutil.Process] = {}
    for process in psutil.Process(launcher).children(recursive=True):
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        # Workers of data inherit the variables, and are younger than the process with the rank.
        if "RANK" in environment:
            ranks.setdefault(int(environment["RANK"]), process)
    return ranks


def wait_for_end(processes: list[psutil.Process]) -> None:
    """Waits until processes have ended.

    Args:
        processes: They are no children of this process, whose exit codes would be lost.

    Raises:
        RuntimeError: Some are still alive after ``HANG_SECONDS``; they are killed.
    """
    _, alive = psutil.wait_procs(processes, timeout=HANG_SECONDS)
    for process in alive:
        process.kill()
    if alive:
        raise RuntimeError(f"{len(alive)} of {len(processes)} processes were alive after {HANG_SECONDS:g} s")


def interrupt(child: subprocess.Popen[bytes], target: str, training: Training, rng: random.Random) -> Attempt:
    """Kills a process of a training, and waits for the end of all."""
    ranks = ranks_of(child.pid)
    if target == "launcher":
        child.kill()
    elif target == "first process":
        ranks[0].kill()
    elif target == "another process":
        ranks[rng.randrange(1, training.processes)].kill()
    else:
        ranks[rng.randrange(training.processes)].suspend()
    started = time.monotonic()
    wait_for_end(list(ranks.values()))
    code = child.wait(HANG_SECONDS)
    return Attempt(target, time.monotonic() - started, code)


def runs_of(workspace: Path) -> list[Path]:
    """Returns the folders of runs that have begun: one that is killed before its lock exists has trained nothing, and
    the next command starts another."""
    return [lock.parent for lock in workspace.glob("runs/*/recipe.lock.yaml")]


def metrics_size(workspace: Path) -> int:
    """Returns the size of the metrics of a run in bytes; 0 without a run."""
    spools = (folder / "spool.jsonl" for folder in runs_of(workspace))
    return max((spool.stat().st_size for spool in spools if spool.exists()), default=0)


def wait_for_progress(child: subprocess.Popen[bytes], workspace: Path, size: int) -> None:
    """Waits until metrics have a size and more of them than before, or the training has ended."""
    size = max(size, metrics_size(workspace) + 1)
    deadline = time.monotonic() + START_SECONDS
    while child.poll() is None and time.monotonic() < deadline and metrics_size(workspace) < size:
        time.sleep(0.01)


def result_of(output: Path) -> dict[str, Any]:
    """Returns what a training has printed as JSON.

    Raises:
        RuntimeError: It has printed none.
    """
    text = output.read_text()
    if not text.strip():
        raise RuntimeError(errors_of(output))
    result: dict[str, Any] = json.loads(text)
    return result


def errors_of(output: Path) -> str:
    """Returns the end of what a training has printed on stderr."""
    return output.with_suffix(".err").read_text(errors="replace")[-1000:]


def examine(training: Training, launcher: str, seed: int) -> dict[str, Any]:
    """Trains with and without kills, and compares both."""
    sys.path.insert(0, str(ROOT / "tests"))
    from interrupted import learnt, same

    rng = random.Random(f"{training} {launcher} {seed}")
    command = commands(training, launcher)
    attempts: list[Attempt] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        reference_workspace, workspace = Path(folder) / "reference", Path(folder) / "killed"
        start(command, reference_workspace, output).wait()
        reference = result_of(output)
        size = (Path(reference["run_dir"]) / "spool.jsonl").stat().st_size
        # A target close to the end may be passed before the process is killed.
        moments = sorted(rng.uniform(0.02, 0.9) for _ in range(KILLS))
        targets = [TARGETS[number % len(TARGETS)] for number in range(KILLS)]
        rng.shuffle(targets)
        for moment, target in zip(moments, targets, strict=True):
            child = start(command, workspace, output)
            wait_for_progress(child, workspace, round(moment * size))
            time.sleep(rng.uniform(0, 0.1))
            if child.poll() is not None:
                raise RuntimeError(f"ended with {child.returncode} before a kill: {errors_of(output)}")
            attempts.append(interrupt(child, target, training, rng))
        start(command, workspace, output).wait()
        result = result_of(output)
        if len(runs_of(workspace)) != 1:
            raise RuntimeError("the training has become several runs")
        same(learnt(result), learnt(reference))
    return {
        "recipe": training.recipe,
        "processes": training.processes,
        "launcher": launcher,
        "seed": seed,
        "outcome": "same bits",
        "seconds": round(time.monotonic() - started),
        "kills": [attempt._asdict() for attempt in attempts],
    }


def stored() -> list[dict[str, Any]]:
    """Returns the results so far."""
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def record_all(kills: int) -> bool:
    """Examines trainings until enough processes were killed; returns whether all have the same bits."""
    for number in range(-(-kills // KILLS)):
        training = TRAININGS[number % len(TRAININGS)]
        launcher = ("runner", "torchrun")[number // len(TRAININGS) % 2]
        key = (training.recipe, training.processes, launcher, number)
        if any(key == (row["recipe"], row["processes"], row["launcher"], row["seed"]) for row in stored()):
            continue
        try:
            row = examine(training, launcher, number)
        except Exception:
            row = dict(zip(("recipe", "processes", "launcher", "seed"), key, strict=True))
            row |= {"outcome": traceback.format_exc(limit=-1).strip()[-1500:], "kills": []}
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{row['recipe']}, {row['processes']} by {row['launcher']}: {row['outcome']}", flush=True)
    return all(row["outcome"] == "same bits" for row in stored())


def write_table() -> None:
    """Writes the table of all results."""
    rows = stored()
    lines = [
        "# Kills of trainings on several processes",
        "",
        "Written by `python experiments/scale/kills.py`, which describes the method. One thread for each process.",
        "",
        "| recipe | processes | started by | kills | trainings | with the same bits |",
        "|---|---|---|---|---|---|",
    ]
    groups = sorted({(row["recipe"], row["processes"], row["launcher"]) for row in rows})
    for group in groups:
        members = [row for row in rows if (row["recipe"], row["processes"], row["launcher"]) == group]
        kills = sum(len(row["kills"]) for row in members)
        equal = sum(row["outcome"] == "same bits" for row in members)
        lines.append(f"| {group[0]} | {group[1]} | {group[2]} | {kills} | {len(members)} | {equal} |")
    lines += [
        "",
        "| what is killed | kills | seconds until all have ended: median, longest | exit codes of the command |",
        "|---|---|---|---|",
    ]
    for target in TARGETS:
        attempts = [kill for row in rows for kill in row["kills"] if kill["target"] == target]
        if not attempts:
            continue
        seconds = sorted(attempt["ended_after_s"] for attempt in attempts)
        codes = Counter(attempt["exit_code"] for attempt in attempts)
        named = ", ".join(f"{code} ({count})" for code, count in sorted(codes.items()))
        lines.append(f"| {target} | {len(attempts)} | {seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f} | {named} |")
    lines += [
        "",
        f"A hanging process has not answered for {STALL_SECONDS} s (`train.stall_s`) when the others end; torch "
        "kills it 30 s later.",
        "",
    ]
    TABLE.write_text("\n".join(lines))


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=120)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    # Kills are at moments that a loaded machine reaches later.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    is_equal = options.table or record_all(options.kills)
    write_table()
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
