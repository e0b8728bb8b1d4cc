"""The table of several seeds."""

import io

import pytest

from runner.cli.seeds import show
from runner.system.console import Console
from runner.system.errors import ExitCode
from runner.system.interval import student
from runner.train.seeds import SeedsResult

VALUES = {
    "formation_strict": {42: 0.0006556, 43: 0.1792, 44: 0.005835},
    "return": {42: -10090.0, 43: -6737.0, 44: -10490.0},
}
MEANS = {name: student([*of.values()]) for name, of in VALUES.items()}
RESULT = SeedsResult(
    name="demo-seeds-3f2a91c0", status="FINISHED", run_id="0" * 32, folder="/seeds",
    runs=dict.fromkeys((42, 43, 44), "demo"), values=VALUES, means=MEANS, failures={}, seconds=1.0,
    exit_code=ExitCode.DONE,
)  # fmt: skip


@pytest.mark.parametrize(("width", "seeds"), [(60, False), (80, True), (120, True)])
def test_the_table_has_the_seeds_where_there_is_room_and_splits_no_word(width, seeds):
    console = Console(file=(out := io.StringIO()), width=width)
    show(RESULT, ("return",), "runner run demo --resume", console)
    lines = out.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert "…" not in out.getvalue()
    assert lines[4].split()[0] == "return"  # the headline first
    assert ("seed 43" in lines[2]) is seeds
    assert ("-10,490 to -6,737" in lines[4]) is (width == 120)
    assert ("-10,090" in lines[4]) is seeds
