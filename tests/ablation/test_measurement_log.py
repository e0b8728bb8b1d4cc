import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.ablation.measurement_log import ROUNDS, MeasurementLog, identity_of
from runner.system.errors import UsageError


def reopened(folder):
    log = MeasurementLog(folder, {"name": "x"})
    log.close()
    return log


def test_what_was_added_is_there_after_a_crash(tmp_path):
    log = MeasurementLog(tmp_path / "a", {"name": "x"})
    log.add(case="", round=1, update={"baseline": 0.5})
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # as it is, without having been closed
    found = reopened(tmp_path / "b")
    assert found.entries[0]["update"] == {"baseline": 0.5}
    assert identity_of(tmp_path / "a") == {"name": "x"}
    log.close()


def test_two_processes_do_not_measure_in_one_folder(tmp_path):
    log = MeasurementLog(tmp_path, {"name": "x"})
    with pytest.raises(UsageError, match="another process measures"):
        MeasurementLog(tmp_path, {"name": "x"})
    log.close()
    reopened(tmp_path)


@given(cut=st.integers(1, 200))
def test_a_torn_line_costs_itself_alone(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("log")
    log = MeasurementLog(folder, {})
    for turn in range(3):
        log.add(case="", round=turn)
    log.close()
    data = (folder / ROUNDS).read_bytes()
    lines = data.splitlines(keepends=True)
    torn = data[: max(len(lines[0]) + len(lines[1]), len(data) - cut)]
    (folder / ROUNDS).write_bytes(torn)
    log = MeasurementLog(folder, {})
    log.add(case="", round=9)
    log.close()
    rounds = [entry["round"] for entry in reopened(folder).entries]
    assert rounds[:2] == [0, 1]
    assert rounds[-1] == 9
    assert all(json.loads(line) for line in (folder / ROUNDS).read_bytes().splitlines()[:2])


def test_time_adds_up_over_sessions_that_measured_something(tmp_path):
    (tmp_path / ROUNDS).write_text(
        '{"session": 1, "spent": 5.0, "update": {}}\n{"session": 1, "spent": 7.0}\n'
        '{"session": 2, "spent": 40.0}\n{"session": 3, "spent": 3, "update": {}}\n'
    )
    assert reopened(tmp_path).earlier_seconds == 10.0


def test_what_is_no_ablation_has_no_identity(tmp_path):
    assert identity_of(tmp_path) is None
    (tmp_path / "ablation.json").write_text("[broken")
    assert identity_of(tmp_path) is None
