"""What a plugin lacks is said before anything is built, and without importing what it needs."""

import subprocess
import sys

import pytest
from running import forked, runner

from runner.plugin.implementation import imported
from runner.plugin.registry import Registry
from runner.plugin.static_checks import describe_implementation, lacking
from runner.system.errors import UsageError

FACES = '''
from runner.api import DatasetConfig, GradientLearnerConfig, LearnerConfig, StageConfig, Exact


class NetConfig(GradientLearnerConfig):
    """A net."""
    kind, learns_from = "my_net", "pictures"
    implementation = "heavy_works:Net"


class PlainConfig(LearnerConfig):
    """A learner with an update of its own."""
    kind, learns_from = "my_plain", "pictures"
    implementation = "heavy_works:Plain"


class PicturesConfig(DatasetConfig):
    """Pictures."""
    kind, provides = "my_pictures", "pictures"
    implementation = "heavy_works:Pictures"


class SwitchConfig(StageConfig):
    """A stage."""
    kind, phase = "my_switch", 1
    implementation = "heavy_works:Switch"
    def contract(self, setting):
        return Exact()
'''
HEAD = """
import sys
sys.stderr.write("imported\\n")
from torch import nn
from runner.api import DatasetSource, GradientLearner, Learner, Stage
class Base(GradientLearner):
    def build(self, config, shapes, context):
        return nn.Linear(1, 1)
"""
WHOLE = {
    "Net": "class Net(Base):\n    def loss(self, batch, noise, progress): ...\n",
    "Plain": "class Plain(Learner):\n    def update(self, batch, noise, progress): ...\n"
    "    def predict(self, inputs): ...\n    def metrics(self, batch): ...\n",
    "Pictures": "class Pictures(DatasetSource):\n    datasets = lambda self, config: ({}, {})\n",
    "Switch": "class Switch(Stage):\n    def attach(self, pipeline): ...\n",
}
RECIPE = """
name: mine
model: {kind: my_net}
data: {kind: my_pictures}
train: {updates: 3}
optimization: {my_switch: on}
"""


@pytest.fixture
def validated(tmp_path, monkeypatch):
    """What ``runner validate`` says of a recipe with these works, in a process that has imported everything."""

    def validated(*sets, faces=FACES, validate=forked, **changed):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "faces.py").write_text(faces)
        (tmp_path / "heavy_works.py").write_text(HEAD + "\n".join((WHOLE | changed).values()))
        (tmp_path / "mine.yaml").write_text(RECIPE)
        pairs = [part for assignment in sets for part in ("--set", assignment)]
        done = validate("validate", "mine.yaml", "--plugin", "faces.py", *pairs)
        assert "imported" not in done.stderr
        lines = [line.removeprefix("error: ") for line in done.stderr.splitlines()]
        return [line for line in lines if line.startswith(("mine.yaml", "override"))]

    return validated


def test_works_that_are_whole_are_valid(validated):
    assert validated() == []
    assert validated("model.kind=my_plain") == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"Net": "class Net(Base): ...\n"},
            "mine.yaml:3:15: error: model.kind: class Net in heavy_works.py has no method 'loss'",
        ),
        (
            {"Net": "class Net(GradientLearner):\n    hidden = 3\n"},
            "mine.yaml:3:15: error: model.kind: class Net in heavy_works.py has no methods 'build', 'loss'",
        ),
        (
            {"Pictures": "class Pictures(DatasetSource): ...\n"},
            "mine.yaml:4:14: error: data.kind: class Pictures in heavy_works.py has no method 'datasets'",
        ),
        (
            {"Switch": "class Switch(Stage): ...\n"},
            "mine.yaml:6:16: error: optimization.my_switch: class Switch in heavy_works.py has no method 'attach'",
        ),
    ],
)
def test_what_is_missing_is_said_in_one_line_with_class_and_file(validated, changed, message):
    assert validated(**changed) == [message]


def test_a_learner_without_metrics_is_told_so_where_the_source_evaluates_on_held_out_batches(validated):
    plain = WHOLE["Plain"].replace("    def metrics(self, batch): ...\n", "")
    (said,) = validated("model.kind=my_plain", Plain=plain)
    assert said.endswith("class Plain in heavy_works.py has no method 'metrics', with which Pictures evaluates")
    own = WHOLE["Pictures"] + "    def evaluate(self, learner): ...\n    def rehearse(self, learner, batch): ...\n"
    assert validated("model.kind=my_plain", Plain=plain, Pictures=own) == []


def test_a_source_says_that_it_draws_by_a_method_and_by_the_endings_of_its_files(validated, tmp_path):
    render = WHOLE["Pictures"] + "    def render(self, learner, path): ...\n"
    where = "mine.yaml:4:14: error: data.kind: class Pictures in heavy_works.py"
    (said,) = validated(Pictures=render)
    assert said == f"{where} has the method 'render', and PicturesConfig.pictures is empty"
    kind = '    kind, provides = "my_pictures", "pictures"\n'
    drawn = FACES.replace(kind, f'{kind}    pictures = (".png", ".gif")\n')
    (said,) = validated(faces=drawn)
    assert said.startswith(f"{where} has no method 'render', although PicturesConfig.pictures contains .png")
    assert validated(faces=drawn, Pictures=render) == []


@pytest.mark.parametrize(
    "net",
    [
        "Net = type('Net', (Base,), {})\n",  # made, not written
        "class Net(nn.Module, Base): ...\n",  # of something whose source is in a package that nobody has imported
        "class Net(Net): ...\n",
    ],
)
def test_what_cannot_be_read_is_left_to_the_run(validated, net):
    assert validated(Net=net, validate=runner) == []


def test_every_plugin_here_can_be_read_without_importing_torch():
    code = (
        "import sys\nfrom runner.plugin.registry import SECTIONS, Registry\n"
        "from runner.plugin.static_checks import describe_implementation\n"
        "registry = Registry()\n"
        "kinds = [(section, kind) for section in SECTIONS for kind in registry.kinds(section)]\n"
        "classes = [describe_implementation(registry.get(*pair)) for pair in kinds]\n"
        "assert len(classes) > 10 and all(classes) and not any(each.abstract for each in classes)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_works_that_are_imported_are_asked_themselves(tmp_path):
    path = tmp_path / "both.py"
    path.write_text(
        "from torch import nn\nfrom runner.api import GradientLearner, GradientLearnerConfig\n"
        "class BothConfig(GradientLearnerConfig):\n    kind, learns_from = 'both', 'pictures'\n"
        "    implementation = 'Both'\n"
        "class Both(nn.Module, GradientLearner):\n    def build(self, config, shapes, context): ...\n"
    )
    face = Registry([path], installed=()).get("model", "both")
    message = f"class Both in {path} has no method 'loss'"
    assert lacking(face) == message
    with pytest.raises(UsageError) as caught:
        imported(face())
    assert str(caught.value) == message
    assert describe_implementation(face).owners["metrics"] == "runner.plugin.learner.GradientLearner"
