"""Batch scripts for Slurm, and their submission."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.distributed.batch_job import GRACE_SECONDS, BatchJob, quote_for_bash, refuse_secrets
from runner.system.errors import RunnerError, UsageError
from runner.system.escapes import escape_line
from runner.system.processes import ATTEMPT, JOB

OUTPUT_FOLDER = "slurm"
"""In a workspace: the output of jobs."""
_OPTION = re.compile(r"([a-z][a-z-]*)(?:=(.*))?")
_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
_PLAIN = re.compile(r"[\w@%+=:,./-]*")
_RESERVED = frozenset(
    {"array", "chdir", "cpus-per-task", "gpus-per-node", "job-name", "mem", "nodes", "ntasks"}
    | {"ntasks-per-node", "open-mode", "output", "error", "requeue", "no-requeue", "signal", "time"}
)
_SUBMIT_SECONDS = 120


def render_script(job: BatchJob, program: Sequence[str], options: Sequence[str] = ()) -> str:
    """Returns the batch script of a job.

    Args:
        job: The job.
        program: The words that start the runner.
        options: Further options of sbatch, ``KEY`` or ``KEY=VALUE``.

    Raises:
        UsageError: An option or a path cannot be written, or a secret would be.
    """
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {directive}" for directive in _directives(job, options)]
    lines += ["", *_preparation(job), "", *_execution(job, program), ""]
    script = "\n".join(lines)
    refuse_secrets(script)
    return script


def submit_script(script: str) -> str:
    """Submits a batch script and returns the number of its job.

    Raises:
        UsageError: There is no sbatch here.
        RunnerError: Slurm refuses the job.
    """
    command = ["sbatch", "--parsable"]
    try:
        result = subprocess.run(
            command,
            input=script,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SUBMIT_SECONDS,
        )
    except FileNotFoundError:
        raise UsageError(
            "sbatch is not installed here; print the script and submit it where Slurm is: --print > job.sbatch"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunnerError(f"sbatch has not answered for {_SUBMIT_SECONDS} s") from None
    if result.returncode:
        raise RunnerError(f"Slurm refuses the job: {result.stderr.strip()}")
    # On several clusters, the name of the cluster follows.
    return result.stdout.strip().partition(";")[0]


def output_folder(job: BatchJob) -> Path:
    """Returns the folder of the job's output, which has to exist before a task starts."""
    return Path(job.workspace, OUTPUT_FOLDER)


def validate_time(time: str) -> None:
    """Raises a UsageError unless a time limit has one of Slurm's forms."""
    if time and not _TIME.fullmatch(time):
        raise UsageError(f"--time: should be minutes, HH:MM:SS or D-HH:MM:SS; got '{time}'")


def _directives(job: BatchJob, options: Sequence[str]) -> Iterator[str]:
    """Yields the options of sbatch."""
    number = "%A_%a" if job.is_array else "%j"
    yield f"--job-name={job.safe_name}"
    if job.is_array:
        yield f"--array=0-{job.tasks - 1}"
    yield f"--output={_output_path(job, number)}"
    # A task that is run again continues its file.
    yield "--open-mode=append"
    yield "--requeue"
    # Without B:, the signal goes to the steps alone, and the shell can requeue the task.
    yield f"--signal=TERM@{GRACE_SECONDS}"
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    if job.cpus is not None:
        yield f"--cpus-per-task={job.cpus}"
    if job.gpus:
        yield f"--gpus-per-node={job.gpus}"
    if job.memory is not None:
        yield f"--mem={-(-job.memory // 2**20)}M"
    if job.time:
        yield f"--time={job.time}"
    for option in options:
        yield _free_option(option)


def _free_option(option: str) -> str:
    """Returns an option of the user as a directive."""
    match = _OPTION.fullmatch(option) if escape_line(option) == option else None
    if match is None:
        raise UsageError(f"--option: should be KEY=VALUE on one line, such as partition=gpu; got '{option}'")
    key, value = match.groups()
    if key in _RESERVED:
        raise UsageError(f"--option: the runner sets '{key}' itself; see runner submit --help")
    return f"--{key}" if value is None else f"--{key}={_quote(value)}"


def _output_path(job: BatchJob, number: str) -> str:
    """Returns the file of the output as a directive names it, with a pattern for the task's number."""
    folder = str(output_folder(job))
    # A backslash switches patterns off, and a directive has one line.
    if "\\" in folder or escape_line(folder) != folder:
        raise UsageError(
            f"workspace {folder}: Slurm cannot write into a folder of this name; set RUNNER_WORKSPACE to another"
        )
    return _quote(f"{folder.replace('%', '%%')}/{job.safe_name}-{number}.out")


def _quote(value: str) -> str:
    """Returns a value as sbatch reads it in a directive, whose rules are not those of bash."""
    if _PLAIN.fullmatch(value):
        return value
    # A backslash escapes quotes, but no spaces.
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'"{escaped}"'


def _preparation(job: BatchJob) -> Iterator[str]:
    """Yields the lines before the training: folder and environment."""
    yield f"cd -- {quote_for_bash(job.folder)} || exit"
    variables = {"RUNNER_WORKSPACE": job.workspace, **job.variables}
    for name, value in variables.items():
        yield f"export {name}={quote_for_bash(value)}"
    yield "# A task that was requeued takes its run over from the machine of the attempt before."
    yield f'export {JOB}="slurm-${{SLURM_CLUSTER_NAME:-cluster}}-{_task(job)}"'
    yield f'export {ATTEMPT}="${{SLURM_RESTART_COUNT:-0}}"'
    for name in job.secrets:
        yield f"# {name} has a password, which is not written here: sbatch takes it from its environment."
        yield f': "${{{name}:?is not set: export it before sbatch, or in a file that this script reads}}"'


def _task(job: BatchJob) -> str:
    """Returns the variables with the identifier of a task, which stays the same when it is requeued."""
    return "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if job.is_array else "$SLURM_JOB_ID"


def _execution(job: BatchJob, program: Sequence[str]) -> Iterator[str]:
    """Yields the lines that train, and put a stopped task into the queue again."""
    srun = ["srun"]
    # srun does not take the number of cores from sbatch.
    if job.cpus is not None:
        srun.append(f"--cpus-per-task={job.cpus}")
    words = [*map(quote_for_bash, (*program, *job.words))]
    if job.first_seed is not None:
        words.append(f"seed=$(({job.first_seed} + SLURM_ARRAY_TASK_ID))")
    if job.nodes > 1:
        # The other machines finish their checkpoint when one has ended.
        srun.append("--kill-on-bad-exit=0")
        words += ["--nodes", str(job.nodes), "--rendezvous", '"$host:$port"']
        yield 'host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        yield "port=$((20000 + SLURM_JOB_ID % 10000))"
    yield " ".join([*srun, *words])
    yield "code=$?"
    yield "# This exit code is that of a task which a signal has stopped."
    yield f'if [ "$code" -eq {job.retry_code} ]; then'
    # The number of the job alone would be that of all tasks.
    yield f'    scontrol requeue "{_task(job)}"'
    yield "fi"
    yield 'exit "$code"'
