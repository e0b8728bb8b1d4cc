"""The examples of the page about ``runner.proof`` are complete, and their tests pass."""

import re
from pathlib import Path

import pytest

from runner.proof import Outcome, Timing
from runner.proof.checks import CHECKS
from runner.verify.explanation import list_checks

PAGE = Path(__file__).parents[2] / "docs" / "proof.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run(example):
    names = {}
    exec(compile(example, str(PAGE), "exec"), names)
    return names


def test_the_page_lists_the_checks_in_their_order():
    listed = PAGE.read_text().partition("<!-- proof checks -->\n")[2].partition("<!-- end of proof checks -->")[0]
    assert listed.strip() == list_checks(CHECKS).strip()


def test_there_are_three():
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("example", EXAMPLES[:2], ids=["a plain loop", "a module"])
def test_an_example_passes_its_own_test(example):
    names = run(example)
    (test,) = (value for name, value in names.items() if name.startswith("test_"))
    test()


def test_the_example_can_fail():
    names = run(EXAMPLES[1].replace("losses[0] + losses[1]", "losses[0] + 1.001 * losses[1]"))
    (test,) = (value for name, value in names.items() if name.startswith("test_"))
    with pytest.raises(AssertionError):
        test()


def test_the_clock_of_the_example_gives_a_ratio():
    names = run(EXAMPLES[0])
    timing = names["clock"](names["build"], lambda: names["build"](fused=True), names["batches"](), seconds=0.5)
    assert isinstance(timing, Timing)
    assert timing.ratio.low <= timing.ratio.value <= timing.ratio.high


@pytest.mark.parametrize(("lost", "outcome", "pairs"), [(0.0, Outcome.PASS, 8), (0.2, Outcome.FAIL, 5)])
def test_the_example_that_judges_trainings_stops_when_it_is_clear(lost, outcome, pairs):
    judge = run(EXAMPLES[2])["judge"]
    found, summary, evidence = judge(lambda seed, changed: 100.0 + seed % 3 - (100 * lost + seed % 2) * changed)
    assert (found, evidence["pairs"]) == (outcome, pairs)
    assert f"{outcome} after {pairs} of 20 pairs" in summary
