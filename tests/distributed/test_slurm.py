"""Batch scripts for Slurm: what they run, when a task is requeued, and what is refused."""

import shlex

import pytest
from clusters import job, put_programs, run_script
from hostile import NAME

from runner.distributed.slurm import render_script, submit_script, validate_time
from runner.system.errors import RunnerError, UsageError

HOSTILE = ("run", "$(touch owned)", "a 'b' \"c\"", "`x`", "\n#SBATCH --x\n", "*", NAME)


def directives(script):
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_words_reach_the_runner_unchanged_from_a_folder_of_any_name(tmp_path):
    folder = tmp_path / f"a $(touch owned) '\n{NAME}"
    folder.mkdir()
    script = render_script(job(words=HOSTILE, folder=str(folder)), ["run ner", "-m"])
    code, words, _ = run_script(script, tmp_path)
    assert (code, words) == (0, ["run ner", "-m", *HOSTILE])
    assert list(folder.iterdir()) == []
    assert (tmp_path / "called-0" / "folder").read_bytes().decode() == f"{folder}\n"


@pytest.mark.parametrize("code", [0, 1, 2, 6, 75, 143])
def test_a_task_that_a_signal_has_stopped_is_requeued(tmp_path, code):
    single = render_script(job(), ["runner"])
    assert run_script(single, tmp_path, code) == (
        code, ["runner", "run", "toy.yaml", "--resume"], "requeue 30007\n" if code == 75 else ""
    )  # fmt: skip
    array = render_script(job(is_array=True, tasks=5, first_seed=40), ["runner"])
    numbers = {"SLURM_ARRAY_JOB_ID": "30003", "SLURM_ARRAY_TASK_ID": "4"}
    assert run_script(array, tmp_path, code, **numbers) == (
        code,
        ["runner", "run", "toy.yaml", "--resume", "seed=44"],
        "requeue 30003_4\n" if code == 75 else "",
    )
    worker = render_script(job(retry_code=143), ["runner"])
    assert run_script(worker, tmp_path, code)[2] == ("requeue 30007\n" if code == 143 else "")


def test_several_machines_meet_at_the_first():
    script = render_script(job(nodes=2, cpus=3), ["runner"])
    (line,) = (line for line in script.splitlines() if line.startswith("srun "))
    assert shlex.split(line)[:4] == ["srun", "--cpus-per-task=3", "--kill-on-bad-exit=0", "runner"]
    assert "--nodes=2" in directives(script)
    assert "--ntasks-per-node=1" in directives(script)


def test_several_machines_get_the_address(tmp_path):
    _, words, _ = run_script(render_script(job(nodes=2), ["runner"]), tmp_path, SLURM_JOB_NODELIST="node[1-2]")
    assert words[-4:] == ["--nodes", "2", "--rendezvous", "first:20007"]


def test_the_needs_of_a_task_are_directives(tmp_path):
    needs = job(
        name="a b", is_array=True, tasks=3, gpus=2, cpus=8, memory=3 * 2**29, time="1-02:00:00", workspace="/w %x/y"
    )
    assert directives(render_script(needs, ["runner"], ['partition=a b#"c', "exclusive"])) == [
        "--job-name=a_b",
        "--array=0-2",
        '--output="/w %%x/y/slurm/a_b-%A_%a.out"',
        "--open-mode=append",
        "--requeue",
        "--signal=TERM@120",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=8",
        "--gpus-per-node=2",
        "--mem=1536M",
        "--time=1-02:00:00",
        r'--partition="a b#\"c"',
        "--exclusive",
    ]


def test_variables_are_exported_and_secrets_are_expected(tmp_path):
    script = render_script(job(variables={"MLFLOW_TRACKING_URI": "a'b"}, secrets=("OPTUNA_STORAGE",)), ["runner"])
    assert "export MLFLOW_TRACKING_URI='a'\"'\"'b'" in script.splitlines()
    assert "export RUNNER_WORKSPACE=/tmp/workspace" in script.splitlines()
    code, words, _ = run_script(script, tmp_path, OPTUNA_STORAGE="")
    assert (code > 0, words) == (True, [])
    assert run_script(script, tmp_path, OPTUNA_STORAGE="x")[0] == 0


@pytest.mark.parametrize(
    ("is_array", "variables", "task", "attempt"),
    [
        (False, {"SLURM_JOB_ID": "7"}, "slurm-cluster-7", "0"),
        (False, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "slurm-cluster-7", "2"),
        (
            True,
            {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_CLUSTER_NAME": "a"},
            "slurm-a-7_3",
            "0",
        ),
    ],
)
def test_attempts_of_a_task_have_one_identifier(is_array, variables, task, attempt, tmp_path):
    run_script(render_script(job(is_array=is_array), ["runner"]), tmp_path, **variables)
    environment = (tmp_path / "called-0" / "env").read_text().splitlines()
    assert {f"RUNNER_JOB={task}", f"RUNNER_ATTEMPT={attempt}"} <= set(environment)


@pytest.mark.parametrize("option", ["", "=x", "Partition=x", "a=b\nc", f"a={NAME}", "output=x", "array=1-2", "a b=c"])
def test_an_option_is_refused(option):
    with pytest.raises(UsageError, match="--option: "):
        render_script(job(), ["runner"], [option])


@pytest.mark.parametrize("workspace", ["/a\nb", "/a\\b", f"/{NAME}"])
def test_a_folder_that_no_directive_can_name_is_refused(workspace):
    with pytest.raises(UsageError, match="set RUNNER_WORKSPACE"):
        render_script(job(workspace=workspace), ["runner"])


def test_a_time_has_one_of_the_forms_of_slurm():
    for time in ("", "90", "30:00", "02:00:00", "1-12", "1-12:30", "1-12:30:00"):
        validate_time(time)
    for time in ("2h", "1:2", "-1", "1-", "1\n", "$(x)"):
        with pytest.raises(UsageError, match="--time: "):
            validate_time(time)


def test_a_script_is_submitted_and_its_number_returned(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CALLED", str(tmp_path / "called"))
    put_programs(tmp_path, {"sbatch": 'echo "$@" > "$CALLED"; cat >> "$CALLED"; echo "4711;small"'})
    assert submit_script("#!/bin/bash\n") == "4711"
    assert (tmp_path / "called").read_text() == "--parsable\n#!/bin/bash\n"
    put_programs(tmp_path, {"sbatch": "echo sbatch: error: invalid partition >&2; exit 1"})
    with pytest.raises(RunnerError, match="Slurm refuses the job: sbatch: error: invalid partition"):
        submit_script("#!/bin/bash\n")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="print the script"):
        submit_script("#!/bin/bash\n")
