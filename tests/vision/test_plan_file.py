"""The file of plans: complete after crashes, shared by processes, never taken from another machine."""

import json
import os
from pathlib import Path

import pytest
from fork_server import CONTEXT, begin
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from runner.plugins.vision.convolution.plan_file import MOST_PLANS, FilePlans, machine_digest
from runner.system.errors import UsageError
from runner.system.stored_json import sealed, split_sealed

MACHINE = {"cpu": "one", "threads": 2, "torch": "2.13.0", "device": "cpu"}
PLAN = {"forward": "im2col"}


def kept(folder, machine=MACHINE):
    return FilePlans(folder, machine)


def test_another_process_finds_what_one_has_kept(tmp_path):
    first = kept(tmp_path / "new" / "folder")
    first.put("key", PLAN)
    assert kept(first.path.parent).get("key") == PLAN
    values, is_intact = split_sealed(first.path)
    assert is_intact
    assert (values["machine"], values["plans"]) == (MACHINE, {"key": PLAN})


def test_the_file_is_bounded_and_forgets_what_was_not_used(tmp_path):
    plans = kept(tmp_path)
    many = {str(number): PLAN for number in range(MOST_PLANS)}
    plans.path.write_text(sealed({"version": 1, "machine": MACHINE, "plans": many}))
    plans = kept(tmp_path)
    assert plans.get("0") == PLAN
    plans.put("new", PLAN)
    names = list(split_sealed(plans.path)[0]["plans"])
    assert len(names) == MOST_PLANS
    assert names[-2:] == ["0", "new"]
    assert "1" not in names


def broken_files(path, text):
    """Contents that are no file of this machine, by what is wrong."""
    line, _, digest = text.partition("\n")
    values = json.loads(line)
    return {
        "empty": "",
        "half": text[: len(text) // 2],
        "no checksum": line,
        "another checksum": f"{line}\n{'0' * 64}\n",
        "changed": text.replace("im2col", "native"),
        "no JSON": "x" * 100,
        "a list": f"[]\n{digest}",
        "another machine": sealed(values | {"machine": MACHINE | {"threads": 3}}),
        "no machine": sealed({"version": 1, "plans": values["plans"]}),
        "another version": sealed(values | {"version": 2}),
        "no plans": sealed(values | {"plans": [1]}),
        "not UTF-8": None,
        "deep": "[" * 100_000,
    }


@pytest.mark.parametrize("what", list(broken_files("", sealed({"plans": {}}))))
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning_and_replaced(what, tmp_path, caplog):
    first = kept(tmp_path)
    first.put("key", PLAN)
    content = broken_files(first.path, first.path.read_text())[what]
    if content is None:
        first.path.write_bytes(b"\xff\xfe\x00")
    else:
        first.path.write_text(content)
    caplog.clear()
    second = kept(tmp_path)
    assert second.get("key") is None
    second.put("other", PLAN)
    (record,) = caplog.records
    assert str(first.path) in record.getMessage()
    assert "is ignored, because" in record.getMessage()
    assert kept(tmp_path).items() == {"other": PLAN}
    assert len(caplog.records) == 1


@profile(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.sampled_from(["cut", "flip"]))
def test_a_file_that_is_cut_or_flipped_anywhere_yields_no_other_plan(tmp_path, where, change):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    first = kept(folder)
    first.put("key", PLAN)
    content = first.path.read_bytes()
    place = where % len(content)
    changed = bytes([content[place] ^ 1])
    first.path.write_bytes(content[:place] + (changed + content[place + 1 :] if change == "flip" else b""))
    assert kept(folder).items() in ({}, {"key": PLAN})


@pytest.mark.parametrize("name", MACHINE)
def test_the_file_of_another_machine_has_another_name(name, tmp_path):
    first = kept(tmp_path)
    first.put("key", PLAN)
    other = MACHINE | {name: "another"}
    assert machine_digest(other) != machine_digest(MACHINE)
    assert kept(tmp_path, other).get("key") is None


def test_the_file_can_be_copied_to_an_identical_machine(tmp_path):
    first = kept(tmp_path / "here")
    first.put("key", PLAN)
    target = tmp_path / "there" / first.path.name
    target.parent.mkdir()
    target.write_bytes(first.path.read_bytes())
    assert kept(target.parent).get("key") == PLAN


def add_plans(folder, number):
    plans = kept(Path(folder))
    for count in range(5):
        plans.put(f"{number}-{count}", PLAN)


def test_eight_processes_at_once_leave_one_valid_file(tmp_path):
    begin()
    processes = [CONTEXT.Process(target=add_plans, args=(str(tmp_path), number)) for number in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    (path,) = tmp_path.glob("*.json")
    values, is_intact = split_sealed(path)
    assert is_intact
    assert set(values["plans"]) == {f"{number}-{count}" for number in range(8) for count in range(5)}
    assert {name.name for name in tmp_path.iterdir()} <= {path.name, f"{path.name}.lock"}


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UsageError, match=r"plan_cache: .*Not a directory; set optimization\.plan_cache\.folder"
    ) as refusal:
        kept(tmp_path / "file" / "folder")
    assert "\n" not in str(refusal.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="Permission denied"):
        kept(tmp_path / "folder")


def test_a_disk_that_takes_no_plan_costs_one_warning(tmp_path, caplog, monkeypatch):
    plans = kept(tmp_path)

    def refuse(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runner.plugins.vision.convolution.plan_file.replacing", refuse)
    for key in ("a", "b"):
        plans.put(key, PLAN)
    (record,) = caplog.records
    assert record.getMessage() == f"{plans.path} cannot be written: No space left on device"
    assert plans.items() == {"a": PLAN, "b": PLAN}
