"""Does Slurm preempt, requeue and resume runs that `runner submit` has submitted?

Starts a Slurm of one node in a temporary folder, which needs root and Debian's packages slurmctld, slurmd, slurm-client
and munge. An array of trainings is preempted by a job of a partition with a higher priority. Writes slurm.json and
README.md beside this file.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
TASKS = 2
SETTINGS = [
    *("device=cpu", "model.widths=[8]", "tracking.system_metrics=false"),
    "train={epochs: 60, batch_size: 64, log_every: 5, evaluate_every: 20, checkpoint_every: 2}",
]
LIMIT_SECONDS = 1200
CONFIGURATION = """\
ClusterName=small
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort=17817
SlurmdPort=17818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=5,bf_interval=5
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={tasks} State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=90
PartitionName=high Nodes={host} PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """Daemons of one node, which end with the ``with``."""

    def __init__(self, folder):
        self.folder = folder
        self.daemons = []

    def __enter__(self):
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        host = socket.gethostname().partition(".")[0]
        configuration = self.folder / "slurm.conf"
        configuration.write_text(CONFIGURATION.format(folder=self.folder, host=host, tasks=TASKS))
        os.environ["SLURM_CONF"] = str(configuration)
        self.start(
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket"),
            *(f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/munged.seed"),
            *(f"--log-file={self.folder}/munged.log", "--num-threads=2"),
        )
        self.wait(lambda: Path(self.folder, "munge.socket").exists())
        self.start("slurmctld", "-D", "-f", str(configuration))
        self.start("slurmd", "-D", "-f", str(configuration), "-N", host)
        try:
            self.wait(lambda: "idle" in output("sinfo", "--noheader", "--format=%t", "--partition=low"))
        except RuntimeError:
            self.__exit__()
            for log in self.folder.glob("*.log"):
                print(log.name, log.read_text()[-3000:], sep="\n", file=sys.stderr)
            raise
        return self

    def start(self, *command):
        environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        program = shutil.which(command[0], path=environment["PATH"])
        if program is None:
            sys.exit(f"{command[0]} is missing: apt-get install slurmctld slurmd slurm-client munge")
        with Path(self.folder, f"{command[0]}.out").open("w") as log:
            self.daemons.append(subprocess.Popen([program, *command[1:]], stdout=log, stderr=log, env=environment))

    def wait(self, is_reached, seconds=90):
        deadline = time.monotonic() + seconds
        while not is_reached():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not reached after {seconds} s")
            time.sleep(0.5)

    def __exit__(self, *_):
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()


def output(*command):
    """Returns what a command prints; empty if it fails."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def runner(*words):
    """Runs a command of the runner, and returns its output."""
    done = subprocess.run([sys.executable, "-m", "runner", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"runner {' '.join(words)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def records(workspace):
    """Returns the records of all runs."""
    return [json.loads(path.read_text()) for path in sorted(workspace.glob("runs/*/run.json"))]


def state(job):
    """Returns the states of a job's tasks, by number; tasks that have ended are missing after some minutes."""
    lines = output("squeue", "--noheader", "--array", f"--jobs={job}", "--states=all", "--format=%K %T").splitlines()
    return {int(line.split()[0]): line.split()[1] for line in lines if line.split()[0].isdigit()}


def restarts(job, task):
    """Returns how often a task was requeued."""
    fields = output("scontrol", "show", "job", f"{job}_{task}").split()
    return next((int(field.partition("=")[2]) for field in fields if field.startswith("Restarts=")), None)


def runs_with_checkpoints(workspace):
    """Returns the folders of runs that have a checkpoint."""
    return {path.parents[2] for path in workspace.glob("runs/*/checkpoints/step-*/manifest.json")}


def preempted_array(slurm, workspace):
    """Submits an array, preempts it, and returns what happened to its tasks."""
    reply = runner("submit", "digits_classifier", *SETTINGS, "--seeds", str(TASKS), "--cpus", "1", "--json")
    job = json.loads(reply)["job"]
    slurm.wait(lambda: len(runs_with_checkpoints(workspace)) == TASKS, LIMIT_SECONDS)
    urgent = ["sbatch", "--parsable", "--partition=high", f"--ntasks={TASKS}", "--output=/dev/null"]
    output(*urgent, "--wrap=sleep 5")
    slurm.wait(lambda: all(record["status"] == "PREEMPTED" for record in records(workspace)), 180)
    steps = [record["step"] for record in records(workspace)]
    slurm.wait(lambda: all(record["status"] == "FINISHED" for record in records(workspace)), LIMIT_SECONDS)
    slurm.wait(lambda: set(state(job).values()) <= {"COMPLETED"}, 180)
    texts = [path.read_text() for path in sorted(workspace.glob("slurm/*.out"))]
    return {
        "stopped_at_epochs": steps,
        "exit_codes_75": sum(text.count("Exited with exit code 75") for text in texts),
        "requeued": [restarts(job, task) for task in range(TASKS)],
        "states": [state(job).get(task) for task in range(TASKS)],
        "runs": [record["status"] for record in records(workspace)],
    }


def cancelled_task(slurm, workspace):
    """Cancels a task after its first checkpoint, and returns its state afterwards."""
    before = runs_with_checkpoints(workspace)
    settings = [*SETTINGS[:-1], "train.epochs=100000", "train.checkpoint_every=2"]
    job = json.loads(runner("submit", "digits_classifier", *settings, "--cpus", "1", "--json"))["job"]
    slurm.wait(lambda: runs_with_checkpoints(workspace) - before, LIMIT_SECONDS)
    subprocess.run(["scancel", job], check=True)

    def job_state():
        return output("squeue", "--noheader", f"--jobs={job}", "--states=all", "--format=%T").strip()

    slurm.wait(lambda: job_state() not in ("RUNNING", "COMPLETING"), 180)
    # A task that was requeued would be pending now.
    time.sleep(20)
    return job_state()


def metrics_by_seed(workspace):
    """Returns the training and evaluation metrics of all finished runs, by seed."""
    return {
        record["overrides"].get("seed", "0"): {
            name: value for name, value in record["metrics"].items() if name.startswith(("train/", "eval/"))
        }
        for record in records(workspace)
        if record["status"] == "FINISHED"
    }


def uninterrupted(workspace):
    """Trains the seeds without a scheduler, and returns their metrics."""
    os.environ["RUNNER_WORKSPACE"] = str(workspace)
    for seed in range(TASKS):
        runner("run", "digits_classifier", *SETTINGS, "train.preemptible=true", f"seed={seed}", "--quiet")
    return metrics_by_seed(workspace)


def page(result):
    """Returns the text of the page."""
    epochs = " and ".join(map(str, result["stopped_at_epochs"]))
    requeued = ", ".join(map(str, result["requeued"]))
    states = ", ".join(result["states"])
    runs = ", ".join(result["runs"])
    return f"""# Runs that Slurm preempts

    python experiments/scale/slurm.py

A Slurm of one node is started in a temporary folder (Debian's slurmctld, slurmd and munge, as root): two cores, no
accounting, and two partitions, of which one preempts the other by requeueing, with 90 s of grace.
`runner submit digits_classifier --seeds {TASKS}` submits an array; the name of its workspace has spaces, quotes and a
percent sign. When all tasks have a checkpoint, a job of the other partition needs both cores. A second job is
cancelled with `scancel`.

## Result

With {result["slurm"]}, {result["exit_codes_75"]} of {TASKS} tasks ended with exit code 75, after {epochs} of 60 epochs.
All were requeued ({requeued} times) and resumed: their states in Slurm are {states}, and their runs {runs}.
Of {result["metrics"]} final metrics (training and evaluation), {result["different"]} differ from those of the same
seeds trained without Slurm. The cancelled task is {result["cancelled"]}, and was not requeued.
"""


def main():
    """Writes slurm.json and the page."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = Path(name)
        workspace = folder / 'sub\'mit "100%" $(x)'
        os.environ["RUNNER_WORKSPACE"] = str(workspace)
        os.chdir(folder)
        with Slurm(folder) as slurm:
            result = preempted_array(slurm, workspace)
            result["cancelled"] = cancelled_task(slurm, workspace)
            result["slurm"] = output("sbatch", "--version").strip()
        submitted = metrics_by_seed(workspace)
        reference = uninterrupted(folder / "plain")
        os.chdir(HERE)
    pairs = [(submitted[seed].get(metric), value) for seed in reference for metric, value in reference[seed].items()]
    result["metrics"] = len(pairs)
    result["different"] = sum(first != second for first, second in pairs)
    (HERE / "slurm.json").write_text(json.dumps(result, indent=2) + "\n")
    (HERE / "README.md").write_text(page(result))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
