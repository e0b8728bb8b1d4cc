"""The exam of misleading speed-ups: its entries are complete, and a few of them are judged."""

import sys
import time
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "experiments" / "zoo"
BY_TRAIT = {
    "mean_of_means": "FAIL",
    "divided_by_ranks_again": "FAIL",
    "average_moves_away": "FAIL",
    "ring_order": "PASS",
}


@pytest.fixture(scope="module")
def exam():
    sys.path.insert(0, str(FOLDER))
    try:
        import exam.catalog
        import exam.methods
        import exam.report

        yield exam
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def entries(exam):
    return exam.catalog.ENTRIES


def test_every_entry_has_a_name_a_source_and_a_description(exam, entries):
    assert len(entries) == sum(len(group.entries) for group in exam.catalog.GROUPS.values())
    wrong = [entry for entry in entries.values() if not entry.is_honest]
    assert len(wrong) >= 60
    assert all(entry.source and entry.claim and entry.fault.endswith(".") for entry in wrong)
    assert all(entry.name.isidentifier() for entry in entries.values())


def test_every_group_has_wrong_and_correct_changes(exam):
    for group in exam.catalog.GROUPS.values():
        assert {entry.is_honest for entry in group.entries} == {True, False}
    assert sum(not entry.is_honest for entry in exam.catalog.GROUPS["b"].entries) == 23


def test_every_change_makes_a_step(entries, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", time.perf_counter)
    monkeypatch.setattr(time, "time", time.time)
    monkeypatch.setattr(time, "monotonic", time.monotonic)
    for entry in entries.values():
        if entry.group == "a" and entry.emulation is None:  # they take seconds to compile
            continue
        change = entry.emulation or entry.change
        for build in (entry.baseline, change(entry.baseline)):
            subject = build()
            for batch in entry.baseline.batches(2):
                subject.step(batch)
            assert subject.state["model"].state_dict()
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("name", BY_TRAIT)
def test_the_gate_judges(exam, entries, name):
    entry = entries[name]
    assert exam.methods.judge_by_gate(entry, entry.change(entry.baseline))["outcome"] == BY_TRAIT[name]


def test_a_person_with_a_tolerance_misses_what_the_gate_reports(exam, entries):
    entry = entries["decay_overwritten"]
    candidate = entry.change(entry.baseline)
    assert exam.methods.judge_by_numbers(entry, candidate)["allclose"]["outcome"] == "PASS"
    assert exam.methods.judge_by_gate(entry, candidate)["outcome"] == "FAIL"


def test_the_page_is_made_of_the_results(exam, entries):
    rows = exam.report.read_rows(FOLDER / "results.jsonl")
    assert [row["name"] for row in rows] == list(entries)
    assert (FOLDER / "summary.md").read_text() == exam.report.summary(rows)
