"""The page of claims is what its generator writes, and no claim and no figure is lost or invented."""

import copy
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.plugin.registry import Registry

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "claims"
PAGE = ROOT / "docs" / "claims.md"
sys.path.insert(0, str(FOLDER))
try:
    import claim_measurements
    import claim_model
    import claim_page
    import claim_plot
finally:
    sys.path.remove(str(FOLDER))

REPORTS = claim_model.load_reports()
CLAIMS = [claim for report in REPORTS for claim in report.claims]
FIELDS = [
    (path.stem, fields)
    for path in sorted(FOLDER.glob("*.yaml"))
    for fields in yaml.safe_load(path.read_text())["claims"]
]
"""The entries of the data files, read without the generator, each with the name of its file."""
REFUSED = {
    "torchscript": "TorchScript",
    "ddp_memory": "DDP saves memory",
    "pose_cache": "cache of hands by pose",
    "empty_cache": "empty_cache every 100 steps",
    "rope": "RoPE for grasps",
}
"""Technique on the page of each refused one that has to be there."""


def rows_of(text):
    """Cells of all tables of a text, without their headings."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[1] != "---"]


def section_of(report):
    return PAGE.read_text().partition(f"\n## {report.title}\n")[2].partition("\n## ")[0]


def test_the_page_is_what_the_generator_writes():
    """Otherwise: python experiments/claims/claims.py"""
    assert PAGE.read_text() == claim_page.write_page(REPORTS)


def test_the_plot_shows_what_the_page_states():
    assert claim_plot.read_digest(PAGE.with_suffix(".png")) == claim_plot.digest_of(REPORTS)
    assert sum(len(claim_plot.plot_rows(REPORTS, unit)) for unit in claim_plot.PANELS) > 30


def test_every_claim_of_a_data_file_has_one_row():
    assert {name for name, _ in FIELDS} == set(claim_model.REPORTS)
    assert len(FIELDS) > 70
    for report in REPORTS:
        expected = [fields["technique"] for name, fields in FIELDS if name == report.name]
        assert [row[0] for row in rows_of(section_of(report))[1:]] == expected
        assert len(expected) == len(set(expected)), report.name


def test_the_numbers_of_answers_are_those_of_the_rows():
    rows = [row for report in REPORTS for row in rows_of(section_of(report))[1:]]
    answers = [re.match(r"\*\*([a-z ]+)\*\*: ", row[5])[1] for row in rows]
    stated = {row[0]: int(row[2]) for row in rows_of(PAGE.read_text()) if row[0] in claim_model.ANSWERS}
    assert stated == {answer: answers.count(answer) for answer in claim_model.ANSWERS}
    assert min(stated.values()) > 0


def test_a_stranger_can_read_it():
    for row in rows_of(PAGE.read_text()):
        assert len(row) <= 6
        for cell in row:
            words = re.sub(r"\]\([^)]*\)", "]", cell).split()
            assert len(words) <= 25, cell


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_technique_has_a_measurement_and_a_reason(name):
    result = json.loads((ROOT / "experiments" / "refused" / "results" / f"{name}.json").read_text())
    script = ROOT / result["command"].removeprefix("python ")
    assert script.is_file()
    assert result["conclusion"].endswith(".")
    (row,) = {tuple(row) for report in REPORTS for row in rows_of(section_of(report)) if row[0] == REFUSED[name]}
    assert row[2].startswith("refused")
    assert "refused/README.md" in row[3]


def test_the_report_of_refused_techniques_follows_from_its_results(tmp_path, monkeypatch):
    folder = ROOT / "experiments" / "refused"
    monkeypatch.syspath_prepend(str(folder))
    import refused_report

    before = (folder / "README.md").read_text()
    monkeypatch.setattr(refused_report, "FOLDER", tmp_path)
    refused_report.write_report()
    assert (tmp_path / "README.md").read_text() == before


def test_stages_that_the_page_names_are_registered():
    registry = Registry()
    kinds = {*registry.kinds("optimization"), *registry.kinds("inference")}
    lists = re.findall(r"stages? ((?:`\w+`(?:, |\b)?)+)", " ".join(claim.here for claim in CLAIMS))
    named = {kind for names in lists for kind in re.findall(r"`(\w+)`", names)}
    assert len(named) > 20
    assert named <= kinds


def test_every_figure_of_a_card_equals_the_card():
    cards = json.loads((ROOT / "plugins" / "stages" / "measured.json").read_text())
    entries = [entry for _, fields in FIELDS for entry in fields.get("measured", ()) if "card" in entry]
    assert len(entries) > 15
    page = PAGE.read_text()
    for entry in entries:
        figures = next(
            card["alone"]
            for card in cards[entry["card"]]
            if card["experiment"] == f"experiments/{entry['experiment']}" and card["case"] == entry.get("case", "")
        )
        assert "{:.2f}x [{:.2f}, {:.2f}]".format(*figures) in page


def test_another_result_is_another_page(monkeypatch):
    """Figures come from the results, not from the data files."""
    load = claim_measurements.load

    def changed(path):
        cards = copy.deepcopy(load(path))
        if path == claim_measurements.CARDS:
            for card in cards["amp"]:
                card["alone"] = card.get("alone") and [9.87, 9.86, 9.88]
        return cards

    monkeypatch.setattr(claim_measurements, "load", changed)
    page = claim_page.write_page(claim_model.load_reports())
    assert "9.87x [9.86, 9.88]" in page
    assert page != PAGE.read_text()


# --- data files that are wrong ----------------------------------------------------------------------------------------


def refused(fields, words="."):
    with pytest.raises(claim_model.ClaimError, match=words):
        claim_model.parse_claim(fields, "a file")


def test_an_incomplete_or_unknown_field_of_any_claim_is_refused():
    for _, fields in FIELDS:
        for key in claim_model.REQUIRED:
            refused({name: value for name, value in fields.items() if name != key})
        refused(fields | {"figure": "1.5x"}, "unknown fields")
        refused(fields | {"answer": "probably"})


def test_a_measurement_that_no_result_contains_is_refused():
    count = 0
    for _, fields in FIELDS:
        for entry in fields.get("measured", ()):
            key = next(name for name in ("variant", "card", "refused", "pattern", "grasps", "learned") if name in entry)
            refused(fields | {"measured": [entry | {key: "no_such.thing"}]})
            count += 1
    assert count > 50


def test_an_answer_without_evidence_or_against_the_figures_is_refused():
    plain = {"technique": "t", "claim": "c", "where": "w", "here": "h", "because": "b"}
    assert claim_model.parse_claim(plain, "a file").answer == "not measured"
    for answer in claim_model.ANSWERS[:-1]:
        refused(plain | {"answer": answer}, "needs a measurement")
        for _, fields in FIELDS:
            if "claimed" in fields and "measured" in fields:
                refused(fields | {"answer": answer}, "follows from the figures")
    refused(plain | {"measured": [{"memory": "gps", "variant": "amp"}]}, "state the answer")
    refused(plain | {"shown": "tests/test_claims.py"}, "state the answer")


def test_a_figure_in_a_reason_needs_a_source():
    plain = {"technique": "t", "claim": "twice, 2.5x", "where": "w", "here": "h"}
    for reason in ("2.5 is too much", "no figure", "in bf16 and float32", "conv2d"):
        assert claim_model.parse_claim(plain | {"because": reason}, "a file")
    for number in range(1000, 1060):
        refused(plain | {"because": f"it took {number / 7:.3f} ms"}, "figures without a source")
        refused(plain | {"because": f"it took {number / 7:.3f} ms", "cited": "docs/graphs.md"}, "without a source")
    assert claim_model.parse_claim(plain | {"because": "0.672", "cited": "docs/graphs.md"}, "a file")


# --- the answers ------------------------------------------------------------------------------------------------------

FACTORS = st.floats(0.2, 20)
MEASURED = st.tuples(FACTORS, st.floats(1, 1.5)).map(lambda pair: (pair[0], (pair[0] / pair[1], pair[0] * pair[1])))
ORDER = ["false", "undecided", "partly", "depends on", "true"]


def answer_of(claimed, measured):
    measurements = [
        SimpleNamespace(value=value, interval=interval, unit="x", published=None) for value, interval in measured
    ]
    claim = SimpleNamespace(measurements=measurements, claimed_for=lambda measurement: (claimed, claimed))
    return claim_model.compare(claim)


@settings(max_examples=200, deadline=None)
@given(st.floats(1.01, 5), st.lists(MEASURED, min_size=1, max_size=5))
def test_answers_follow_from_figures(claimed, measured):
    answer = answer_of(claimed, measured)
    reached = [value >= claimed and ends[0] > 1 for value, ends in measured]
    gains = [ends[0] > 1 for _, ends in measured]
    assert (answer == "true") == all(reached)
    possible = [ends[1] >= claimed for _, ends in measured]
    assert (answer == "undecided") == (not any(gains) and all(possible))
    assert (answer == "false") == (not any(gains) and not all(possible))
    assert (answer in ("true", "depends on")) == any(reached)


@settings(max_examples=100, deadline=None)
@given(st.floats(1.01, 5), st.lists(MEASURED, min_size=1, max_size=5), st.floats(1, 3))
def test_a_faster_measurement_is_never_a_worse_answer(claimed, measured, scale):
    faster = [(value * scale, (low * scale, high * scale)) for value, (low, high) in measured]
    assert ORDER.index(answer_of(claimed, faster)) >= ORDER.index(answer_of(claimed, measured))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(FACTORS, FACTORS), min_size=3, max_size=3), st.booleans())
def test_a_gain_is_positive_where_trainings_are_better_with_a_technique(pairs, smaller):
    entry = {"smaller": smaller, "label": "a metric"}
    newest = {"date": "2026-11-29", "machine": "m"}
    gain = claim_measurements.better(entry, "", pairs, newest, "r")
    changes = [100 * (value / without - 1) for value, without in pairs]
    assert gain.value == pytest.approx((-1 if smaller else 1) * sum(changes) / 3)
    assert gain.interval[0] <= gain.value <= gain.interval[1]
    if all((value < without) == smaller for value, without in pairs):
        assert gain.value >= 0


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 900), st.integers(0, 900), st.sampled_from(["x", "%", "better"]))
def test_claimed_figures_are_read(low, width, unit):
    high = low + width
    assert claim_model.parse_claimed(f"{low / 10} to {high / 10} {unit}") == ((low / 10, high / 10), unit)
    assert claim_model.parse_claimed(f"{low / 10} {unit}") == ((low / 10, low / 10), unit)
