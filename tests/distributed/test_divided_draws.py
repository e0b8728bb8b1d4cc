"""Two processes that divide a simulator: its steps, its samples, one update, one evaluation."""

import math

import pytest
import torch
from process_pairs import started_pair
from running import tiny
from simulator_pairs import SETS, milestones, prioritized_part, rings, train, train_sampler, update_of_parts

from runner.system.tensor_trees import leaves
from runner.training.evaluation import evaluated
from runner.training.pipeline import assemble

SAMPLER = """
import torch
from runner.api import Source, SourceConfig

class SampledConfig(SourceConfig):
    kind, provides, division = "sampled_images", "images", "draws"
    implementation = "Sampled"

class Sampled(Source):
    shapes = {"image": (2, 6, 6), "label": ()}

    def __init__(self, config, context):
        self.context = context
        self.generator = context.process_generator("pictures", "cpu")

    def draw(self, batch_size, progress):
        size = self.context.process_part(batch_size)
        label = torch.randint(2, (size,), generator=self.generator)
        image = torch.randn(size, 2, 6, 6, generator=self.generator) + label.view(-1, 1, 1, 1)
        return {"image": image, "label": label}

    def evaluate(self, learner):
        return {}
"""


@pytest.fixture(scope="module")
def pair():
    with started_pair() as pair:
        yield pair


def difference(first, second):
    """Returns the largest difference of two trees with the same leaves."""
    pairs = zip(leaves(first), leaves(second), strict=True)
    return max(float((torch.as_tensor(a) - torch.as_tensor(b)).abs().max()) for (_, a), (_, b) in pairs)


@pytest.mark.parametrize("name", ["marl_baseline", "marl_phase2"])
def test_two_processes_count_like_one_and_learn_the_same(pair, name):
    single = train(None, name)
    first, second = pair.call(train, name)
    # The warm-up, the steps and the updates of a training have the same length.
    assert first["progress"] == second["progress"] == single["progress"]
    assert first["first"] == second["first"] == single["first"] > 1
    assert (first["envs"], second["envs"], single["envs"]) == (1, 2, 3)
    assert first["stored"] + second["stored"] == single["stored"]
    assert (len(first["observation"]), len(second["observation"])) == (2, 3)
    assert not torch.equal(first["observation"], second["observation"][:2])
    # All processes have one model, one report and one evaluation.
    assert difference(first["parameters"], second["parameters"]) == 0
    assert first["statistics"] == second["statistics"]
    assert first["statistics"]["episodes"] == single["statistics"]["episodes"] > 0
    assert first["evaluation"] == second["evaluation"]


def test_an_evaluation_has_the_metrics_of_one_process(pair):
    single = evaluated(assemble(tiny("marl_baseline", *SETS)))
    first, second = pair.call(train, "marl_baseline", SETS, 3)
    assert first["evaluation"] == second["evaluation"] == single


@pytest.mark.parametrize("name", ["marl_baseline", "marl_phase2"])
@pytest.mark.parametrize(("used", "is_same"), [("DividedDraws", True), ("MeanOfParts", False)])
def test_an_update_is_that_of_one_process_on_the_samples_of_both(pair, name, used, is_same):
    sets = (*SETS, "optimization.amp=off") if name == "marl_phase2" else SETS
    results, others = pair.call(update_of_parts, name, sets, used)
    divided, single = results
    assert (difference(divided, single) < 1e-11) is is_same
    assert difference(divided, others[0]) == 0


def test_processes_with_one_seed_are_noticed(pair):
    # As many environments and samples in both, so that all numbers are the same.
    sets = (*SETS, "data.envs=2", "train.batch_size=4")
    for message in pair.call(train, "marl_baseline", sets, 12, "same seed"):
        assert message.startswith("UavSource draws the same batches in several processes; ")


def test_counts_of_one_process_are_noticed(pair):
    for message in pair.call(train, "marl_baseline", SETS, 12, "counts of a part"):
        assert message.startswith("UavSource.counts returns other numbers in each process; ")


def test_a_source_of_no_family_is_divided(pair, tmp_path):
    """Its learner is a GradientLearner, whose losses have counts."""
    path = tmp_path / "sampled.py"
    path.write_text(SAMPLER)
    first, second = pair.call(train_sampler, path)
    assert first["progress"] == second["progress"] == {"updates": 4, "samples": 20, "tokens": 0, "env_steps": 0}
    assert difference(first["parameters"], second["parameters"]) == 0
    assert first["losses"] == second["losses"]
    assert (first["sizes"], second["sizes"]) == ([2] * 4, [3] * 4)
    # The mean loss of an update has the weight of the samples in each process.
    assert first["own_loss"] != second["own_loss"]
    mean = (2 * first["own_loss"] + 3 * second["own_loss"]) / 5
    assert first["losses"][0] == pytest.approx(mean, rel=1e-6)


def test_a_batch_in_one_process_alone_is_an_error(pair):
    for message in pair.call(train, "marl_baseline", SETS, 12, "a draw in one process"):
        assert message.startswith("UavSource.draw returned a batch in 1 of 2 processes; ")


def test_importance_weights_are_those_of_the_entire_batch(pair):
    parts = pair.call(prioritized_part)
    weights, expected = (torch.cat(values) for values in zip(*parts, strict=True))
    # The exponent is 1 at the end of a training.
    assert torch.allclose(weights, expected.min() / expected, rtol=1e-5)
    # Each process would have a weight of 1 if it had its own scale.
    assert min(float(part.max()) for part, _ in parts) < 1


def test_rows_of_another_process_are_read_when_they_are_needed(pair):
    assert pair.call(rings) == ((1, 2, [13.0, 14.0], 15.0), None)


def test_trainings_on_one_and_on_two_processes_can_be_repeated(pair):
    arguments = ("marl_baseline", (*SETS, "train.env_steps=60"))
    first, _ = pair.call(milestones, *arguments, [7, 8], 15)
    assert len(first) == 4
    assert all(math.isfinite(milestone.metrics["return"]) for milestone in first)
    # The initial models are the same, and learn from other samples.
    assert [milestone.initial for milestone in first[:2]] == [milestone.initial for milestone in first[2:]]
    assert all(a.metrics != b.metrics for a, b in zip(first[:2], first[2:], strict=True))
    again, _ = pair.call(milestones, *arguments, [8], 15)
    assert again == first[1::2]
