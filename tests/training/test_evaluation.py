"""Evaluations: at the current progress, with noise that depends on seed and batch alone."""

import json

import pytest
import torch
from toy_runs import RECIPE, TOYS, Notes
from toys import WORDS

import runner
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.tracking.lookup import folder_of
from runner.training import checkpoint
from runner.training.evaluate import evaluate
from runner.training.evaluation import evaluated
from runner.training.loop import Loop
from runner.training.pipeline import assemble
from runner.training.signals import Stop

PLUGINS = [TOYS, TOYS.with_name("annealing.py")]
KINDS = ["toy_annealed", "toy_annealed_pair"]


@pytest.fixture
def written(tmp_path):
    """Writes the recipe of a learner; of the two networks without a setting for the optimizer of one."""

    def write(kind):
        text = RECIPE.replace("kind: toy}", f"kind: {kind}}}")
        if kind == "toy_annealed_pair":
            text = text.replace("optimizer: {lr: 1e-2}\n", "")
        (tmp_path / "toy.yaml").write_text(text)
        return tmp_path / "toy.yaml"

    return write


def pipeline_of(path, *sets):
    return assemble(load(path, [*sets], Registry(PLUGINS)), PLUGINS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", ["updates=20", "epochs=4", "samples=160", "tokens=960"])
def test_every_evaluation_uses_the_current_progress(length, kind, written, tmp_path):
    quarter = int(length.partition("=")[2]) // 4
    pipeline = pipeline_of(written(kind), f"train.{length}", f"train.evaluate_every={quarter}")
    notes = Notes()
    Loop(pipeline, tmp_path / "run", notes, notes, Stop()).run()
    assert [value for _, value in notes.points["eval/fraction"]] == [0.25, 0.5, 0.75, 1.0]


def test_the_best_checkpoint_follows_the_loss_of_its_own_progress(written, migrated_workspace):
    """The loss of a word rises by 100 during the training, so the first evaluation is the best."""
    often = {"train.updates": 20, "train.evaluate_every": 5, "train.checkpoint_every": 5}
    result = runner.train(written("toy_annealed"), set=often, plugins=PLUGINS)
    assert result.best.step == 5
    assert result.best.value == pytest.approx(25, abs=4)
    assert result.metrics["eval/loss"] == pytest.approx(100, abs=4)

    for which, share in (("best", 0.25), ("last", 1.0)):
        recipe = load(written("toy_annealed"), ["train.updates=20"], Registry(PLUGINS))
        again = evaluate(recipe, Registry(PLUGINS), folder_of(result.run_name), which)
        assert again.same_digits
        learner = runner.load_model(result, which, plugins=PLUGINS)
        batch = {"words": torch.arange(12).view(2, 6) % WORDS}
        assert learner.metrics(batch)["fraction"].sum == share

    # The model that is kept without what only a training needs is evaluated at its own progress, too.
    (kept,) = checkpoint.checkpoints(folder_of(result.run_name).path / "model" / "checkpoints")
    assert checkpoint.load(kept)["pipeline"]["progress"]["updates"] == 5


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_noise_differs_between_batches_and_seeds_and_is_the_same_every_time(kind, size, written):
    batches = 10 // size  # of ten held-out rows

    def numbers(*sets):
        pipeline = pipeline_of(written(kind), "train.updates=20", f"train.batch_size={size}", *sets)
        measure, found = pipeline.learner.metrics, []

        def listening(batch):
            metrics = measure(batch)
            found.append(float(metrics["number"].sum))
            return metrics

        pipeline.learner.metrics = listening
        for outside in (1, 2):
            torch.manual_seed(outside)
            evaluated(pipeline)
            assert float(torch.rand(())) == float(torch.rand((), generator=torch.Generator().manual_seed(outside)))
        assert found[:batches] == found[batches:]
        return found[:batches]

    first, second = numbers(), numbers("seed=6")
    assert len({*first, *second}) == 2 * batches
    assert numbers() == first


def test_an_evaluation_of_its_own_is_the_same_every_time(written):
    """A source that evaluates itself, with torch's global generator and modules that forget activations."""
    pipeline = pipeline_of(written("toy_annealed"), "train.updates=20", "model.dropout=0.5")
    words = torch.arange(12).view(2, 6) % WORDS

    def evaluate_anyhow(learner):
        return {"loss": float(learner.slots.forward(words).detach().sum()), "drawn": float(torch.rand(()))}

    pipeline.source.evaluate = evaluate_anyhow
    first = evaluated(pipeline)
    torch.manual_seed(3)
    assert json.dumps(evaluated(pipeline)) == json.dumps(first)
