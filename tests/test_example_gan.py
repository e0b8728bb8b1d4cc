"""The GAN of the docs: two optimizers that are not stepped equally often, on the free storey of learners."""

import signal
from pathlib import Path

import pytest
from children import start
from interrupted import learnt, same, train
from running import NoDisplay

from runner.plugin.implementation import implementation_of
from runner.plugin.registry import Registry
from runner.plugins.stages.amp import AmpConfig
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.tracking import Workspace
from runner.training.run import run

DOCS = Path(__file__).parent.parent / "docs"
PLUGIN, RECIPE = DOCS / "example_gan.py", DOCS / "example_gan.yaml"
SHORT = ("train.updates=24", "train.log_every=12", "train.evaluate_every=12", "tracking.system_metrics=false")
EVERY = {"d_loss": 1, "g_loss": 2, "r1": 4}
"""Updates between two values."""

pytestmark = pytest.mark.usefixtures("migrated_workspace")


def gan(*sets):
    """The example's recipe, made short, and the registry that knows it."""
    registry = Registry([PLUGIN])
    return load(RECIPE, [*SHORT, *sets], registry), registry


def train_here(*sets):
    recipe, registry = gan(*sets)
    return run(recipe, registry, Workspace(), NoDisplay())


def test_it_takes_at_most_90_lines():
    assert len(PLUGIN.read_text().splitlines()) <= 90


def test_every_scalar_is_logged_as_the_mean_of_the_updates_that_returned_it(monkeypatch):
    recipe, registry = gan()
    learner, outputs = implementation_of(type(recipe.model)), []
    update = learner.update

    def kept(self, *arguments):
        outputs.append(update(self, *arguments))
        return outputs[-1]

    monkeypatch.setattr(learner, "update", kept)
    result = run(recipe, registry, Workspace(), NoDisplay())
    assert len(outputs) == 24
    for name, every in EVERY.items():
        returned = [number for number, output in enumerate(outputs, 1) if name in output]
        assert returned == [number for number in range(1, 25) if number % every == 0]
        values = [float(output[name]) for output in outputs[12:] if name in output]
        total = 0.0
        for value in values:
            total += value
        assert result.metrics[f"train/{name}"] == total / len(values)


@pytest.mark.parametrize("sets", [(), ("optimization.amp=on",)], ids=["as it is", "amp"])
def test_a_run_that_is_killed_comes_out_bit_for_bit(tmp_path, isolated_workspace, sets):
    mine = ("--plugin", str(PLUGIN), "--quiet", "--json")
    pairs = [part for each in (*SHORT, "train.checkpoint_every=5", *sets) for part in ("--set", each)]
    reference = train(tmp_path, ["run", str(RECIPE), *mine, *pairs])
    others = set(isolated_workspace.glob("runs/*"))
    killed = start(tmp_path, "run", str(RECIPE), *mine, *pairs, RUNNER_FAULTS="checkpoint.state=kill@3")
    assert killed.wait() == -signal.SIGKILL
    (folder,) = set(isolated_workspace.glob("runs/*")) - others
    resumed = train(tmp_path, ["resume", folder.name, *mine])
    assert resumed["resumed_at"] == 10
    same(learnt(resumed), learnt(reference))


@pytest.mark.parametrize("kind", ["amp", "fused_optimizer", "heap_retention"])
def test_stages_of_the_runner_work_with_it(kind, monkeypatch):
    monkeypatch.setattr(AmpConfig, "inactive", lambda *_: None)  # on any processor
    others = [f"optimization.{other}=off" for other in ("fused_optimizer", "heap_retention")]
    result = train_here(*others, f"optimization.{kind}=on")
    assert result.status == "FINISHED"
    assert [(report.kind, report.active) for report in result.stages] == [(kind, True)]


def test_the_generator_is_not_called_untrained_while_it_waits():
    assert train_here("train.updates=60").status == "FINISHED"


def test_a_batch_cannot_be_cut_where_the_learner_writes_its_own_update():
    with pytest.raises(RecipeError, match="'example_gan' has no slot 'forward_backward'"):
        gan("optimization.gradient_accumulation=on")
