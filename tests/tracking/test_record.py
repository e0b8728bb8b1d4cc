"""Records that a failing disk or somebody else has changed: each costs one warning, and no listing."""

import io
import json
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from run_folders import run_folder

from runner.tracking import RunFolder, Workspace
from runner.tracking.listing import listing, show
from runner.tracking.record import Record
from runner.tracking.recovery import reap

HOSTILE_NAMES = (
    "a/b", "../../x", "", ".", "..", "\x1b]0;x\x07", "a\0b", "a\nb", " ", "-" * 300, "a" * 129, "é", "a b", "/etc",
    "name\u202e", "%2e%2e", "~", "$(x)", "a\\b", "C:x", ".hidden", "_x", "x\n",
)  # fmt: skip
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from([10**400, -(10**30), 2**64, 1e308, -1e308, "nan", "inf"]),
    st.floats(), st.text(max_size=20), st.sampled_from(HOSTILE_NAMES), st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.one_of(st.text(max_size=5), st.floats()), max_size=3),
    st.just({"pid": -1, "host": "x", "boot_id": "x"}), st.just({"pid": 2**70, "host": "x", "boot_id": "x"}),
)  # fmt: skip


def printed():
    """What ``ls`` shows of the workspace."""
    console = Console(file=io.StringIO(), width=200)
    reap(Workspace())
    show(listing(Workspace()), "", console)
    return console.file.getvalue()


@pytest.fixture
def two_runs():
    """Two runs of another store, which is not asked."""
    return [run_folder(status="FINISHED", tracking_uri="http://elsewhere:5000") for _ in range(2)]


def changed(folder, **values):
    path = folder.path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("name", HOSTILE_NAMES)
@pytest.mark.parametrize("has_spool", [True, False])
def test_a_name_that_is_no_name_costs_one_warning(name, has_spool, caplog):
    bad, good = run_folder(status="FINISHED"), run_folder(status="FINISHED")
    changed(bad, name=name, status="RUNNING")
    changed_owner = json.loads((bad.path / "run.json").read_text())["owner"] | {"pid": 999_999}
    changed(bad, owner=changed_owner)
    if not has_spool:
        bad.spool.unlink()
    before = sorted(path.name for path in Workspace().runs.iterdir())
    with caplog.at_level(logging.WARNING):
        text = printed()
    assert good.name in text
    assert bad.name in text
    assert sum("is not a record of a run: name" in record.getMessage() for record in caplog.records) == 1
    assert sorted(path.name for path in Workspace().runs.iterdir()) == before


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(field=st.sampled_from(sorted(Record.model_fields)), value=VALUES)
def test_no_value_of_a_record_stops_a_listing(two_runs, field, value):
    bad, good = two_runs
    path = bad.path / "run.json"
    before = path.read_text()
    changed(bad, **{field: value})
    assert good.name in printed()
    path.write_text(before)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"1" * 5_000_000, None])
def test_a_record_that_is_none_is_reported(content, caplog):
    bad, good = run_folder(status="FINISHED"), run_folder(status="FINISHED")
    path = bad.path / "run.json"
    path.unlink()
    if content is None:
        path.symlink_to(good.path / "run.json")
    else:
        path.write_bytes(content)
    assert good.name in printed()
    assert bad.record() is None
    assert len([record for record in caplog.records if str(bad.path) in record.getMessage()]) == 1


def test_a_record_names_no_other_folder(caplog):
    first, second = run_folder(status="FINISHED"), run_folder(status="FINISHED")
    first.spool.unlink()
    changed(first, name=second.name, status="RUNNING")
    owner = json.loads((first.path / "run.json").read_text())["owner"] | {"pid": 999_999}
    changed(first, owner=owner)
    assert second.name in printed()
    assert first.path.exists()
    assert "which exists" in caplog.text


@pytest.mark.parametrize("link", ["run", "runs"])
def test_a_linked_folder_of_runs_is_reported_and_not_followed(tmp_path, link, caplog):
    folder = run_folder(status="FINISHED")
    path = folder.path if link == "run" else folder.path.parent
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert folder.name not in printed()
    assert f"{path} is a symbolic link, which is not followed" in caplog.text
    assert "RUNNER_WORKSPACE" in caplog.text


def test_the_spool_of_a_dead_run_is_not_written_through_a_link(tmp_path, caplog):
    folder = run_folder()
    owner = json.loads((folder.path / "run.json").read_text())["owner"] | {"pid": 999_999}
    changed(folder, owner=owner)
    notes = tmp_path / "notes.txt"
    notes.write_text("line one\nline two without an end")
    folder.spool.unlink()
    folder.spool.symlink_to(notes)
    assert folder.name in printed()
    assert notes.read_text() == "line one\nline two without an end"
    assert "is a symbolic link, which is not followed" in caplog.text
    assert RunFolder(folder.path).record().status == "RUNNING"
