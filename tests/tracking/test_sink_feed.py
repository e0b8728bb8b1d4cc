"""A sink gets everything that a run logs, once, whatever fails or ends in between."""

import csv
import json
import math
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import train_here

from runner.plugin.registry import Registry
from runner.plugin.sink import Sink
from runner.plugins.sinks.csv_file import CsvSink
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.system.errors import UsageError
from runner.tracking.recorder import Recorder
from runner.tracking.sink_feed import SinkFeed
from runner.tracking.spool import lines

POINTS = st.lists(
    st.dictionaries(st.sampled_from(["train/loss", "eval/loss", "perf/x"]), st.floats(), min_size=1), max_size=8
)


class ListSink(Sink):
    """Keeps what it gets, and fails as often as it is told."""

    kind = "list"
    failures = 0
    content = ()

    def __init__(self, folder, run_name):
        type(self).content = []

    def add_metrics(self, metrics, step, time):
        if type(self).failures:
            type(self).failures -= 1
            raise OSError("the disk is full")
        self.content += [(step, name, repr(value)) for name, value in metrics.items()]


def logged(spool):
    return [(line.step, name, repr(value)) for line, _ in lines(spool) for name, value in line.metrics.items()]


@given(POINTS, st.integers(0, 3), st.integers(0, 8), st.integers(0, 8))
def test_every_value_arrives_once(tmp_path_factory, points, failures, first_update, resumption):
    spool = tmp_path_factory.mktemp("run") / "spool.jsonl"
    recorder = Recorder(spool)
    feed = SinkFeed(ListSink, spool, "a run")
    ListSink.failures = failures
    for step, metrics in enumerate(points):
        recorder.log(metrics, step)
        if step == resumption:
            feed = SinkFeed(ListSink, spool, "a run")
        if step >= first_update:
            update(feed)
    for _ in range(failures):
        update(feed)
    feed.close()
    assert ListSink.content == logged(spool)


def update(feed):
    with suppress(OSError):
        feed.update()


def rows_of(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), row["metric"], float(row["value"])) for row in csv.DictReader(file)]


@pytest.mark.usefixtures("migrated_workspace")
def test_a_run_writes_its_metrics_as_csv():
    result = train_here("digits_classifier", "train.epochs=1", "tracking.sinks=[mlflow, csv]")
    folder = Path(result.run_dir)
    rows = rows_of(folder)
    assert [row[:2] for row in rows] == [row[:2] for row in logged(folder / "spool.jsonl")]
    values = {name: value for _, name, value in rows}
    assert values["eval/loss"] == result.metrics["eval/loss"]


def test_numbers_that_are_not_finite_are_in_the_file(tmp_path):
    sink = CsvSink(tmp_path, "a run")
    sink.add_metrics({"a": math.nan, "b": -math.inf}, 3, 1.5)
    sink.close()
    (nan, infinity) = rows_of(tmp_path)
    assert math.isnan(nan[2])
    assert infinity == (3, "b", -math.inf)


def test_an_unknown_sink_is_named_with_its_line(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: digits_classifier\ntracking:\n  sinks: [csv, tensorbord]\n")
    with pytest.raises(RecipeError) as caught:
        load(path, (), Registry())
    assert "mine.yaml:3" in str(caught.value)
    assert "tracking.sinks: unknown sink 'tensorbord' - did you mean 'tensorboard'?" in str(caught.value)


FILE = """
from runner.api import Sink

class Half(Sink):
    kind = "half"
    def __init__(self, folder, run_name):
        pass
"""


def test_a_sink_without_its_method_is_refused_with_its_name(tmp_path):
    path = tmp_path / "half.py"
    path.write_text(FILE)
    registry = Registry([path])
    assert registry.sinks == ["csv", "half", "tensorboard", "wandb"]
    with pytest.raises(UsageError, match="sink 'half': add_metrics missing"):
        registry.sink("half")


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_package_that_is_missing_is_named_with_its_extra(kind, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=rf"pip install 'proven-runner\[{kind}\]'"):
        Registry().sink(kind).require()


def test_tensorboard_reads_what_was_logged(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = Registry().sink("tensorboard")(tmp_path, "a run")
    sink.add_params({"train.epochs": "3"})
    for step in range(3):
        sink.add_metrics({"eval/loss": 1 / (1 + step)}, step, 1e9 + step)
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = [(event.step, event.wall_time, event.value) for event in events.Scalars("eval/loss")]
    assert scalars == [(step, 1e9 + step, pytest.approx(1 / (1 + step))) for step in range(3)]
    assert json.dumps(events.Tags()["tensors"]) == '["recipe/text_summary"]'


def records_of(path):
    """Yields the records of a file of Weights & Biases: chunks in blocks of 32 KiB, after a header."""
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    position = 7
    message = b""
    while position + 7 <= len(content):
        in_block = 32768 - position % 32768
        if in_block < 7:
            position += in_block
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        message += content[position + 7 : position + 7 + length]
        position += 7 + length
        # A complete record, or the last chunk of one.
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            yield record
            message = b""


def items_of(items):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_weights_and_biases_reads_what_was_logged(tmp_path):
    pytest.importorskip("wandb")
    sink_class = Registry().sink("wandb")
    for attempt in range(2):
        # A sink that is made again gets everything from the beginning.
        sink = sink_class(tmp_path, "digits-1234abcd")
        sink.add_params({"train.epochs": "3"})
        for step in range(3):
            sink.add_metrics({"eval/loss": 1 / (1 + step)}, 10 * step, 1e9 + step)
        sink.add_metrics({"train/loss": 0.5, "train/x": math.nan}, 10, 1e9 + attempt)
        sink.flush()
        sink.close()
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60
    records = []
    # The process that writes the file ends it shortly after the run.
    while "exit" not in [record.WhichOneof("record_type") for record in records]:
        assert time.monotonic() < deadline
        records = list(records_of(path))
    rows = [items_of(record.history.item) for record in records if record.WhichOneof("record_type") == "history"]
    points = [(row["progress"], row["_timestamp"], row.get("eval/loss")) for row in rows]
    assert points == [(10 * step, 1e9 + step, 1 / (1 + step)) for step in range(3)] + [(10, 1e9 + 1, None)]
    assert (rows[3]["train/loss"], math.isnan(float(rows[3]["train/x"]))) == (0.5, True)
    (config,) = [items_of(record.config.update) for record in records if "train.epochs" in str(record.config)]
    assert config["train.epochs"] == "3"
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.display_name, run.project, run.git.remote_url) == ("digits-1234abcd", "runner", "")
