import errno
import fcntl
import os
import platform
import time

import psutil
import pytest
from run_folders import run_folder

from runner.system.errors import UsageError
from runner.system.processes import ATTEMPT, JOB, Owner, boot_id, machine_id
from runner.system.processes import _born as born
from runner.system.workspace_paths import LOCK_NAME
from runner.tracking import RunFolder, Workspace, recovery
from runner.tracking import workspace as workspace_module
from runner.tracking.periodic import Periodic
from runner.tracking.record import STALE_SECONDS
from runner.tracking.recovery import Delivery, deliver, reap
from runner.tracking.spool import Spool, unsent
from runner.tracking.store import STATUS, Store

ELSEWHERE = Owner(pid=1, host="elsewhere", boot_id="another")
REBOOTED = Owner(pid=1, host=platform.node(), boot_id="another", machine=machine_id())
NAMESAKE = Owner(pid=1, host=platform.node(), boot_id="another", machine="another")
HERE = Owner(pid=os.getpid(), host="renamed", boot_id=boot_id())


@pytest.fixture
def store(migrated_workspace):
    return Store(Workspace())


@pytest.fixture
def known_run(store):
    """Makes a run that MLflow knows."""

    def make(**changes):
        folder = run_folder(**changes)
        run_id = store.create_run(store.experiment("tests"), folder.name)
        folder.write(folder.record().model_copy(update={"run_id": run_id}))
        return folder, run_id

    return make


@pytest.mark.parametrize(
    ("owner_attempt", "own", "alive"),
    [
        (("slurm-7", "0"), ("slurm-7", "1"), False),
        (("slurm-7", "0"), ("slurm-7", "0"), None),
        (("slurm-7", "0"), ("slurm-8", "1"), None),
        (("", ""), ("", "1"), None),
        (("slurm-7", "pod-a"), ("slurm-7", ""), False),
    ],
)
def test_the_attempt_before_of_a_schedulers_task_is_dead(owner_attempt, own, alive, known_run, monkeypatch):
    monkeypatch.setenv(JOB, own[0])
    monkeypatch.setenv(ATTEMPT, own[1])
    owner = ELSEWHERE.model_copy(update={"job": owner_attempt[0], "attempt": owner_attempt[1]})
    assert owner.alive is alive
    folder, _ = known_run(owner=owner, heartbeat=time.time())
    (folder.path / LOCK_NAME).touch()
    if alive is False:
        assert folder.obstacle() == ""
        folder.claim()
        folder.release()
    else:
        with pytest.raises(UsageError, match="may be in use by process 1 on elsewhere"):
            folder.claim()


def said_before_its_end(folder, *records):
    spool = Spool(folder.spool)
    for record in records:
        spool.append(**{"t": 7000, **record})
    spool.close()


def test_a_dead_run_ends_with_its_last_heartbeat(store, known_run):
    folder, run_id = known_run(heartbeat=1_700_000_000.25)
    assert reap(Workspace()) == [folder.name]
    assert (folder.record().status, folder.record().reason) == ("KILLED", "its process died")
    info = store.client.get_run(run_id).info
    assert (info.status, info.end_time) == ("KILLED", 1_700_000_000_250)
    assert store.client.get_run(run_id).data.metrics == {"loss": 1.0}
    assert unsent(folder.spool) == 0
    assert reap(Workspace()) == []


@pytest.mark.parametrize(
    ("owner", "age", "dead"),
    [
        (ELSEWHERE, 0, False),
        (ELSEWHERE, STALE_SECONDS / 2, False),
        (ELSEWHERE, STALE_SECONDS + 1, False),  # a glance decides nothing by a clock
        (ELSEWHERE, -86_400, False),
        (NAMESAKE, 0, False),  # a machine of the same name
        (REBOOTED, 0, True),
        (REBOOTED, -86_400, True),  # its clock was wrong
        (HERE, 0, True),  # the lock, which this machine can tell, is free
    ],
    ids=["elsewhere", "lately", "stale", "future", "namesake", "rebooted", "wrong clock", "here"],
)
def test_whether_an_owner_is_alive_is_decided_without_a_clock(owner, age, dead, known_run):
    if owner is REBOOTED and not machine_id():
        pytest.skip("this machine has no id")
    folder, _ = known_run(owner=owner, heartbeat=time.time() - age)
    assert folder.alive() is not dead
    assert reap(Workspace()) == ([folder.name] if dead else [])
    assert folder.record().status == ("KILLED" if dead else "RUNNING")
    if not dead:
        (folder.path / LOCK_NAME).touch()
        blocked = f"process {owner.pid} on {owner.host} is training it"
        assert folder.resumable == (blocked if 0 <= age < STALE_SECONDS else "")
        assert folder.obstacle(takeover=True) == ""
        assert deliver(Workspace(), [folder]) == [Delivery(folder.name, alive=True)]


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "STOPPED", "PREEMPTED", "KILLED"])
def test_a_run_that_could_still_say_how_it_ended_is_believed(status, store, known_run):
    folder, run_id = known_run()
    said_before_its_end(folder, {"tags": {"error": "out of luck"}}, {"status": status})
    assert reap(Workspace()) == [folder.name]
    assert (folder.record().status, folder.record().reason) == (status, "out of luck" if status == "FAILED" else "")
    run = store.client.get_run(run_id)
    assert (run.data.tags[STATUS], run.info.end_time) == (status, 7000)


def test_what_a_run_said_before_it_was_resumed_is_over(known_run):
    folder, _ = known_run()
    said_before_its_end(folder, {"tags": {"error": "out of luck"}}, {"status": "FAILED"}, {"status": "RUNNING"})
    reap(Workspace())
    assert (folder.record().status, folder.record().reason) == ("KILLED", "its process died")


def test_a_disk_that_refuses_leaves_the_run_to_the_next_verb(known_run, monkeypatch, caplog):
    folder, _ = known_run()
    with monkeypatch.context() as full:

        def refuse(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        full.setattr(os, "write", refuse)
        assert reap(Workspace()) == []
    assert f"{folder.path}: its process is dead, which cannot be written there: No space left" in caplog.text
    assert folder.record().status == "RUNNING"
    assert reap(Workspace()) == [folder.name]


def test_mlflow_learns_later_if_it_is_away(known_run, monkeypatch, caplog, store):
    folder, run_id = known_run()
    with monkeypatch.context() as away:

        def refuse(*_):
            raise recovery.StorageError("away")

        away.setattr(Store, "__init__", refuse)
        assert reap(Workspace()) == [folder.name]
    assert "the end of 1 dead runs is not in MLflow yet: away" in caplog.text
    assert unsent(folder.spool)
    (delivery,) = deliver(Workspace(), [folder])
    assert delivery == Delivery(folder.name, sent_bytes=folder.spool.stat().st_size)
    assert store.client.get_run(run_id).info.status == "KILLED"


def test_a_run_whose_process_died_before_it_could_name_it_is_named(store, known_run):
    folder, run_id = known_run()
    store.rename_run(run_id, "beginning")
    reap(Workspace())
    assert store.client.get_run(run_id).info.run_name == folder.name


def test_a_name_that_somebody_has_given_a_run_since_stays(store, known_run):
    folder, run_id = known_run()
    reap(Workspace())
    store.rename_run(run_id, "mine")
    said_before_its_end(folder, {"tags": {"seen": "yes"}})
    (delivery,) = deliver(Workspace(), [folder])
    assert delivery.sent_bytes
    assert store.client.get_run(run_id).info.run_name == "mine"


def test_mlflow_lacks_nothing_of_a_run_that_it_never_knew(store):
    folder = run_folder()
    assert reap(Workspace()) == [folder.name]
    assert unsent(folder.spool) == 0


def test_any_number_of_processes_may_look_whether_a_run_is_alive(known_run):
    folder, _ = known_run()
    with open(folder.path / ".lock") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert not RunFolder(folder.path).alive()
    folder.claim()
    assert RunFolder(folder.path).alive()
    folder.release()


@pytest.fixture
def short_watch(monkeypatch):
    monkeypatch.setattr(workspace_module, "OBSERVED_SECONDS", 0.3)
    monkeypatch.setattr(workspace_module, "GLANCE_SECONDS", 0.1)


@pytest.mark.parametrize("age", [0, STALE_SECONDS - 5, -3600])
def test_a_run_that_may_live_elsewhere_is_taken_over_on_request_only(age, known_run, short_watch):
    folder, _ = known_run(owner=ELSEWHERE, heartbeat=time.time() - age)
    with pytest.raises(UsageError, match=r"may be in use by process 1 on elsewhere.*add --takeover"):
        folder.claim()
    folder.claim(takeover=True)
    assert folder.alive()  # this process has it now
    folder.release()


def test_a_run_of_a_machine_that_vanished_is_claimed_after_it_was_watched(known_run, short_watch, caplog):
    folder, _ = known_run(owner=ELSEWHERE, heartbeat=time.time() - 86_400)
    folder.claim()
    folder.release()
    assert "was last in use by process 1 on elsewhere; watching it" in caplog.text


def test_a_run_whose_machine_has_a_slow_clock_is_not_claimed(known_run, short_watch):
    folder, _ = known_run(owner=ELSEWHERE, heartbeat=time.time() - 86_400)
    beating = Periodic("beat", 0.05, lambda: beat(folder))
    try:
        with pytest.raises(UsageError, match="has just written to it"):
            folder.claim()
    finally:
        beating.stop()


def beat(folder):
    record = folder.record()
    folder.write(record.model_copy(update={"heartbeat": record.heartbeat + 5}))


def test_a_run_of_this_machine_is_never_taken_over_while_its_process_lives(known_run, short_watch):
    parent = psutil.Process(os.getpid()).parent()
    owner = Owner.this_process().model_copy(update={"pid": parent.pid, "born": born(parent.pid)})
    folder, _ = known_run(owner=owner, heartbeat=time.time() - 86_400)
    with pytest.raises(UsageError, match="is in use by process"):
        folder.confirm_abandoned(takeover=True)
