"""The table of runs: columns, order, forms, and the same in Python."""

import csv
import io
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import run_folder
from toy_runs import TOYS, toy
from typer.testing import CliRunner

import runner
from runner.cli import app
from runner.plugin.registry import Registry
from runner.system.console import Console
from runner.system.errors import UsageError
from runner.tracking import Workspace
from runner.tracking.listing import listing
from runner.tracking.record import Record
from runner.tracking.run_table import csv_of, show_table, sorted_runs, table_rows
from runner.training.outputs import NoOutput
from runner.training.run import run


def described(name, metrics=None, **fields):
    """Returns a run in the form of a listing, whose folder does not exist."""
    known = dict.fromkeys(Record.model_fields) | {"overrides": {}, "started": 1.7e9, "run_dir": "/nowhere"}
    return known | {"name": name, "metrics": metrics or {}, "status": "FINISHED"} | fields


RUNS = [
    described("c", {"eval/loss": 0.5, "train/x": 1.0}, overrides={"optimizer.lr": "0.1"}),
    described("a", {"eval/loss": 0.25}, seconds=3.0),
    described("b", {"eval/loss": "nan"}, status="FAILED"),
    described("d", {"eval/loss": "inf"}),
    described("e"),
]


def names(runs):
    return "".join(each["name"] for each in runs)


@pytest.mark.parametrize(
    ("sort", "is_reverse", "expected"),
    [
        (None, False, "cabde"),
        (None, True, "edbac"),
        ("eval/loss", False, "acdbe"),
        ("eval/loss", True, "dcabe"),
        ("name", False, "abcde"),
        ("status", True, "cadeb"),
        ("optimizer.lr", False, "cabde"),
    ],
)
def test_runs_are_sorted_by_any_column_and_those_without_a_value_are_last(sort, is_reverse, expected):
    assert names(sorted_runs(RUNS, sort, is_reverse)) == expected


@given(st.lists(st.one_of(st.none(), st.floats(), st.integers(-5, 5)), max_size=8), st.booleans())
def test_any_values_are_sorted(values, is_reverse):
    runs = [described(str(number), {} if value is None else {"m": value}) for number, value in enumerate(values)]
    runs.append(described("last", {"m": math.nan}))
    ordered = [each["metrics"].get("m") for each in sorted_runs(runs, "m", is_reverse)]
    present = [value for value in ordered if value is not None and not math.isnan(value)]
    assert present == sorted(present, reverse=is_reverse)
    assert ordered[: len(present)] == present
    assert len(ordered) == len(runs)


def test_without_columns_a_table_has_fields_evaluations_and_overrides():
    rows = table_rows(RUNS)
    assert list(rows[0])[-2:] == ["eval/loss", "optimizer.lr"]
    assert rows[0]["optimizer.lr"] == "0.1"
    assert rows[1]["optimizer.lr"] is None
    assert "train/x" not in rows[0]
    assert rows[0]["started"].startswith("2023-11-1")


def test_an_unknown_column_is_one_line():
    with pytest.raises(
        UsageError, match=r"^no run has a field, metric or setting 'eval/los' - did you mean 'eval/loss'\?$"
    ):
        table_rows(RUNS, ["name", "eval/los"])
    with pytest.raises(UsageError, match=r"^no run has a field, metric or setting 'zzz'$"):
        sorted_runs(RUNS, "zzz")
    assert table_rows([], ["zzz"]) == []


@pytest.mark.parametrize("columns", [[], ["name", "train.stop"], ["train.ema"]])
def test_a_setting_may_be_null_in_all_runs(columns):
    smoke = described("smoke", overrides={"train.stop": None, "train.ema": None})
    rows = table_rows([smoke, described("other")], columns)
    assert [row[column] for row in rows for column in columns or ["train.stop"] if column != "name"] == [None, None]
    assert names(sorted_runs([smoke, described("other")], "train.stop")) == "smokeother"


@given(st.lists(st.text(max_size=8), min_size=1, max_size=4))
def test_csv_reads_back(notes):
    runs = [described(str(number), note=note) for number, note in enumerate(notes)]
    text = csv_of(table_rows(runs, ["name", "note"])) + "\n"
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert rows[0] == ["name", "note"]
    expected = [note.replace("\r\n", "\n").replace("\r", "\n") for note in notes]
    assert [note for _, note in rows[1:]] == expected


def test_a_run_is_one_line_on_any_screen():
    screen = io.StringIO()
    console = Console(file=screen, width=30)
    show_table(table_rows(RUNS, ["name", "status", "run_dir", "eval/loss"]), "", console)
    lines = [line for line in screen.getvalue().splitlines() if line.strip()]
    assert len(lines) == 1 + len(RUNS)
    assert lines[1].split() == ["c", "FINISHED", "/nowhere", "0.5"]
    show_table([], "none of 3 matches", console)
    assert screen.getvalue().endswith("none of 3 matches\n")


@pytest.fixture
def trained(tmp_path, migrated_workspace):
    registry = Registry([TOYS])
    for rate in (0.01, 0.5):
        run(toy(tmp_path, "train.updates=2", f"optimizer.lr={rate}"), registry, Workspace(), NoOutput())
    run_folder("other", status="FAILED")


@pytest.mark.usefixtures("trained")
def test_the_command_and_python_have_the_settings_of_locks(tmp_path, monkeypatch):
    words = ["ls", "--recipe", "toy", "--columns", "optimizer.lr, eval/loss,train.batch_size", "--sort", "optimizer.lr"]
    result = CliRunner().invoke(app, [*words, "--reverse", "--csv"])
    assert result.exit_code == 0, result.output
    rows = list(csv.reader(result.stdout.splitlines()))
    assert rows[0] == ["optimizer.lr", "eval/loss", "train.batch_size"]
    assert [row[0] for row in rows[1:]] == ["0.5", "0.01"]
    assert {row[2] for row in rows[1:]} == {"8"}

    table = CliRunner().invoke(app, words).stdout
    assert len(table.splitlines()) == 3

    frame = runner.runs(recipe="toy", sort="optimizer.lr", columns=["optimizer.lr", "eval/loss"])
    assert frame["optimizer.lr"].tolist() == [0.01, 0.5]
    assert frame["eval/loss"].notna().all()
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert [row["optimizer.lr"] for row in runner.runs(recipe="toy", sort="optimizer.lr")] == [0.01, 0.5]
    assert len(runner.runs()) == len(listing(Workspace())) == 3

    with pytest.raises(UsageError, match="--csv and --json are two forms of one result"):
        CliRunner().invoke(app, ["ls", "--csv", "--json"], catch_exceptions=False)
