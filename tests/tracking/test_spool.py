import errno
import json
import logging
import math
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.system import faults
from runner.tracking.recorder import Recorder
from runner.tracking.spool import Spool, lines, offset_file, reached, unsent

names = st.text(max_size=8)
numbers = st.floats(allow_nan=False, allow_infinity=False)
json_records = st.fixed_dictionaries(
    {"t": st.integers(0, 2**63 - 1)},
    optional={
        "step": st.integers(0, 2**63 - 1),
        "metrics": st.dictionaries(names, numbers, max_size=4),
        "tags": st.dictionaries(names, st.text(), max_size=4),
        "status": st.sampled_from(["RUNNING", "FINISHED", "FAILED", "STOPPED", "KILLED"]),
    },
)

keys = st.text(max_size=4)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("t", "step", "metrics", "params", "tags", "artifact", "folder", "status")
WHOLE = {"t": 5, "step": 2, "metrics": {"loss": 0.5, "error": "inf"}}


def records(path, offset=0):
    return [line.model_dump(exclude_unset=True) for line, _ in lines(path, offset)]


@given(st.lists(json_records, max_size=12))
def test_what_is_appended_is_read_back(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("spool") / "spool.jsonl"
    spool = Spool(path)
    for record in written:
        spool.append(**record)
    assert records(path) == written
    spool.close()


@given(written=st.lists(json_records, min_size=1, max_size=6), cut=st.integers(min_value=0))
def test_a_torn_file_keeps_every_whole_line_and_can_be_continued(tmp_path_factory, written, cut):
    path = tmp_path_factory.mktemp("spool") / "spool.jsonl"
    spool = Spool(path)
    for record in written:
        spool.append(**record)
    spool.close()
    ends = [end for _, end in lines(path)]
    cut %= ends[-1] + 1
    os.truncate(path, cut)
    whole = written[: sum(end <= cut for end in ends)]
    assert records(path) == whole

    again = Spool(path)
    again.append(t=1)
    again.close()
    assert records(path) == [*whole, {"t": 1}]


def test_reading_continues_from_an_offset(tmp_path):
    spool = Spool(tmp_path / "spool.jsonl")
    spool.append(t=1)
    ((_, offset),) = lines(spool.path)
    spool.append(t=2)
    assert records(spool.path, offset) == [{"t": 2}]
    spool.close()


@pytest.mark.parametrize(
    "damaged",
    [b"\0\0\0\0", b'{"t":', b"\xff\xfe", b"3", b"[" * 100_000],
    ids=["zeros", "cut", "bytes", "number", "deep"],
)
def test_what_is_no_line_says_nothing_with_a_warning(damaged, tmp_path, caplog):
    path = tmp_path / "spool.jsonl"
    path.write_bytes(b'{"t":1}\n' + damaged + b'\n{"t":2}\n')
    assert records(path) == [{"t": 1}, {"t": 0}, {"t": 2}]
    assert caplog.text.count("damaged line") == 1


@pytest.mark.parametrize(
    ("place", "expected"), [("8", 8), ("", 0), ("x", 0), ("-1", 0), ("99", 0), ("5", 0), ("17", 17)]
)
def test_a_place_that_is_none_means_the_beginning(place, expected, tmp_path):
    path = tmp_path / "spool.jsonl"
    path.write_bytes(b'{"t":1}\n{"t":22}\n{"torn')
    offset_file(path).write_text(place)
    assert reached(path) == expected
    assert unsent(path) == 17 - expected


def test_threads_do_not_mix_their_lines(tmp_path):
    spool = Spool(tmp_path / "spool.jsonl")

    def append(thread):
        for number in range(200):
            spool.append(step=thread, t=number)

    threads = [threading.Thread(target=append, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spool.close()
    found = records(spool.path)
    for thread in range(4):
        assert [record["t"] for record in found if record["step"] == thread] == list(range(200))


def test_a_full_disk_loses_nothing_and_is_reported_once(tmp_path, monkeypatch, caplog):
    spool = Spool(tmp_path / "spool.jsonl")
    write = os.write
    spool.append(t=0)
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: write(file, data[:3]))
        spool.append(t=1)
        spool.append(t=2)
        assert records(spool.path) == [{"t": 0}]
        assert len(spool.held) == 2
    spool.sync()
    assert records(spool.path) == [{"t": 0}, {"t": 1}, {"t": 2}]
    spool.append(t=3)
    spool.close()
    assert [record["t"] for record in records(spool.path)] == [0, 1, 2, 3]
    assert [entry.levelno for entry in caplog.records] == [logging.WARNING]
    assert os.strerror(errno.ENOSPC) in caplog.text


def test_infinities_do_not_belong_in_json(tmp_path):
    spool = Spool(tmp_path / "spool.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        spool.append(t=float("inf"))
    spool.close()


def test_what_is_urgent_goes_before_what_is_held(tmp_path, monkeypatch):
    spool = Spool(tmp_path / "spool.jsonl")
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: write(file, data[:3]))
        spool.append(t=1)
    spool.append(t=9, status="KILLED", urgent=True)
    assert records(spool.path) == [{"t": 9, "status": "KILLED"}]
    assert spool.sync()
    assert records(spool.path) == [{"t": 9, "status": "KILLED"}, {"t": 1}]
    spool.close()


def test_a_disk_that_does_not_keep_is_told_from_one_that_does(tmp_path, monkeypatch, caplog):
    spool = Spool(tmp_path / "spool.jsonl")
    spool.append(t=1)
    with monkeypatch.context() as failing:
        failing.setattr(faults, "_armed", faults.parse("spool.sync=raise@1+"))
        assert not spool.sync()
    assert "its latest lines are lost if this machine stops now" in caplog.text
    assert spool.sync()
    spool.close()


@given(st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_whatever_a_line_says_the_next_one_is_read(tmp_path_factory, anything):
    spool = tmp_path_factory.mktemp("spool") / "spool.jsonl"
    spool.write_text(f"{json.dumps(anything)}\n{json.dumps(WHOLE)}\n")
    first, (line, end) = lines(spool)
    assert end == spool.stat().st_size > first[1]
    assert (line.t, line.step, line.metrics, line.status) == (5, 2, {"loss": 0.5, "error": math.inf}, None)
    recorder = Recorder(spool, cursor=0, step=1)
    recorder.log({"loss": 0.5}, 2)  # which is logged already
    assert recorder.spool.size == end
    recorder.spool.close()


def test_a_metric_that_differs_after_a_resume_names_what_may_be_the_cause(tmp_path, caplog):
    spool = tmp_path / "spool.jsonl"
    spool.write_text(f"{json.dumps(WHOLE)}\n")
    recorder = Recorder(spool, cursor=0, step=1)
    recorder.log({"loss": 0.6}, 2)
    recorder.spool.close()
    assert "state that no checkpoint contains" in caplog.text


@pytest.mark.parametrize(
    "line", ['{"t":1,"step":"x"}', '{"t":1,"metrics":[1]}', '{"step":1}', '{"t":1,"status":"DONE"}']
)
def test_a_damaged_line_says_nothing_with_a_warning(line, tmp_path, caplog):
    spool = tmp_path / "spool.jsonl"
    spool.write_text(line + "\n")
    ((found, _),) = lines(spool)
    assert (found.metrics, found.tags, found.status, found.artifact) == ({}, {}, None, None)
    assert "skipped the damaged line that ends at byte" in caplog.text


def test_what_is_not_there_has_no_lines(tmp_path):
    assert list(lines(tmp_path / "spool.jsonl")) == []


def test_what_a_run_says_of_itself_is_whole(tmp_path, caplog):
    spool = Spool(tmp_path / "spool.jsonl")
    spool.append(t=1, tags={"a": "b"}, status="KILLED")
    spool.append(t=2, artifact="recipe.yaml")
    spool.close()
    (end, _), (artifact, _) = lines(spool.path)
    assert (end.tags, end.status) == ({"a": "b"}, "KILLED")
    assert artifact.artifact == "recipe.yaml"
    assert caplog.text == ""


def test_a_line_that_another_thread_is_writing_is_not_one_that_the_disk_refuses(tmp_path, monkeypatch):
    spool = Spool(tmp_path / "spool.jsonl")
    spool.append(step=1)
    writing, going_on = threading.Event(), threading.Event()
    write, fsync = os.write, os.fsync
    other = threading.Thread(target=spool.append, kwargs={"step": 2})

    def slow(file, line):
        writing.set()
        assert going_on.wait(10)
        return write(file, line)

    def meanwhile(file):
        monkeypatch.setattr(os, "write", slow)
        other.start()
        assert writing.wait(10)
        fsync(file)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", meanwhile)
        assert spool.sync()
    going_on.set()
    other.join()
    assert [record["step"] for record in records(spool.path)] == [1, 2]
    assert spool.close()
