"""Plugins that the cells of a notebook define: the page runs as in a kernel, and what cannot work is refused."""

import io
import linecache
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from default_objectives import LineConfig, PointsConfig

import runner
from runner.api import Callback, CallbackConfig, Contract, Exact, ScheduleConfig, StageConfig
from runner.child.spawn import Child
from runner.plugin.class_digest import digest_classes
from runner.plugin.registry import SECTIONS, Registry
from runner.recipe.loader import load
from runner.training import progress_lines
from runner.training.progress_lines import ProgressLines, is_notebook

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
RECIPE = {
    "name": "line",
    "device": "cpu",
    "model": {"kind": "line"},
    "data": {"kind": "points"},
    "optimizer": {"kind": "sgd", "lr": 0.1},
    "train": {"updates": 4, "batch_size": 8},
    "tracking": {"system_metrics": False},
}


def cells():
    """The cells of the page, as a reader copies them."""
    section = PAGE.read_text().split("## In a notebook\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def execute(sources):
    """Executes cells in ``__main__`` as a kernel does, whose module has no file."""
    namespace = vars(sys.modules["__main__"])
    namespace.pop("__file__", None)
    for number, source in enumerate(sources):
        name = f"/tmp/ipykernel_0/{number}.py"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), namespace)


INTERRUPT = """
import os, signal
# Which a process in the background of a script ignores.
signal.signal(signal.SIGINT, signal.default_int_handler)
from torch.optim.optimizer import register_optimizer_step_post_hook
updates = 0
def interrupt(*_):
    global updates
    updates += 1
    if updates == 5:
        os.kill(os.getpid(), signal.SIGINT)
register_optimizer_step_post_hook(interrupt)
"""
MORE = """
first = result
assert first.resumed_at is not None and first.status == "FINISHED", first
again = runner.train(RECIPE, plugins=PLUGINS)
assert again.metrics["eval/loss"] == first.metrics["eval/loss"]
again = runner.train(RECIPE, {"data.workers": 2, "train.epochs": 1}, plugins=PLUGINS, progress=True)
assert again.status == "FINISHED"
updates = 0
stopped = runner.train(RECIPE, plugins=PLUGINS)
assert stopped.status == "STOPPED"
print("REPORTED")
"""
CHANGED = """
class CurveNet(CurveNet):
    def loss(self, batch, noise, progress):
        error = self.slots.forward(batch["x"]) - batch["y"]
        return Loss(error.abs().sum(), len(error))
try:
    runner.resume(stopped, plugins=PLUGINS)
except runner.RunnerError as error:
    print(error)
print(runner.resume(stopped, plugins=PLUGINS, allow_drift=True).status)
try:
    CurveNet.loss = lambda *_: 1 / 0
    runner.train(RECIPE, plugins=PLUGINS)
except runner.RunnerError as error:
    print(error)
"""


def test_the_page_runs_in_a_kernel_and_resumes_after_an_interruption(migrated_workspace, tmp_path):
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_notebooks import *; play()"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    page, more = process.stdout.split("REPORTED\n")
    assert re.search(r"^0\.\d+ tensor\(\[", page, re.MULTILINE)
    assert re.search(r"^curve: 1/1 epoch, ended after .*; eval loss 0\.\d+", page, re.MULTILINE)
    drift, status, failure = more.split("\n", 2)
    assert re.search(r"plugins\.model\.curve_net: .*; undo that, or accept it with allow_drift=True$", drift)
    assert status == "FINISHED"
    assert re.match(r"\S*<lambda> in .*: ZeroDivisionError: division by zero", failure)


def play():
    """Runs the page, interrupts its training, and then does what the page describes."""
    first, second, training, *more = cells()
    execute([first, second, INTERRUPT, training, *more, MORE, CHANGED])


class OwnScheduleConfig(ScheduleConfig):
    """A constant learning rate."""

    kind: ClassVar[str] = "own_schedule"


class OwnCallbackConfig(CallbackConfig):
    """Does nothing."""

    kind: ClassVar[str] = "own_callback"
    implementation = "OwnCallback"


class OwnCallback(Callback):
    """Does nothing."""


class OwnStageConfig(StageConfig):
    """Does nothing."""

    kind: ClassVar[str] = "own_stage"
    implementation = "OwnStage"

    def contract(self, setting: Any) -> Contract:
        return Exact()


OWN = {
    "model": LineConfig(),
    "data": PointsConfig(),
    "lr_scheduler": OwnScheduleConfig.model_construct(),
    "optimization": {"own_stage": OwnStageConfig.model_construct()},
    "inference": {"own_stage": OwnStageConfig.model_construct()},
    "callbacks": {"own_callback": OwnCallbackConfig.model_construct()},
}


@pytest.mark.parametrize("section", SECTIONS)
def test_a_child_refuses_classes_of_every_section(section, monkeypatch):
    config = OWN[section]
    cls = type(next(iter(config.values())) if isinstance(config, dict) else config)
    recipe = load("digits_classifier", [], Registry())
    recipe = replace(recipe, **{"stages" if section == "optimization" else section: config})
    monkeypatch.setattr("runner.child.spawn.MODULES", {cls.__module__})
    with pytest.raises(runner.RunnerError, match=f"class {cls.__name__} of .* cannot be imported by a child process"):
        Child("runner.training.batch_size_probe", recipe)


def defined(source):
    """Returns the class ``A`` of a cell."""
    names = {"__name__": "cell"}
    exec(source, names)
    return names["A"]


BODY = "class A:\n    x = 1\n    def f(self): return 2 in {3, 4}\n"


@pytest.mark.parametrize(
    ("source", "is_equal"),
    [
        (f"# a comment\n\n{BODY}", True),
        (BODY.replace("x = 1", "x = 2"), False),
        (BODY.replace("3, 4", "3, 5"), False),
        (BODY.replace("def f(self)", "@staticmethod\n    def f()").replace("2 in", "1 in"), False),
        (BODY.replace("def f", "@property\n    def f"), True),
        (f"class B:\n    y = 1\n{BODY.replace('A:', 'A(B):')}", False),
    ],
)
def test_the_digest_of_a_class_follows_its_code(source, is_equal):
    assert (digest_classes(defined(source)) == digest_classes(defined(BODY))) == is_equal


def test_the_digest_of_a_class_is_that_of_another_process():
    code = f"from test_notebooks import *; print(digest_classes(defined({BODY!r}), LineConfig))"
    folder = str(Path(__file__).parent)
    digests = set()
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": folder}
        digests.add(subprocess.check_output([sys.executable, "-c", code], env=environment, text=True))
    assert digests == {f"{digest_classes(defined(BODY), LineConfig)}\n"}


@pytest.mark.parametrize(("shell", "expected"), [(None, False), (object(), True)])
def test_a_notebook_is_a_shell_of_ipython(shell, expected, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert is_notebook() == expected
    monkeypatch.delitem(sys.modules, "IPython")
    assert not is_notebook()


def test_lines_are_plain_text_and_become_rare(monkeypatch):
    recipe = load(RECIPE, [], Registry([LineConfig, PointsConfig]))
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(progress_lines.time, "monotonic", lambda: clock.seconds)
    output = io.StringIO()
    with redirect_stdout(output), ProgressLines(recipe) as display:
        for second in range(3600):
            clock.seconds = float(second)
            with display.phase("\x1b[31mtraining"):
                display.improved(0.25)
                display.advance(second // 900, {"eval/loss": 0.5, "train/loss": 1.0})
    lines = output.getvalue().splitlines()
    assert lines[0] == "line: 0/4 updates, starting"
    assert lines[-1].startswith("line: 3/4 updates, ended after ")
    assert "eval loss 0.5" in lines[-1]
    assert "\x1b" not in output.getvalue()
    assert 60 < len(lines) < 200
