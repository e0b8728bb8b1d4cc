import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.tracking.history import History
from runner.tracking.lines import lines
from runner.tracking.spool import Spool

keys = st.text(max_size=4)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("t", "step", "metrics", "params", "tags", "artifact", "folder", "status")
WHOLE = {"t": 5, "step": 2, "metrics": {"loss": 0.5, "error": "inf"}}


@given(st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_whatever_a_line_says_the_next_one_is_read(tmp_path_factory, anything):
    spool = tmp_path_factory.mktemp("spool") / "spool.jsonl"
    spool.write_text(f"{json.dumps(anything)}\n{json.dumps(WHOLE)}\n")
    first, (line, end) = lines(spool)
    assert end == spool.stat().st_size > first[1]
    assert (line.t, line.step, line.metrics, line.status) == (5, 2, {"loss": 0.5, "error": math.inf}, None)
    assert History.read(spool, 0, 1).has("loss", 2, 0.5)


@pytest.mark.parametrize(
    "line", ['{"t":1,"step":"x"}', '{"t":1,"metrics":[1]}', '{"step":1}', '{"t":1,"status":"DONE"}']
)
def test_a_damaged_line_says_nothing_with_a_warning(line, tmp_path, caplog):
    spool = tmp_path / "spool.jsonl"
    spool.write_text(line + "\n")
    ((found, _),) = lines(spool)
    assert (found.metrics, found.tags, found.status, found.artifact) == ({}, {}, None, None)
    assert "skipped the line that ends at byte" in caplog.text


def test_what_is_not_there_has_no_lines(tmp_path):
    assert list(lines(tmp_path / "spool.jsonl")) == []


def test_what_a_tracker_logs_is_whole(tmp_path, caplog):
    spool = Spool(tmp_path / "spool.jsonl")
    spool.append({"t": 1, "tags": {"a": "b"}, "status": "KILLED"})
    spool.append({"t": 2, "artifact": "recipe.yaml", "folder": ""})
    spool.close()
    (end, _), (artifact, _) = lines(spool.path)
    assert (end.tags, end.status) == ({"a": "b"}, "KILLED")
    assert artifact.artifact == "recipe.yaml"
    assert caplog.text == ""
