import json
from urllib.parse import parse_qs

from runner.tracking.links import compare_page, experiments_page


def test_the_compare_page_names_runs_and_experiments():
    link = compare_page("http://127.0.0.1:5000/", ["2", "1", "2"], ["a", "b", "c"])
    page, _, query = link.partition("?")
    assert page == "http://127.0.0.1:5000/#/compare-runs"
    assert json.loads(parse_qs(query)["runs"][0]) == ["a", "b", "c"]
    assert json.loads(parse_qs(query)["experiments"][0]) == ["1", "2"]
    assert " " not in link
    assert '"' not in link


def test_pages_open_in_the_view_for_training():
    assert experiments_page("http://h").startswith("http://h/#/experiments?workflowType=machine_learning")
