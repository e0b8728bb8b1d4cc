"""Two processes with a part of every parameter each train the model of one."""

import random

import pytest
import torch
from divided import DIVIDED, continued, first_update, follow_divided, held, observed, refusal, summing
from process_pairs import PLUGINS, difference, evaluate, started_pair, tiny_recipe, train

from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome
from runner.system.errors import RunnerError
from runner.system.tensor_trees import leaves
from runner.training.pipeline import assemble
from runner.verify.process_pair import close_stages, compare_processes


@pytest.fixture(scope="module")
def pair():
    with started_pair() as pair:
        yield pair


def variants():
    """Yields recipes with settings that read gradients or parameters as a whole."""
    choices = random.Random(53)
    for number in range(17):
        sets = [f"train.batch_size={choices.randint(2, 9)}", f"seed={number}"]
        sets.append(f"optimizer.max_grad_norm={choices.choice(['null', '0.05', '1.0'])}")
        kind = choices.choice(["adam", "adamw", "sgd", "rmsprop", "adagrad"])
        sets.append(f"optimizer.kind={kind}")
        if choices.random() < 0.4:
            sets.append(f"optimization.gradient_accumulation={{micro_batch: {choices.randint(1, 4)}}}")
        if choices.random() < 0.4:
            sets.append("train.ema=0.5")
        if choices.random() < 0.3 and kind not in ("rmsprop", "adagrad"):
            sets.append("optimization.fused_optimizer=on")
        if choices.random() < 0.3:
            sets.append("optimization.activation_checkpointing=on")
        yield ("images", "tokens")[number % 2], tuple(sets)


def test_processes_with_parts_of_parameters_train_the_model_of_one(pair):
    for name, sets in variants():
        single = train(None, name, sets)
        first, second = pair.call(train, name, (*sets, DIVIDED))
        assert difference(first, second) == 0, (name, sets)
        assert difference(single, first) < 1e-11, (name, sets)


def test_random_numbers_of_an_update_belong_to_samples(pair):
    sets = ("model.dropout=0.3", "train.batch_size=5")
    single = train(None, "tokens", sets)
    first, _ = pair.call(train, "tokens", (*sets, DIVIDED))
    assert difference(single, first) < 1e-11


@pytest.mark.parametrize("name", ["images", "tokens"])
def test_each_process_holds_a_part_of_parameters_and_moments(pair, name):
    for (first, whole), (second, whole_of_second) in zip(*pair.call(held, name), strict=True):
        assert first + second == whole == whole_of_second
        # Some parameters have a single row, which one process holds.
        assert 0.3 * whole < first < 0.8 * whole


@pytest.mark.parametrize("name", ["images", "tokens"])
def test_a_state_is_that_of_a_single_process_and_is_loaded_by_one_or_two(pair, name):
    sets = ("train.ema=0.5",)
    straight, _ = pair.call(continued, name, sets, None, 4)
    half, _ = pair.call(continued, name, sets, None, 2)
    alone = continued(None, name, sets, None, 2)
    assert [path for path, _ in leaves(half["learner"])] == [path for path, _ in leaves(alone["learner"])]
    resumed, _ = pair.call(continued, name, sets, half, 2)
    for (path, value), (_, other) in zip(leaves(straight["learner"]), leaves(resumed["learner"]), strict=True):
        same = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
        assert same, path
    # A single process continues the training, but for the order of sums.
    assert difference(straight["learner"]["modules"], continued(None, name, sets, half, 2)["learner"]["modules"]) < 1e-5
    resumed, _ = pair.call(continued, name, sets, alone, 2)
    assert difference(straight["learner"]["modules"], resumed["learner"]["modules"]) < 1e-5


@pytest.mark.parametrize("name", ["images", "tokens"])
@pytest.mark.parametrize("norm", ["null", "0.05"])
def test_metrics_and_guards_see_what_a_single_process_does(pair, name, norm):
    sets = (f"optimizer.max_grad_norm={norm}", "train.batch_size=5")
    single = observed(None, name, sets)
    first, second = pair.call(observed, name, sets)
    assert first == second
    assert first["origin"] == single["origin"]
    assert "parameter" in first["origin"]
    assert first["missing"] == single["missing"]
    assert first["metrics"] == pytest.approx(single["metrics"], rel=1e-4)
    assert first["metrics"].keys() >= {"optimizer/model/gradient_norm", "optimizer/model/update_ratio"}
    assert first["sizes"].keys() == single["sizes"].keys()
    for key, sizes in single["sizes"].items():
        assert first["sizes"][key] == pytest.approx(sizes, rel=1e-4), key


def test_an_evaluation_has_the_bits_of_a_single_process(pair):
    for name in ("images", "tokens"):
        single = evaluate(None, name, "train.batch_size=5")
        assert pair.call(evaluate, name, "train.batch_size=5", DIVIDED) == (single, single)


def compared(pair, recipe, **options):
    """Returns the verdict on two processes."""
    stages = close_stages(recipe, 2)
    assert "fsdp" in stages
    pair.start(follow_divided, recipe.values(masked=False), stages, options)
    with summing(**options):
        verdict = compare_processes(recipe, Registry(PLUGINS), stages, pair.group, 3)
    assert pair.wait() == (None,)
    return verdict


def test_verify_passes_the_stage(pair):
    verdict = compared(pair, tiny_recipe("tokens", "optimizer.max_grad_norm=0.1", DIVIDED))
    assert verdict, verdict
    assert verdict.contract == "Close"


@pytest.mark.parametrize("options", [{"factor": 2.0}, {"factor": None}, {"norm_of_part": True}], ids=str)
def test_verify_fails_incorrect_sums(pair, options):
    verdict = compared(pair, tiny_recipe("tokens", "optimizer.max_grad_norm=0.1", DIVIDED), **options)
    assert verdict.outcome is Outcome.FAIL, verdict


def test_one_process_has_nothing_to_divide():
    pipeline = assemble(tiny_recipe("images", DIVIDED), PLUGINS)
    assert pipeline.reports["fsdp"].reason == "one process has all parameters"
    assert pipeline.learner.sharding is None


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("gan", (), "trains several networks"),
        ("images", ("optimization.compile=on",), "'compile' traces whole parameters"),
        ("images", ("optimizer.kind=muon",), "Muon rounds products of whole matrices"),
        ("images", ("optimizer.kind=adafactor",), "cannot compute with parts of parameters (aten."),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_line(pair, name, other, message):
    for error in pair.call(refusal, name, (DIVIDED, *other)):
        assert message in error
        assert "Traceback" not in error


TIED = """
from torch.nn import functional
from tiny_learners import Classifier, ClassifierLearner
from runner.api import Loss

class K(Classifier):
    kind = "odd"
    implementation = "N"

class N(ClassifierLearner):
    def loss(self, batch, noise, progress):
        hidden = self.slots.forward(batch["image"])
        logits = functional.linear(hidden, self.module.head.weight[:, :2])
        return Loss(functional.cross_entropy(logits, batch["label"], reduction="sum"), len(logits))
"""


def test_parameters_that_are_read_outside_of_their_module_are_refused(pair, tmp_path):
    path = tmp_path / "tied.py"
    path.write_text(TIED)
    with pytest.raises(RunnerError, match=r"optimization\.fsdp: N\.update reads a parameter outside"):
        pair.call(first_update, path)
