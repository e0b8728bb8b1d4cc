import errno
import logging
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.system import faults
from runner.tracking.spool import Spool, place_of, reached, read, unsent

json_records = st.dictionaries(
    st.text(max_size=8),
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    max_size=4,
)


def records(path, offset=0):
    return [record for record, _ in read(path, offset)]


@given(st.lists(json_records, max_size=12))
def test_what_is_appended_is_read_back(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("spool") / "spool.jsonl"
    spool = Spool(path)
    for record in written:
        spool.append(record)
    assert records(path) == written
    spool.close()


@given(written=st.lists(json_records, min_size=1, max_size=6), cut=st.integers(min_value=0))
def test_a_torn_file_keeps_every_whole_line_and_can_be_continued(tmp_path_factory, written, cut):
    path = tmp_path_factory.mktemp("spool") / "spool.jsonl"
    spool = Spool(path)
    for record in written:
        spool.append(record)
    spool.close()
    ends = [end for _, end in read(path)]
    cut %= ends[-1] + 1
    os.truncate(path, cut)
    whole = written[: sum(end <= cut for end in ends)]
    assert records(path) == whole

    again = Spool(path)
    again.append({"after": 1})
    again.close()
    assert records(path) == [*whole, {"after": 1}]


def test_reading_continues_from_an_offset(tmp_path):
    spool = Spool(tmp_path / "spool.jsonl")
    spool.append({"n": 1})
    ((_, offset),) = read(spool.path)
    spool.append({"n": 2})
    assert records(spool.path, offset) == [{"n": 2}]
    spool.close()


@pytest.mark.parametrize(
    "damaged",
    [b"\0\0\0\0", b'{"n":', b"\xff\xfe", b"3", b"[" * 100_000],
    ids=["zeros", "cut", "bytes", "number", "deep"],
)
def test_a_damaged_line_is_empty_with_a_warning(damaged, tmp_path, caplog):
    path = tmp_path / "spool.jsonl"
    path.write_bytes(b'{"n":1}\n' + damaged + b'\n{"n":2}\n')
    assert records(path) == [{"n": 1}, {}, {"n": 2}]
    assert caplog.text.count("damaged line") == 1


@pytest.mark.parametrize(
    ("place", "expected"), [("8", 8), ("", 0), ("x", 0), ("-1", 0), ("99", 0), ("5", 0), ("17", 17)]
)
def test_a_place_that_is_none_means_the_beginning(place, expected, tmp_path):
    path = tmp_path / "spool.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":22}\n{"torn')
    place_of(path).write_text(place)
    assert reached(path) == expected
    assert unsent(path) == 17 - expected


def test_threads_do_not_mix_their_lines(tmp_path):
    spool = Spool(tmp_path / "spool.jsonl")

    def append(thread):
        for number in range(200):
            spool.append({"thread": thread, "n": number})

    threads = [threading.Thread(target=append, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spool.close()
    found = records(spool.path)
    for thread in range(4):
        assert [record["n"] for record in found if record["thread"] == thread] == list(range(200))


def test_a_full_disk_loses_nothing_and_is_reported_once(tmp_path, monkeypatch, caplog):
    spool = Spool(tmp_path / "spool.jsonl")
    write = os.write
    spool.append({"n": 0})
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: write(file, data[:3]))
        spool.append({"n": 1})
        spool.append({"n": 2})
        assert records(spool.path) == [{"n": 0}]
        assert spool.held == 2
    spool.sync()
    assert records(spool.path) == [{"n": 0}, {"n": 1}, {"n": 2}]
    spool.append({"n": 3})
    spool.close()
    assert [record["n"] for record in records(spool.path)] == [0, 1, 2, 3]
    assert [entry.levelno for entry in caplog.records] == [logging.WARNING]
    assert os.strerror(errno.ENOSPC) in caplog.text


def test_infinities_do_not_belong_in_json(tmp_path):
    spool = Spool(tmp_path / "spool.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        spool.append({"n": float("inf")})
    spool.close()


def test_what_is_urgent_goes_before_what_is_held(tmp_path, monkeypatch):
    spool = Spool(tmp_path / "spool.jsonl")
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: write(file, data[:3]))
        spool.append({"n": 1})
    spool.append({"end": True}, urgent=True)
    assert records(spool.path) == [{"end": True}]
    assert spool.sync()
    assert records(spool.path) == [{"end": True}, {"n": 1}]
    spool.close()


def test_a_disk_that_does_not_keep_is_told_from_one_that_does(tmp_path, monkeypatch, caplog):
    spool = Spool(tmp_path / "spool.jsonl")
    spool.append({"n": 1})
    with monkeypatch.context() as failing:
        failing.setattr(faults, "_armed", faults.parse("spool.sync=raise@1+"))
        assert not spool.sync()
    assert "its latest lines are lost if this machine stops now" in caplog.text
    assert spool.sync()
    spool.close()
