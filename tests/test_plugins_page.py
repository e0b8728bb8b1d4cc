"""Every block of code in the page on plugins is one of a file that is tested, or is run here."""

import ast
import inspect
import math
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from pages import blocks_of
from running import forked, result_of

import runner
from runner.api import EndTraining, LearnerConfig, SourceConfig, Stage, StageConfig, Statistical
from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome
from runner.recipe.loader import load
from runner.verify.statistical import statistical
from runner.verify.training_pool import Milestone, TrainingOrder
from runner.verify.variants import contract_of

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "plugins.md"
ELSEWHERE = [
    path.read_text()
    for path in [*DOCS.glob("example_*/**/*.*"), *DOCS.glob("example_*.*")]
    if path.is_file() and path.suffix != ".pyc"
]
"""The files of the examples, which have tests of their own."""


def alone(languages):
    """Blocks that are no part of an example's file."""
    return [block for block in blocks_of(PAGE, languages) if not any(block.strip() in text for text in ELSEWHERE)]


MINE, STREAM, SAMPLER, WEIGHTS, HALVING, ENDING, TEST = alone("python")
(RECIPE,) = alone("yaml")


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch, migrated_workspace):
    """A folder with the page's files, as a reader has them."""
    files = {
        "mine.py": MINE,
        "mine.yaml": RECIPE,
        "stream.py": STREAM,
        "sampler.py": SAMPLER,
        "weights.py": WEIGHTS,
        "halving.py": HALVING,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


def commands():
    return re.findall(r"^\$ runner (.*mine\.py.*)$", PAGE.read_text(), re.MULTILINE)


def test_a_model_of_ones_own_takes_thirty_lines():
    assert sum(bool(line) for line in MINE.splitlines()) <= 30
    assert [len(commands()), commands()[0]] == [7, "run mine.yaml --plugin mine.py"]


def test_the_first_command_learns():
    result = result_of(forked(*commands()[0].split(), "--json", "--quiet"))
    assert result["status"] == "FINISHED"
    assert result["metrics"]["eval/loss"] < 0.4
    assert {name for name in result["metrics"] if name.startswith("eval/")} == {"eval/loss"}


@pytest.mark.usefixtures("traced_only")
def test_the_second_command_has_its_stages():
    result = result_of(forked(*commands()[1].split(), "--json", "--quiet", "--set", "train.epochs=1"))
    assert {kind for kind, stage in result["stages"].items() if stage["active"]} == {
        "compile", "fused_optimizer", "gradient_accumulation",
    }  # fmt: skip


@pytest.mark.usefixtures("traced_only")
def test_the_third_command_passes():
    report = result_of(forked(*commands()[2].split(), "--json", "--horizon", "0", "--updates", "2"))
    assert {row["name"]: row["verdict"] for row in report["stages"]} == dict.fromkeys(
        ["compile", "fused_optimizer", "all"], "PASS"
    )


@pytest.mark.parametrize("schedule", [{"kind": "square"}, {"kind": "halving", "warmup": 0.1}])
def test_the_schedules_train(schedule):
    lengths = {"train.epochs": 4, "train.evaluate_every": 2, "train.checkpoint_every": 4}
    result = runner.train("mine.yaml", set=lengths | {"lr_scheduler": schedule}, plugins=["mine.py", "halving.py"])
    assert result.status == "FINISHED"
    assert sum("halving.py" in command for command in commands()) == 2


@pytest.mark.parametrize("kind", ["stream", "sampler"])
def test_the_other_sources_feed_the_same_learner(kind):
    settings = {"data.kind": f"my_{kind}", "train.epochs": None, "train.updates": 300, "train.ema": None}
    settings |= {"train.evaluate_every": 150, "train.checkpoint_every": 150}
    result = runner.train("mine.yaml", set=settings, plugins=["mine.py", f"{kind}.py"])
    metric, bound = {"stream": ("loss", 2.0), "sampler": ("accuracy", 0.3)}[kind]
    value = result.metrics[f"eval/{metric}"]
    assert value < bound if kind == "stream" else value > bound


ACTING = """
from sampler import Sampler, SamplerConfig

class ActingConfig(SamplerConfig):
    kind = "my_acting"
    implementation = "Acting"

class Acting(Sampler):
    activities = {{"{slot}": "collecting"}}

    def __init__(self, config, context):
        super().__init__(config, context)
        self.context = context
        context.slots.define({slot}=self.collect)

    def bind(self, learner):
        self.learner = learner

    def collect(self, batch):
        assert self.learner.predict(batch["image"]).shape == (len(batch["label"]), 10)
        return batch

    def draw(self, batch_size, progress):
        return self.context.slots.{slot}(super().draw(batch_size, progress))
"""


@pytest.mark.parametrize("slot", ["collect", "simulate", "explore_here"])
def test_a_source_may_act_with_the_model_and_report_its_time(slot, tmp_path):
    text = PAGE.read_text()
    assert all(part in text for part in ("`bind(learner)`", "`activities = {", "context.slots.define(collect="))
    (tmp_path / "acting.py").write_text(ACTING.format(slot=slot))
    settings = {"data.kind": "my_acting", "train.ema": None, "train.evaluate_every": None}
    settings |= {"train.epochs": None, "train.updates": 4, "train.checkpoint_every": None}
    result = runner.train("mine.yaml", set=settings, plugins=["mine.py", "sampler.py", "acting.py"])
    assert 0 < result.metrics[f"perf/{slot}_share"] < 1


@pytest.mark.parametrize("slot", ["update", "evaluate", "checkpoint"])
def test_a_slot_that_the_runner_times_is_no_activity(slot, tmp_path):
    (tmp_path / "acting.py").write_text(ACTING.format(slot=slot))
    settings = {"data.kind": "my_acting", "train.epochs": None, "train.updates": 4}
    with pytest.raises(runner.RunnerError, match=slot):
        runner.train("mine.yaml", set=settings, plugins=["mine.py", "sampler.py", "acting.py"])


@pytest.mark.parametrize(("loss_with_amp", "outcome"), [(0.5, Outcome.PASS), (0.51, Outcome.PASS), (1.5, Outcome.FAIL)])
def test_amp_has_a_verdict_on_the_first_model(loss_with_amp, outcome):
    registry = Registry(["mine.py"])
    recipe = load("mine.yaml", ["optimization.amp=on"], registry)
    assert contract_of(recipe, "amp").__class__ is Statistical
    without = TrainingOrder({"seed": 1, "train": {}})
    with_amp = TrainingOrder({"seed": 1, "train": {}, "optimization": {"amp": {}}})

    class Measured:
        """Losses of trainings that were not carried out."""

        seconds_left = math.inf

        def say(self, text):
            assert text.startswith("loss, ")

        def run(self, trainings, seeds, length):
            losses = {id(without): 0.5, id(with_amp): loss_with_amp}
            return [
                Milestone(length, {"loss": 2.0}, {"loss": losses[id(training)]}, 2, 1)
                for training in trainings
                for _ in seeds
            ]

    assert statistical(without, with_amp, 12, recipe.objective, Measured(), 8).outcome is outcome


@pytest.mark.parametrize("solved", [True, False])
def test_a_source_can_end_a_training(solved):
    names = {}
    exec(ENDING, names)
    source = SimpleNamespace(solved=lambda: solved)
    with pytest.raises(EndTraining, match="all tasks are solved") if solved else nullcontext():
        assert names["draw"](source, 8, None) is None


def test_the_test_passes():
    names = {}
    exec(compile(TEST, str(PAGE), "exec"), names)
    names["test_it_learns"]()


@pytest.mark.parametrize("base", [LearnerConfig, SourceConfig, StageConfig, Stage], ids=lambda base: base.__name__)
def test_names_that_the_page_gives_exist(base):
    """Whatever of a base class the page writes as code is an attribute of it."""
    section = {"LearnerConfig": "roles slots", "SourceConfig": "units provides headline objective shapes_vary"}
    section |= {"StageConfig": "phase wraps claims requires contract inactive implementation prepares"}
    section |= {"Stage": "attach prepare state_dict"}
    for name in section[base.__name__].split():
        assert re.search(rf"`{name}\b", PAGE.read_text())
        assert hasattr(base, name) or any(name in inspect.get_annotations(parent) for parent in base.__mro__)


def test_every_block_of_python_parses():
    for block in blocks_of(PAGE, "python"):
        ast.parse(block if not block.startswith(" ") else f"class _:\n{block}")
