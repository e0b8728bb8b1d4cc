import os

import pytest
from mlflow.entities import ViewType
from run_folders import run_folder, seed_group

from runner.system.errors import StorageError, UsageError
from runner.system.processes import Owner
from runner.tracking import RunFolder, Workspace
from runner.tracking.listing import listing
from runner.tracking.store import Store
from runner.tracking.trash import empty, remove


@pytest.fixture
def store(migrated_workspace):
    return Store(Workspace())


@pytest.fixture
def finished(store):
    """A finished run that MLflow knows, and what is below it there."""

    def make(below=0, **changes):
        folder = run_folder(status="FINISHED", **changes)
        experiment = store.experiment("tests")
        run_id = store.create_run(experiment, folder.name)
        for number in range(below):
            child = store.create_run(experiment, f"{folder.name} {number}")
            store.client.set_tag(child, "mlflow.parentRunId", run_id)
        folder.write(folder.record().model_copy(update={"run_id": run_id}))
        return folder

    return make


def of_mlflow(store, view):
    experiment = store.client.get_experiment_by_name("tests").experiment_id
    return sorted(run.info.run_name for run in store.client.search_runs([experiment], run_view_type=view))


def test_a_run_goes_to_the_trash_with_all_that_it_has_and_mlflow_can_restore_it(store, finished):
    folder, other = finished(), finished()
    (removal,) = remove(Workspace(), [folder], purge=False)
    trashed = Workspace().root / "trash" / folder.name
    assert (removal.run, removal.trash, removal.mlflow) == (folder.name, str(trashed), "deleted in MLflow")
    assert (trashed / "spool.jsonl").exists()
    assert not folder.path.exists()
    assert [each["name"] for each in listing(Workspace())] == [other.name]
    assert of_mlflow(store, ViewType.ACTIVE_ONLY) == [other.name]
    store.client.restore_run(removal.run_ids[0])
    trashed.rename(folder.path)
    assert len(listing(Workspace())) == len(of_mlflow(store, ViewType.ACTIVE_ONLY)) == 2
    assert remove(Workspace(), [folder], purge=False)[0].trash == str(trashed)  # once more


def test_what_is_below_a_run_in_mlflow_is_deleted_with_it(store, finished):
    folder = finished(below=2, kind="ablation")
    (removal,) = remove(Workspace(), [folder], purge=False)
    assert len(removal.run_ids) == 3
    assert of_mlflow(store, ViewType.ACTIVE_ONLY) == []


def test_purged_is_gone_for_good_and_so_is_what_was_in_the_trash(finished):
    first, second, third = finished(), finished(), finished()
    assert remove(Workspace(), [first], purge=True)[0].trash is None
    remove(Workspace(), [second, third], purge=False)
    assert not (Workspace().root / "trash" / first.name).exists()
    assert empty(Workspace()) == sorted([second.name, third.name])
    assert list((Workspace().root / "trash").iterdir()) == []
    assert empty(Workspace()) == []


def test_a_run_that_is_trained_or_measured_stays_and_so_do_those_beside_it(store, finished):
    free, trained = finished(), run_folder()
    trained.claim()
    with pytest.raises(UsageError, match=f"run {trained.name} is in use: process .* is training it"):
        remove(Workspace(), [free, RunFolder(trained.path)], purge=True)
    trained.release()
    measuring = run_folder(kind="ablation")
    with pytest.raises(UsageError, match=f"{measuring.name} is in use: process .* is measuring"):
        remove(Workspace(), [free, measuring], purge=True)
    assert free.path.exists()
    assert free.name in of_mlflow(store, ViewType.ACTIVE_ONLY)
    gone = Owner.this_process().model_copy(update={"born": 1.0})
    measuring.write(measuring.record().model_copy(update={"owner": gone}))
    assert remove(Workspace(), [measuring], purge=False)[0].mlflow == "MLflow lists it no more"


def test_a_study_is_refused_with_what_forgets_it(finished):
    study = finished(kind="study")
    with pytest.raises(UsageError, match=r"is a study: 'runner study run FILE --fresh' forgets its trials"):
        remove(Workspace(), [study], purge=False)
    assert study.path.exists()


def test_what_becomes_of_a_run_that_another_store_has_or_nobody_can_read_is_said(finished):
    elsewhere, damaged = finished(tracking_uri="http://elsewhere:5000"), finished()
    (damaged.path / "run.json").write_text("{")
    removals = remove(Workspace(), [elsewhere, damaged], purge=False)
    assert (
        removals[0].mlflow == "it stays in http://elsewhere:5000; name that in MLFLOW_TRACKING_URI to delete it there"
    )
    assert removals[1].mlflow == "unchanged in MLflow, because its run.json cannot be read"


def test_a_store_that_does_not_answer_leaves_the_run_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/missing/folder/x.db")
    (tmp_path / "missing").write_text("")
    folder = run_folder(status="FINISHED")
    with pytest.raises(StorageError):
        remove(Workspace(), [folder], purge=True)
    assert folder.path.exists()


def test_a_group_of_seeds_goes_with_its_runs_unless_one_is_trained(migrated_workspace):
    group, runs = seed_group(10, 14)
    other = run_folder()
    runs[0].claim()
    with pytest.raises(UsageError, match=f"run {runs[0].name} is in use"):
        remove(Workspace(), [RunFolder(group.path)], purge=False)
    runs[0].release()
    at_it, _ = seed_group(10, 14, status="RUNNING")
    with pytest.raises(UsageError, match=f"{at_it.name} is in use: process .* is training them"):
        remove(Workspace(), [at_it, group], purge=False)
    assert len(listing(Workspace())) == 7
    removals = remove(Workspace(), [group, runs[1]], purge=False)
    assert {each.run for each in removals} == {group.name, *(run.name for run in runs)}
    assert {each["name"] for each in listing(Workspace()) if each["group"] != at_it.name} == {at_it.name, other.name}


@pytest.mark.parametrize("kind", ["file", "link to a file", "link to a folder", "dangling link", "pipe", "folder"])
def test_whatever_is_in_the_trash_is_deleted_and_nothing_else(tmp_path, kind):
    target = tmp_path / "target"
    (target / "inner").mkdir(parents=True)
    (target / "file").write_text("mine")
    item = Workspace().root / "trash" / ".item"
    item.parent.mkdir(parents=True)
    if kind == "file":
        item.write_text("x")
    elif kind == "folder":
        item.mkdir()
        (item / "link").symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(item)
    else:
        item.symlink_to({"link to a file": target / "file", "dangling link": target / "no"}.get(kind, target))
    assert empty(Workspace()) == [".item"]
    assert not os.path.lexists(item)
    assert (target / "file").read_text() == "mine"


def test_a_trash_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "home" / "folder").mkdir(parents=True)
    Workspace().root.mkdir()
    (Workspace().root / "trash").symlink_to(tmp_path / "home")
    with pytest.raises(StorageError, match="trash is a symbolic link, which is not followed"):
        empty(Workspace())
    folder = run_folder(status="FINISHED", tracking_uri="http://elsewhere:5000")
    with pytest.raises(StorageError, match="is a symbolic link, which is not followed"):
        remove(Workspace(), [folder], purge=True)
    assert folder.path.exists()
    assert (tmp_path / "home" / "folder").exists()
