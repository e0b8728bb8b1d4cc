import io
import json

import pytest
from trained_classifiers import classifier

from runner.ablation import inference_ablation
from runner.ablation.inference_ablation import ablate_inference
from runner.ablation.inference_report import show, write
from runner.proof import interleaved_timing, warm_up
from runner.system.console import Console
from runner.system.errors import UsageError


@pytest.fixture
def quickly(monkeypatch):
    monkeypatch.setattr(inference_ablation, "FEWEST_SECONDS", 0.01)
    monkeypatch.setattr(interleaved_timing, "BLOCK_SECONDS", 0.001)
    monkeypatch.setattr(warm_up, "WINDOW_SECONDS", 0.001)


def test_stages_are_timed_and_judged_and_a_report_is_left(tmp_path, quickly):
    found = classifier(tmp_path / "run", "inference.prune={ff: 0.5}")
    result = ablate_inference(found, tmp_path / "report", 2.0, lambda _: None)
    write(result)
    rows = {row.name: row for row in result.rows}
    assert next(iter(rows)) == "baseline again"
    assert rows.keys() == {"baseline again", "prune"}
    assert rows["prune"].bytes < rows["baseline again"].bytes
    assert rows["prune"].verdict.contract == "Statistical"
    assert 0 <= rows["prune"].value <= 1
    assert 0 <= rows["baseline again"].value <= 1
    assert {*rows["prune"].timings} == {1, 16}
    kept = json.loads((tmp_path / "report" / "inference.json").read_text())
    assert [each["name"] for each in kept["variants"]] == list(rows)
    text = (tmp_path / "report" / "README.md").read_text()
    assert all(f"| {name} |" in text for name in rows)
    assert "](ratios.png)" in text
    assert "inference:\n  prune:\n    heads: 0.25\n    ff: 0.5\n" in text
    console = Console(file=io.StringIO(), width=80, color_system=None)
    show(result, console)
    shown = console.file.getvalue()
    assert all(name in shown for name in rows)
    assert max(len(line) for line in shown.splitlines() if str(tmp_path) not in line) <= 80


def test_a_budget_that_cannot_tell_anything_is_refused(tmp_path):
    with pytest.raises(UsageError, match="a budget of 1 s is too small for 2 variants: 13 s"):
        ablate_inference(classifier(tmp_path, "inference.channels_last=on", updates=1), tmp_path, 1.0, lambda _: None)
