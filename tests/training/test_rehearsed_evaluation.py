"""The rehearsal of an evaluation calls what is evaluated later, with little data."""

import pytest
import torch
from toy_runs import RECIPE, TOYS, Notes

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.training.evaluation import evaluated, rehearse_evaluation
from runner.training.loop import Loop
from runner.training.pipeline import assemble
from runner.training.signals import Stop
from runner.training.step import Step

PLUGINS = [TOYS, TOYS.with_name("judged.py")]
SHORT = ("train.updates=4", "train.evaluate_every=2")


def pipeline_of(folder, *sets):
    path = folder / "toy.yaml"
    path.write_text(RECIPE.replace("kind: toy_words", "kind: toy_judged"))
    return assemble(load(path, [*SHORT, *sets], Registry(PLUGINS)), PLUGINS)


def rehearsed(pipeline):
    step = Step(pipeline)
    step()
    rehearse_evaluation(pipeline, step.batch)
    return pipeline.source


@pytest.mark.parametrize(
    "setting",
    ["data.scale=2", "data.judge=all", "train.stop={patience: 1, metric: eval/worst, direction: minimize}"],
)
def test_metrics_of_the_source_are_those_of_a_training(setting, tmp_path):
    pipeline = pipeline_of(tmp_path, setting)
    notes = Notes()
    Loop(pipeline, tmp_path / "run", notes, notes, Stop()).run()
    assert notes.points["eval/worst"]
    assert evaluated(pipeline).keys() == {"loss", "worst"}


def test_the_rehearsal_reads_one_batch_unless_all_are_needed(tmp_path):
    source = rehearsed(pipeline_of(tmp_path))
    count = len([*source.held_out_batches()])
    assert count > 1
    assert source.seen == [1]
    source = rehearsed(pipeline_of(tmp_path, "data.judge=all"))
    assert source.seen == [1, count]
    assert not source.rehearsing


@pytest.mark.parametrize("needs_all", [False, True])
def test_a_rehearsal_changes_neither_attributes_nor_generators(tmp_path, needs_all):
    """A resumed run rehearses again."""
    pipeline = pipeline_of(tmp_path)
    source = pipeline.source
    source.level = 1.0
    generator = source.context.generator("levels", "cpu")
    state = generator.get_state()

    def evaluate(learner):
        source.level = 0.5 * source.level + float(torch.rand(1, generator=generator))
        source.cache = [source.context.generator("cached", "cpu")]
        if needs_all and source.rehearsing:
            raise ValueError("too few samples")
        return {"worst": 1.0, "loss": 1.0}

    source.evaluate = evaluate
    before = dict(vars(rehearsed(pipeline)))
    assert (source.level, source.evaluate, source.rehearsing) == (1.0, evaluate, False)
    assert torch.equal(generator.get_state(), state)
    assert "cached" not in source.context.generators
    evaluated(pipeline)
    assert vars(source).keys() - before.keys() == {"cache"}


def test_a_mistake_in_an_evaluation_is_reported_after_the_first_update(tmp_path):
    with pytest.raises(AttributeError, match="no_such_method"):
        rehearsed(pipeline_of(tmp_path, "data.judge=mistake"))


def test_a_value_that_no_evaluation_reads_is_refused(tmp_path):
    pipeline = pipeline_of(tmp_path, "data.scale=2")
    pipeline.source.evaluate = lambda learner: {"worst": 1.0, "loss": 1.0}
    with pytest.raises(RecipeError, match="no plugin reads this value"):
        rehearsed(pipeline)
