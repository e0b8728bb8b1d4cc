"""At each commit, of slow and of similar tests a part is run; what the commit changes always is."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
import sampling
import slow

CASES = 12
FEW = 3
NAMES = [f"case_{number}" for number in range(CASES)]
SLOW = frozenset({"tests/test_sampling.py::test_slow"})
COMMITS = [str(number) for number in range(50)]


@pytest.mark.sampled(CASES)
@pytest.mark.parametrize("case", NAMES)
def test_sampled(case: str) -> None:
    """Is collected, for the tests below."""


@pytest.mark.parametrize("case", NAMES)
def test_slow(case: str) -> None:
    """Is collected, for the tests below."""


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> list[pytest.Item]:
    collected = request.node.parent.collect()
    for item in collected:
        if item.originalname == "test_sampled":
            item.own_markers[:] = [pytest.mark.sampled(FEW).mark]
    return collected


def names(items: set[pytest.Item]) -> set[str]:
    return {item.originalname for item in items}


def test_as_many_cases_as_the_marker_says_are_run(cases: list[pytest.Item]) -> None:
    omitted = sampling.omitted(cases, "a")
    assert len(omitted) == CASES - FEW
    assert names(omitted) == {"test_sampled"}


def test_a_share_of_slow_tests_is_run(cases: list[pytest.Item]) -> None:
    omitted = [sampling.omitted(cases, commit, SLOW) for commit in COMMITS]
    share = sum(item.originalname == "test_slow" for items in omitted for item in items) / (CASES * len(COMMITS))
    assert share == pytest.approx(1 - 1 / sampling.SHARE, abs=0.06)
    assert names(set.union(*omitted)) == {"test_sampled", "test_slow"}


def test_the_same_commit_selects_the_same_cases(cases: list[pytest.Item]) -> None:
    assert sampling.omitted(cases, "a", SLOW) == sampling.omitted(cases[::-1], "a", SLOW)


def test_every_case_is_run_at_some_commit(cases: list[pytest.Item]) -> None:
    always_omitted = set.intersection(*(sampling.omitted(cases, commit, SLOW) for commit in COMMITS))
    assert not always_omitted


@pytest.mark.parametrize("path", ["runner/proof/clock.py", "plugins/proof/config.py", "tests/proof/test_other.py"])
def test_slow_tests_of_what_is_changed_are_run(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _Case("tests/proof/test_clock.py::test_slow")
    of_another = _Case("tests/study/test_search.py::test_slow")
    tests = frozenset(each.nodeid for each in (case, of_another))
    omitted = [sampling.omitted([case, of_another], commit, tests, [Path(path)]) for commit in COMMITS]
    assert set.union(*omitted) == {of_another}


@pytest.mark.parametrize("path", ["recipes/case_4.yaml", "docs/case_4.md"])
def test_cases_that_are_named_after_a_changed_file_are_run(path: str, cases: list[pytest.Item]) -> None:
    for commit in COMMITS:
        omitted = sampling.omitted(cases, commit, SLOW, [Path(path)])
        assert not [item for item in omitted if item.callspec.params["case"] == "case_4"]


def test_a_file_beside_the_sources_changes_no_package(cases: list[pytest.Item]) -> None:
    assert sampling.omitted(cases, "a", SLOW, [Path("README.md")]) == sampling.omitted(cases, "a", SLOW)


def test_slow_tests_exist() -> None:
    tests = [test.partition("::") for test in sampling.slow_tests()]
    assert not [name for file, _, name in tests if f"def {name}(" not in Path(sampling.ROOT, file).read_text()]


def test_tests_are_slow_whose_cases_take_long_on_average() -> None:
    times = {"test_a[x]": 0.4, "test_a[y]": 1.8, "test_b": 0.9, "test_c[x]": 1.2}
    cases = [
        ElementTree.Element("testcase", classname="tests.proof.test_clock", name=name, time=str(time))
        for name, time in times.items()
    ]
    assert slow.slow_tests(cases, 1.0) == ["tests/proof/test_clock.py::test_a", "tests/proof/test_clock.py::test_c"]


class _Case:
    """A test without the marker."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid

    def get_closest_marker(self, _: str) -> None:
        return None
