"""What never ran of a stage's code is named."""

import importlib
import inspect
import sys
import types
from pathlib import Path

import pytest
import torch

from runner.plugin.stage import Stage
from runner.proof import Subject
from runner.verify.stage_coverage import CodeCoverage


def helper(value):
    if value > 10:
        return -value  # too large
    return value


class Plain(Stage):
    """Doubles, unless told otherwise."""

    def attach(self, pipeline):
        self.held = lambda value: 2 * value
        self.other = lambda value: 3 * value
        helper(1)

    def changed(self, value):
        match value:
            case 0:
                return 0  # nothing
            case 1:
                value += 1
        for _ in range(value):
            value = helper(value)
        try:
            value = 1 / value
        except ZeroDivisionError:
            value = 0  # no number
        if value == 7:
            raise ValueError(value)
        with open(__file__) as file:
            file.read(1)
        return value

    def closing_notes(self):
        return ["nobody asks"]


class Once(Stage):
    """Has nothing for later."""

    def attach(self, pipeline):
        if pipeline is not None:
            pipeline.note("no")  # told


def registered(works):
    return works


@registered
class Ways(Stage):
    """Has two ways in one line."""

    def attach(self, pipeline):
        self.ways = [lambda value: value, lambda value: value - 1]


class Derived(Plain):
    """Does the same."""


LINES = {text: number for number, text in enumerate(Path(__file__).read_text().splitlines(), start=1)}


def lines(*parts):
    """Where these texts stand."""
    return [
        f"test_stage_coverage.py:{next(number for line, number in LINES.items() if part in line)}" for part in parts
    ]


@pytest.fixture
def stage():
    return Derived(None)


def watched(*actions):
    coverage = CodeCoverage([Derived])
    with coverage.watching():
        for action in actions:
            action()
    return coverage


def test_statements_and_lambdas_that_never_ran_are_named(stage):
    coverage = watched(lambda: stage.attach(None), lambda: stage.changed(1), lambda: stage.held(1))
    assert coverage.missed() == lines("# too large", "3 * value", "# nothing", "# no number")
    assert not coverage.is_idle


def test_a_branch_that_is_taken_another_time_counts(stage):
    coverage = watched(lambda: stage.attach(None), *(lambda n=n: stage.changed(n) for n in (-1, 0, 1, 12)))
    assert coverage.missed() == lines("2 * value", "3 * value", "# no number")


def test_who_is_not_called_once_the_pipeline_stands_is_idle(stage):
    assert watched(lambda: stage.attach(None)).is_idle
    assert not watched(lambda: stage.attach(None), lambda: stage.other(1)).is_idle


def test_who_does_all_while_it_is_built_is_not_idle():
    coverage = CodeCoverage([Once])
    with coverage.watching():
        Once(None).attach(None)
    assert coverage.missed() == lines("# told")
    assert not coverage.is_idle


def test_who_was_never_built_or_is_the_runners_own_says_nothing():
    assert watched().missed() == []
    assert not watched().is_idle
    assert CodeCoverage([Stage]).missed() == []


def test_a_debugger_is_left_alone(stage):
    def debugger(frame, event, argument):
        return None

    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        coverage = watched(lambda: stage.attach(None))
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)
    assert coverage.missed() == []


def test_what_a_subject_runs_is_watched_and_nothing_else(stage):
    class State:
        def state_dict(self):
            stage.other(1)
            return {}

    def build():
        stage.attach(None)
        return Subject(lambda batch: stage.held(batch), {"state": State()})

    coverage = CodeCoverage([Derived])
    subject = coverage.watched(build)()
    assert coverage.is_idle
    assert subject.step(3) == 6
    subject.state["state"].state_dict()
    assert lines("2 * value")[0] not in coverage.missed()
    assert lines("3 * value")[0] in coverage.missed()
    assert not coverage.is_idle
    assert sys.gettrace() is None


class Terse(Stage):
    """Branches within lines."""

    def attach(self, pipeline):
        self.changed(1)

    def changed(self, value):
        doubled = 2 * value if value < 10 else abs(value)  # one of two
        for number in range(2):
            if number == 0 and (value < 10 or abs(value)):  # the last of three
                continue
        return doubled if doubled < 7 else None


def test_branches_of_expressions_that_never_ran_are_named():
    coverage = CodeCoverage([Terse])
    with coverage.watching():
        Terse(None).attach(None)
        Terse(None).changed(7)
    assert coverage.missed() == lines("# one of two", "# the last of three")


class Set(Stage):
    """Changes a setting of torch and puts it back."""

    def attach(self, pipeline):
        torch.set_float32_matmul_precision("medium")
        with torch.no_grad():
            self.inner()
        torch.set_float32_matmul_precision("highest")

    def inner(self):
        Path()


def test_settings_that_are_changed_while_others_are_called_are_named():
    coverage = CodeCoverage([Set])
    with coverage.watching():
        Set(None).attach(None)
    assert coverage.settings["torch.get_float32_matmul_precision"] == ("highest", "medium")
    assert not any("grad" in name for name in coverage.settings)


def test_of_two_nameless_functions_in_a_line_the_one_that_never_ran_is_named():
    ways, coverage = Ways(None), CodeCoverage([Ways])
    with coverage.watching():
        ways.attach(None)
        ways.ways[0](1)
    assert coverage.missed() == [f"test_stage_coverage.py:{inspect.getsourcelines(Ways.attach)[1] + 1}"]


def test_of_a_module_beside_what_was_called_is_asked(monkeypatch, tmp_path):
    beside = ["def called(x):", "    return x if x < 1 else -x", "def spare():", "    return 0"]
    (tmp_path / "beside.py").write_text("\n".join(beside))
    owning = [
        "import beside, compiled, runner.api",
        "class Own(runner.api.Stage):",
        "    attach = lambda *_: beside.called(0)",
    ]
    (tmp_path / "owning.py").write_text("\n".join(owning))
    monkeypatch.syspath_prepend(tmp_path)
    compiled = types.ModuleType("compiled")  # has no source
    compiled.__file__ = str(tmp_path / "compiled.so")
    (tmp_path / "compiled.so").write_bytes(b"\x7fELF\0")
    monkeypatch.setitem(sys.modules, "compiled", compiled)
    owning = importlib.import_module("owning")
    coverage = CodeCoverage([owning.Own])
    with coverage.watching():
        owning.Own(None).attach(None)
    assert coverage.missed() == ["beside.py:2"]
