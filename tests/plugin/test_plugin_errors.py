"""What goes wrong in a plugin, said with class, method and file."""

import re
import sys

import pytest
import torch
from running import tiny
from torch import nn
from toy_runs import toy

import runner
from runner.api import Learner, RunnerError
from runner.plugin.implementation import implementation_of
from runner.plugin.plugin_errors import told
from runner.plugin.registry import Registry
from runner.system.errors import PluginError, UsageError
from runner.training.pipeline import assemble
from runner.training.step import Step

HERE = """
from mistakes_help import helped
def works(number):
    return helped(number)
"""


def test_an_exception_of_a_plugin_is_told_with_the_lines_of_its_own_files(tmp_path, monkeypatch):
    file, beside = tmp_path / "mistaken.py", tmp_path / "mistakes_help.py"
    file.write_text(f"from toys import ToyConfig\nclass Mine(ToyConfig):\n    kind = 'mine'\n{HERE}")
    beside.write_text("def helped(number):\n    return [][number]\n")
    monkeypatch.chdir(tmp_path)
    works = vars(sys.modules[Registry([file]).get("model", "mine").__module__])["works"]
    with pytest.raises(PluginError) as raised, told():
        works(3)
    first, *_, middle, last = str(raised.value).splitlines()  # this test stands beside a plugin file, too
    assert [first, middle, last] == [
        "helped in mistakes_help.py:2: IndexError: list index out of range",
        "    mistaken.py:7, works: return helped(number)",
        "    mistakes_help.py:2, helped: return [][number]",
    ]
    assert isinstance(raised.value.__cause__, IndexError)


def _making(name, built=True):
    """A learner that makes one role, and is built as a learner or not."""

    def make(self, config, shapes, context):
        if built:
            Learner.__init__(self, config, shapes, context)
        self.role(name, nn.Linear(1, 1))

    return make


MISTAKES = {
    r"Toy\.build in .*test_plugin_errors\.py:\d+ should return a module with parameters to train, got NoneType": (
        "toy", "works", "build", lambda *_: None,
    ),
    r"Pair makes a role 'generatr', which PairConfig\.roles does not have - did you mean 'generator'": (
        "toy_pair", "works", "__init__", _making("generatr"),
    ),
    r"PairConfig\.roles names 'discriminator', which Pair never makes: make it with self\.role": (
        "toy_pair", "works", "__init__", _making("generator"),
    ),
    r"Pair\.__init__ in .*test_plugin_errors\.py:\d+ should call super\(\)\.__init__\(config, shapes, context\)": (
        "toy_pair", "works", "__init__", _making("generator", built=False),
    ),
    r"PairConfig\.slots names 'juge', and Pair has no such method - did you mean 'judge'": (
        "toy_pair", "face", "slots", frozenset({"juge"}),
    ),
    r"PairConfig\.implementation should be a Learner, a Source, a Stage, a Callback or a ScheduleState, got 'int'": (
        "toy_pair", "face", "implementation", int,
    ),
    r"class Toy in .*toys\.py defines 'couples_samples', which .* from the settings: move it to ToyConfig": (
        "toy", "works", "couples_samples", True,
    ),
    r"class Toy in .*toys\.py defines 'draws', which": ("toy", "works", "draws", lambda _: True),
    r"class Pair in .*toys\.py defines 'objective', which": ("toy_pair", "works", "objective", None),
}  # fmt: skip


@pytest.mark.parametrize("said", MISTAKES)
def test_a_mistake_is_one_message(said, tmp_path, monkeypatch):
    kind, owner, name, wrong = MISTAKES[said]
    recipe = toy(tmp_path, f"model.kind={kind}", "train.updates=4")
    cls = type(recipe.model) if owner == "face" else implementation_of(type(recipe.model))
    monkeypatch.setattr(cls, name, wrong, raising=False)
    with pytest.raises(RunnerError, match=said):
        assemble(recipe)


def test_names_of_settings_may_mean_something_else_in_a_class(tmp_path, monkeypatch):
    """A method that shares its name with a value, and a method of the runner's own class."""
    recipe = toy(tmp_path, "train.updates=4")
    cls = implementation_of(type(recipe.model))
    monkeypatch.setattr(cls, "page", lambda _: "text", raising=False)
    monkeypatch.setattr(cls, "predict", cls.predict)
    assert assemble(recipe)


def test_settings_and_plugins_of_a_wrong_form_are_said():
    with pytest.raises(UsageError, match=r"plugins should be a list of files: \['cls\.py'\]"):
        runner.train("digits_classifier", plugins="cls.py")
    with pytest.raises(UsageError, match=re.escape("as {'train.epochs': 2}, got ['train.epochs=2']")):
        runner.train("digits_classifier", set=["train.epochs=2"])


class OneInput(nn.Linear):
    def forward(self, x, scale=1.0, *, bias=None):
        return super().forward(x)


class TwoInputs(nn.Linear):
    def forward(self, x, kind):
        return super().forward(x)


class NamedInput(nn.Linear):
    def forward(self, x, *, mask):
        return super().forward(x) * mask


class ThreeInputs(nn.Linear):
    def forward(self, x, kind, weight, scale=1.0):
        return super().forward(x)


@pytest.mark.parametrize(
    ("module", "arguments"), [(TwoInputs, "x, kind"), (NamedInput, "x, mask="), (ThreeInputs, "x, kind, weight")]
)
def test_a_module_of_several_inputs_needs_the_methods_that_give_them(tmp_path, module, arguments):
    learner = assemble(toy(tmp_path, "train.updates=4")).learner
    learner.module = module(2, 2)
    message = rf"forward takes \({re.escape(arguments)}\), .* write Toy.inputs\(batch\), .* and Toy.predict\(inputs\)"
    with pytest.raises(RunnerError, match=message):
        learner.inputs({"x": torch.zeros(1, 2)})
    learner.module = OneInput(2, 2)
    assert learner.inputs({"x": torch.zeros(1, 2)}).shape == (1, 2)


def test_a_module_is_called_with_inputs_by_name(tmp_path):
    learner = assemble(toy(tmp_path, "train.updates=4")).learner
    learner.module = NamedInput(2, 2)
    x, mask = torch.ones(1, 2), torch.tensor([0.0, 1.0])
    assert torch.equal(learner.slots.forward(x, mask=mask), learner.module(x, mask=mask))


def test_a_long_error_is_a_paragraph(tmp_path, monkeypatch):
    """A recursion, a message of many lines, an exit, and an error in an update with its batch."""
    file = tmp_path / "deep.py"
    file.write_text(
        "from toys import ToyConfig\nclass Deep(ToyConfig):\n    kind = 'deep'\n"
        "def dive(depth):\n    return dive(depth + 1)\n"
        "def shout(_):\n    raise ValueError('\\n'.join(map(str, range(100))))\n"
        "def leave(code):\n    raise SystemExit(code)\n"
    )
    module = vars(sys.modules[Registry([file]).get("model", "deep").__module__])
    for name, said in (("dive", "RecursionError"), ("shout", "... (92 more lines)"), ("leave", "sys.exit(3) was")):
        with pytest.raises(PluginError) as raised, told():
            module[name](3)
        assert said in str(raised.value)
        assert len(str(raised.value).splitlines()) < 20
    recipe = toy(tmp_path, "model.kind=toy_unlucky", "model.seed=5", "train.updates=4")
    step = Step(assemble(recipe))
    with pytest.raises(PluginError) as raised, told():
        step()
    assert str(raised.value).endswith("\n    update 1, on the batch: words int64 [8, 6]")


RAISED = {
    "ExceptionGroup('all', [ValueError('first'), ExceptionGroup('two', [KeyError('k'), OSError(2, 'gone')])])": [
        "ExceptionGroup: all (2 sub-exceptions)", "    ValueError: first", "    ExceptionGroup: two (2 sub-exceptions)",
        "        KeyError: 'k'", "        FileNotFoundError: [Errno 2] gone",
    ],
    "BaseExceptionGroup('all', [GeneratorExit('x')])": [
        "BaseExceptionGroup: all (1 sub-exception)", "    GeneratorExit: x",
    ],
    "ValueError('one\\ntwo\\n\\nfour')": ["ValueError: one", "two", "", "four"],
    "GeneratorExit('bb')": ["GeneratorExit: bb"],
}  # fmt: skip
"""What a plugin raises, and the message."""


@pytest.mark.parametrize("raised", RAISED)
def test_all_of_a_message_belongs_to_its_paragraph(raised, tmp_path):
    file = tmp_path / "raising.py"
    file.write_text(
        f"from toys import ToyConfig\nclass R(ToyConfig):\n    kind = 'r'\ndef fail():\n    raise {raised}\n"
    )
    fail = vars(sys.modules[Registry([file]).get("model", "r").__module__])["fail"]
    with pytest.raises(PluginError) as caught, told():
        fail()
    first, *others = RAISED[raised]
    headline, *lines = str(caught.value).splitlines()
    assert headline.endswith(f"raising.py:5: {first}")
    assert lines[: len(others)] == [f"    {line}" for line in others]
    assert all(line.startswith("    ") for line in lines)


@pytest.mark.parametrize("unlucky", [1, 3])
def test_an_error_in_an_evaluation_says_on_which_held_out_batch(unlucky, monkeypatch):
    pipeline = assemble(tiny("digits_classifier", "data.held_out=1000"))
    metrics, asked = pipeline.learner.metrics, []

    def fail(batch):
        asked.append(batch)
        if len(asked) == unlucky:
            raise ValueError("no metric")
        return metrics(batch)

    monkeypatch.setattr(pipeline.learner, "metrics", fail)
    with pytest.raises(ValueError, match="no metric") as caught:
        pipeline.source.evaluate(pipeline.learner)
    (note,) = caught.value.__notes__
    assert note.startswith(f"held-out batch {unlucky}: ")
    assert "image float32 [64, " in note
