"""The closing table of a run, at several widths."""

import io
from dataclasses import replace

import pytest

from runner.cli.closing_table import show
from runner.system.console import Console
from runner.system.errors import ExitCode
from runner.training.checkpoint_selection import Best
from runner.training.result import RunResult
from runner.training.stage_watch import StageReport


def ended(folder, **others):
    """The result of a run."""
    reason = "async_transfer has nothing to do because every tensor of the batch is on the processor already"
    metrics = {"train/success_rate": 0.5, "eval/success_rate": 0.25, "perf/update_ms": 900.0}
    result = RunResult(
        run_name="demo-3f2a91c0", status="FINISHED", metrics=metrics, tracking_uri="", lock="",
        stages=[StageReport("async_transfer", False, reason)], resume="runner resume", run_id="0123456789abcdef" * 2,
        run_dir=str(folder / ".runner" / "runs" / "demo-3f2a91c0"), seconds=61.0, resumed_at=None,
        startup_seconds=16.0, update_seconds=0.0125,
        shares={"startup": 16 / 61, "update": 0.7, "other": 0.03}, exit_code=ExitCode.DONE,
        best=Best("/checkpoints/step-000000000012-0", 12, "updates", "eval/success_rate", 0.5), newest_checkpoint=None,
    )  # fmt: skip
    return replace(result, **others)


def closing_text(result, width=80):
    console = Console(file=io.StringIO(), width=width)
    show(result, ("success_rate",), console)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_closing_table_fits_and_splits_no_word(width, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = ended(tmp_path)
    text = closing_text(result, width)
    assert "best success_rate 0.5 after 12 updates: checkpoints/step-000000000012-0" in text
    assert "time 61 s: start-up 16 s, training 45 s 12.5 ms per update" in text
    assert "shares of all: update 70%, startup 26%, other 3%" in text
    (report,) = result.stages
    inactive = f"stages async_transfer inactive: {report.reason}"
    assert f"{inactive} run MLflow id {result.run_id} .runner/runs/demo-3f2a91c0" in text
    assert "newest" not in text


@pytest.mark.parametrize(
    ("newest", "words"),
    [
        (None, "newest no checkpoint has been written"),
        ("/runs/demo/checkpoints/step-000000000040", "newest checkpoints/step-000000000040"),
    ],
)
def test_the_closing_table_of_an_interrupted_run_names_its_newest_checkpoint(newest, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in closing_text(ended(tmp_path, status="STOPPED", newest_checkpoint=newest))


def test_few_runs_have_lines_about_processes_callbacks_and_skipped_updates(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ordinary = closing_text(ended(tmp_path))
    rare = {"processes": 2, "changed_by": "callback 'x' changed 'weight'", "skipped_updates": "3 of 9 updates"}
    text = closing_text(ended(tmp_path, **rare))
    for words in ("processes 2, each on a part of every batch", "changed 'weight'", "skipped 3 of 9 updates"):
        assert words in text
        assert words not in ordinary


def test_a_result_on_a_part_of_the_data_is_marked_unless_a_smoke_test_is_anyway(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "limited 10 % of the training data; the result is not that of all data"
    limited = ended(tmp_path, limited="10 % of the training data")
    assert words in closing_text(limited)
    assert "limited" not in closing_text(ended(tmp_path))
    assert "limited" not in closing_text(replace(limited, smoke=True))


def test_the_table_has_the_test_or_the_reason_why_there_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = ended(tmp_path)
    metrics = {**result.metrics, "test/success_rate": 0.125}
    tested = replace(result, metrics=metrics)
    assert "test success_rate 0.125 of the best checkpoint" in closing_text(tested)
    assert "test success_rate 0.125 of the last checkpoint" in closing_text(replace(tested, best=None))
    untested = replace(result, untested="the data have no test part")
    assert "test none: the data have no test part" in closing_text(untested)
    for other in (replace(untested, smoke=True), replace(untested, status="STOPPED")):
        assert "no test part" not in closing_text(other)
