"""The table of several seeds."""

import io
import random
from types import SimpleNamespace

import pytest

from runner.cli.seeds import SeedsProgressDisplay, show
from runner.system.console import Console
from runner.system.errors import ExitCode
from runner.system.interval import student
from runner.training.outputs import NoOutput
from runner.training.seeds import SeedsResult, _JointDisplay

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
    show(RESULT, ("return",), "runner run demo --resume", "seed", console)
    lines = out.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert "…" not in out.getvalue()
    assert lines[4].split()[0] == "return"  # the headline first
    assert ("seed 43" in lines[2]) is seeds
    assert ("-10,490 to -6,737" in lines[4]) is (width == 120)
    assert ("-10,090" in lines[4]) is seeds


@pytest.mark.parametrize("seed", range(50))
def test_the_bar_names_every_seed_that_is_training(seed):
    """Also while their processes start, and in any order of their beginnings and ends."""
    draw = random.Random(seed)
    recipe = SimpleNamespace(name="demo", length=("epochs", 12), headline=("return",), objective=None)
    console = Console(file=io.StringIO(), width=draw.choice((80, 160)))
    display = SeedsProgressDisplay(console, recipe, 4)
    joint = _JointDisplay(display, {})
    training: dict[int, object] = {}
    steps: dict[int, int | None] = {}
    for _ in range(20):
        number = draw.randrange(4)
        if number not in training:
            training[number] = joint.training(number)
            training[number].__enter__()
            steps[number] = None
        elif draw.random() < 0.6:
            steps[number] = draw.randint(1, 12)
            joint.advance(number, steps[number], {})
        else:
            training.pop(number).__exit__(None, None, None)
            del steps[number]
        states = [f"seed {n} is starting" if step is None else f"seed {n} at {step}" for n, step in steps.items()]
        shown = display.lines()[0]
        assert all(state in shown for state in states)
        assert shown.count("seed ") == len(states)
    assert display.total == 48


def test_a_training_that_fails_is_no_longer_shown():
    class Seeds(NoOutput):
        steps = None

        def show_seeds(self, steps):
            self.steps = steps

    display = Seeds()
    joint = _JointDisplay(display, {})

    def fail():
        with joint.training(3):
            assert display.steps == {3: None}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert display.steps == {}
