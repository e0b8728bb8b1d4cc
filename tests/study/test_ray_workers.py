"""Workers of a study on a Ray cluster, whose place other processes take; ``experiments/scale`` has a real one."""

import json
import signal
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from children import running
from hypothesis import given
from hypothesis import strategies as st
from searching import ATTEMPTS, search, trials_of, write_study
from typer.testing import CliRunner

from runner.cli import app
from runner.plugin.registry import Registry
from runner.study.definition import load_study
from runner.study.leases import Leases
from runner.study.ray_workers import Resources, _count_slots, _show
from runner.study.store import StudyStore
from runner.system.errors import ExitCode
from runner.tracking import Workspace

CLUSTER = Path(__file__).parent / "cluster"
SMALL = {"budget": {"trials": 3}, "sampler": {"kind": "random"}, "pruner": {"kind": "off"}}


def search_on_ray(folder, path, *arguments, nodes=({"CPU": 2.0},), **facts):
    cluster = json.dumps({"nodes": nodes, **facts})
    return search(folder, path, "--on", "ray", *arguments, PYTHONPATH=str(CLUSTER), FAKE_RAY=cluster)


def counts_of_ends():
    return [sum(each.get("cause") == "done" for each in trial.user_attrs[ATTEMPTS]) for trial in trials_of()]


def shown(path):
    """The numbers of finished trials that one look at a study displays."""
    display = Mock()
    _show(load_study(str(path), [], Registry()), Workspace(), display)
    return [call.args[0] for call in display.standing.call_args_list]


@pytest.mark.long
def test_every_slot_has_a_worker_and_every_trial_counts_once(tmp_path, migrated_workspace):
    path = write_study(tmp_path, **SMALL)
    assert shown(path) == []
    child = search_on_ray(tmp_path, path)
    assert child.wait() == 0, child.stderr
    assert "2 workers on 1 node of a Ray cluster, 1 CPU each; their logs are in " in child.stderr
    assert counts_of_ends() == [1] * 3
    logs = sorted((migrated_workspace / "ray").iterdir())
    assert [log.name for log in logs] == ["tiny-0.log", "tiny-1.log"]
    for log in logs:
        lines = log.read_text().splitlines()
        assert "a worker starts on " in lines[0]
        assert lines[-1].endswith(" the worker ended")
    assert shown(path) == [3]


@pytest.mark.long
def test_a_signal_ends_all_workers_and_the_same_command_goes_on(tmp_path, migrated_workspace):
    path = write_study(tmp_path, **SMALL)
    with running(search_on_ray(tmp_path, path)) as child:
        store = StudyStore.open(Workspace())
        leases = Leases(store.engine, "tiny")
        while sum(lease.trial >= 0 for lease in leases.all()) < 2:
            assert child.running, child.stderr
            time.sleep(0.05)
        child.send(signal.SIGTERM)
        assert child.wait() == 128 + signal.SIGTERM
    assert leases.all() == []
    store.engine.dispose()
    texts = [log.read_text() for log in (migrated_workspace / "ray").iterdir()]
    assert all("the worker was stopped" in text for text in texts), (texts, child.stderr)
    assert search_on_ray(tmp_path, path).wait() == 0
    assert counts_of_ends() == [1] * 3


def test_a_worker_that_crashes_is_reported_once(tmp_path, migrated_workspace):
    child = search_on_ray(tmp_path, write_study(tmp_path, **SMALL), crashes=True)
    assert child.wait() == ExitCode.FAILED
    assert child.stderr.count("The worker died unexpectedly.") == 1
    assert "2 of 2 workers failed; their messages are above" in child.stderr
    assert "Traceback" not in child.stderr


@pytest.mark.parametrize(
    ("arguments", "nodes", "words"),
    [
        (("--cpus", "4"), [{"CPU": 2.0}, {"CPU": 3.0}], "no node of the Ray cluster has 4 CPUs; set --cpus and --gpus"),
        (("--gpus", "1"), [{"CPU": 8.0}], "no node of the Ray cluster has 1 CPU and 1 GPU; set"),
        ((), [{"CPU": 1.0}, {"CPU": 1.0}], "OPTUNA_STORAGE names no server, and 2 workers share one storage"),
    ],
)
def test_a_cluster_that_cannot_search_is_refused(arguments, nodes, words, tmp_path, migrated_workspace):
    child = search_on_ray(tmp_path, write_study(tmp_path, **SMALL), *arguments, nodes=nodes)
    assert child.wait() == ExitCode.USAGE
    assert words in " ".join(child.stderr.split())
    assert not (migrated_workspace / "ray").exists()


def test_without_a_cluster_the_command_says_how_to_start_one(tmp_path, migrated_workspace):
    path = write_study(tmp_path, **SMALL)
    child = search(tmp_path, path, "--on", "ray", PYTHONPATH=str(CLUSTER), RAY_ADDRESS="10.0.0.1:6379")
    assert child.wait() == ExitCode.USAGE
    words = " ".join(child.stderr.split())
    assert "no Ray cluster answers at 10.0.0.1:6379: Could not find any running Ray instance" in words
    assert "start one with: ray start --head, or name it in RAY_ADDRESS" in words


def test_without_ray_the_command_says_how_to_install_it(tmp_path, migrated_workspace, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    result = CliRunner().invoke(app, ["study", "run", str(write_study(tmp_path, **SMALL)), "--on", "ray"])
    assert "--on ray needs Ray: pip install 'proven-runner[ray]'" in str(result.exception)


@pytest.mark.parametrize("option", [("--cpus", "2"), ("--gpus", "0")])
def test_resources_are_for_a_cluster(option, tmp_path):
    result = CliRunner().invoke(app, ["study", "run", str(write_study(tmp_path)), *option])
    assert "add --on ray" in str(result.exception)


@given(
    st.integers(0, 64), st.integers(0, 8), st.integers(1, 16), st.integers(0, 4), st.sampled_from([{}, {"memory": 1e9}])
)
def test_a_node_has_room_for_as_many_workers_as_fit_and_no_more(cpus, gpus, cpus_each, gpus_each, others):
    count = _count_slots({"CPU": float(cpus), "GPU": float(gpus), **others}, Resources(cpus_each, gpus_each))
    assert count * cpus_each <= cpus
    assert count * gpus_each <= gpus
    has_more_cpus = (count + 1) * cpus_each <= cpus
    has_more_gpus = (count + 1) * gpus_each <= gpus
    assert not (has_more_cpus and has_more_gpus)
