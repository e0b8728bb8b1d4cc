"""All checks on a GPU in one command, which is meant to take less than nine minutes.

    python experiments/gpu/check.py                    # every check, the most important first
    python experiments/gpu/check.py races amp          # only these
    python experiments/gpu/check.py --out FOLDER       # results.jsonl and logs go there

A result is written as soon as its check ends. Checks of correctness run beside each other; checks
that measure times run alone, after them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

FOLDER = Path(__file__).parent
RUNNER = [sys.executable, "-m", "runner"]
TOGETHER = 15
"""Checks that run beside each other."""
LIMIT_S = 540.0
"""Seconds after which no further check starts."""


@dataclass
class Outcome:
    """The end of a command."""

    code: int
    output: str
    errors: str
    seconds: float

    def data(self) -> dict[str, Any]:
        """Returns the JSON object that it has printed."""
        return dict(json.loads(self.output[self.output.index("{") :]))


Judge = Callable[[Outcome], tuple[bool, dict[str, Any]]]


@dataclass(frozen=True)
class Check:
    """A command on a GPU, and what is expected of it.

    Attributes:
        name: Of the check.
        command: The command.
        seconds: Its time limit.
        judge: Returns whether the result is right, and what to record.
        is_alone: Whether it measures times.
        environment: Variables of the environment.
    """

    name: str
    command: list[str]
    seconds: float
    judge: Judge
    is_alone: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def verdicts(*accepted: str) -> Judge:
    """Returns a judge of ``runner verify --json``: every verdict is one of those accepted."""

    def judge(outcome: Outcome) -> tuple[bool, dict[str, Any]]:
        report = outcome.data()
        rows = {
            stage["name"]: f"{stage['verdict']} {stage['contract']}: {stage['summary'][:300]}"
            for stage in report["stages"]
        }
        decided = [stage["verdict"] in accepted for stage in report["stages"]]
        return bool(decided) and all(decided), {
            "verdicts": rows,
            "inactive": report["inactive"],
            "seconds": report["seconds"],
        }

    return judge


def judge_races(outcome: Outcome) -> tuple[bool, dict[str, Any]]:
    """Every race is a FAIL, and every correct form a PASS."""
    rows = outcome.data()
    return all(row["expected"] == row["verdict"] for row in rows.values()), rows


def succeeds(outcome: Outcome) -> tuple[bool, dict[str, Any]]:
    """The command succeeds; records the end of its output."""
    return outcome.code == 0, {"end": outcome.output[-1500:]}


def judge_gpt(outcome: Outcome) -> tuple[bool, dict[str, Any]]:
    """An update takes at most a hundredth more time and memory than that of a plain loop."""
    rows = outcome.data()
    return all(row["time"][0] <= 1.01 and row["memory"] <= 1.01 for row in rows.values()), rows


def judge_pairs(outcome: Outcome) -> tuple[bool, dict[str, Any]]:
    """Every pair was measured."""
    rows = outcome.data()
    return not any("problem" in row for row in rows.values()), rows


def judge_start_up(outcome: Outcome) -> tuple[bool, dict[str, Any]]:
    """A training takes at most 10 seconds more than a plain script, 5 with compiled code in caches."""
    rows = outcome.data()
    is_right = rows["cold"]["more_s"] <= 10 and rows["warm"]["more_s"] <= 5
    return is_right and not any(row["recompilations"] for row in rows.values()), rows


def judge_run(outcome: Outcome) -> tuple[bool, dict[str, Any]]:
    """The training ends; records its figures."""
    report = outcome.data()
    figures = {
        name: value for name, value in report["metrics"].items() if name.startswith(("perf/", "eval/")) and value
    }
    return outcome.code == 0, {"seconds": report["seconds"], "startup": report["startup_seconds"], **figures}


def judge_fast_run(outcome: Outcome) -> tuple[bool, dict[str, Any]]:
    """The training ends, at 5,000 environment steps a second or more; records its figures."""
    has_ended, figures = judge_run(outcome)
    return has_ended and figures.get("perf/env_steps_per_second", 0.0) >= 5000, figures


def verify(
    name: str, recipe: str, *settings: str, accepted: tuple[str, ...] = ("PASS",), seconds: float = 150.0
) -> Check:
    """Returns a check of a verification."""
    command = [*RUNNER, "verify", recipe, *settings, "--json", "--quiet"]
    command += ["--horizon", "200", "--budget", f"{0.8 * seconds:g}"]
    return Check(name, command, seconds, verdicts(*accepted))


GPU_TESTS = (
    "tests/stages/test_gpu_only_stages.py", "tests/stages/test_amp.py", "tests/system/test_torch_settings.py",
    "tests/proof/test_exact_check.py", "tests/proof/test_interleaved_timing.py",
)  # fmt: skip
QUIET = ("--json", "--quiet")
CHECKS = (
    Check("races", [sys.executable, str(FOLDER / "races.py")], 200, judge_races),
    verify("amp", "digits_classifier", "optimization.amp={dtype: fp16}", "--stage", "amp", accepted=("PASS", "FAIL")),
    verify(
        "float32_matmul", "digits_classifier", "optimization.float32_matmul={precision: medium}",
        "--stage", "float32_matmul", accepted=("PASS", "FAIL"),
    ),
    verify("exact: marl_phase1", "marl_phase1", "--stage", "merged_critic_loss"),
    verify(
        "exact: async_transfer", "marl_phase1", "data.replay={kind: uniform, device: cpu}",
        "optimization.async_transfer=on", "--stage", "async_transfer",
    ),
    verify(
        "exact: digits_classifier", "digits_classifier", "optimization.delete_tensors=on",
        "optimization.set_to_none=on", "optimization.empty_cache=on",
    ),
    verify(
        "exact: checkpointing", "shakespeare_gpt", "optimization.amp=off", "optimization.activation_checkpointing=on",
        "--stage", "activation_checkpointing",
    ),
    verify("exact: gcn_cora", "gcn_cora", "optimization.set_to_none=on", "--stage", "set_to_none"),
    verify("cuda_graph", "digits_classifier", "optimization.cuda_graph=on", "--stage", "cuda_graph"),
    verify(
        "cuda_graph of an iteration", "marl_phase1", "optimization.cuda_graph={scope: iteration}",
        "--stage", "cuda_graph",
    ),
    Check("study of two trials", [*RUNNER, "study", "run", str(FOLDER / "study.yaml")], 150, succeeds),
    Check("kill and resume", [sys.executable, str(FOLDER / "resume.py")], 150, succeeds),
    Check("tests", [sys.executable, "-m", "pytest", "-q", "-n", "0", *GPU_TESTS], 150, succeeds),
    Check("verify marl_phase3", [*RUNNER, "verify", "marl_phase3", "--json", "--quiet", "--budget", "170"], 200,
          verdicts("PASS")),
    Check("gpt", [sys.executable, str(FOLDER / "gpt.py")], 120, judge_gpt, is_alone=True),
    Check("start-up", [sys.executable, str(FOLDER / "start_up.py")], 150, judge_start_up, is_alone=True),
    Check("run digits_classifier", [*RUNNER, "run", "digits_classifier", *QUIET], 60, judge_run, is_alone=True),
    Check(
        "run digits_classifier with cuda_graph",
        [*RUNNER, "run", "digits_classifier", "optimization.cuda_graph=on", *QUIET], 60, judge_run, is_alone=True,
    ),
    Check(
        "run marl_phase3", [*RUNNER, "run", "marl_phase3", "train.env_steps=30000", *QUIET], 100, judge_run,
        is_alone=True,
    ),
    Check(
        "run marl_phase3 with the iteration captured",
        [
            *RUNNER, "run", "marl_phase3", "train.env_steps=30000", "optimization.cuda_graph={scope: iteration}",
            *QUIET,
        ],
        100, judge_fast_run, is_alone=True,
    ),
    Check("pairs", [sys.executable, str(FOLDER / "pairs.py")], 200, judge_pairs, is_alone=True),
)  # fmt: skip


def run(check: Check, folder: Path) -> dict[str, Any]:
    """Runs a check, and returns its row."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as workspace:
        environment = {
            **os.environ,
            "RUNNER_WORKSPACE": workspace,
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",
            **check.environment,
        }
        process = subprocess.Popen(
            check.command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, errors = process.communicate(timeout=check.seconds)
        except subprocess.TimeoutExpired:
            # Its trainings have process groups of their own, and hold its pipes.
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for member in family:
                with suppress(psutil.Error):
                    member.kill()
            output, errors = process.communicate()
    outcome = Outcome(process.returncode, output, errors, time.perf_counter() - started)
    with (folder / "logs.txt").open("a") as log:
        log.write(f"===== {check.name}: {' '.join(check.command)}\n{output}\n----- errors\n{errors}\n")
    try:
        is_right, facts = check.judge(outcome)
    except Exception as error:  # a check that printed something else is a row, too
        is_right, facts = False, {"problem": f"{type(error).__name__}: {error}", "errors": errors[-800:]}
    return {"check": check.name, "ok": is_right, "code": outcome.code, "wall_s": round(outcome.seconds, 1), **facts}


def machine() -> dict[str, Any]:
    """Returns the card, the versions and the date."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "torch": torch.__version__,
        "cuda": torch.version.cuda, "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def main() -> int:
    """Runs the checks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="names of checks, or words in them; all unless given")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the results")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which no check starts")
    options = parser.parse_args()
    started = time.monotonic()
    checks = [check for check in CHECKS if not options.names or any(name in check.name for name in options.names)]
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    rows = []

    def record(row: dict[str, Any]) -> None:
        rows.append(row)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{'ok  ' if row['ok'] else 'FAIL'} {row['check']}  {row['wall_s']} s", flush=True)

    with results.open("w") as file:
        file.write(json.dumps(machine()) + "\n")
    with ThreadPoolExecutor(TOGETHER) as pool:
        runs = [pool.submit(run, check, options.out) for check in checks if not check.is_alone]
        for finished in as_completed(runs):
            record(finished.result())
    for check in checks:
        if not check.is_alone:
            continue
        if time.monotonic() - started > options.limit:
            record({"check": check.name, "ok": False, "wall_s": 0.0, "problem": "no time was left"})
        else:
            record(run(check, options.out))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
