"""Of a test with many similar cases, a few are run, others at every commit."""

import pytest
import sampling

CASES = 12
FEW = 3


@pytest.mark.sampled(CASES)
@pytest.mark.parametrize("case", range(CASES))
def test_sampled(case: int) -> None:
    """Is collected, for the tests below."""


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> list[pytest.Item]:
    collected = request.node.parent.collect()
    for item in collected:
        if item.originalname == "test_sampled":
            item.own_markers[:] = [pytest.mark.sampled(FEW).mark]
    return collected


def test_as_many_cases_as_the_marker_says_are_run(cases: list[pytest.Item]) -> None:
    omitted = sampling.omitted(cases, "a")
    assert len(omitted) == CASES - FEW
    assert {item.originalname for item in omitted} == {"test_sampled"}


def test_the_same_commit_selects_the_same_cases(cases: list[pytest.Item]) -> None:
    assert sampling.omitted(cases, "a") == sampling.omitted(cases[::-1], "a")


def test_every_case_is_run_at_some_commit(cases: list[pytest.Item]) -> None:
    always_omitted = set.intersection(*(sampling.omitted(cases, str(seed)) for seed in range(50)))
    assert not always_omitted
