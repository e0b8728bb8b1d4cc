"""Two processes train the model of one: gradients, noise, clipping, averages, results."""

import itertools
import random

import pytest
import torch
from process_pairs import buffers, difference, evaluate, refused, started_pair, train

from runner.system.errors import RunnerError


@pytest.fixture(scope="module")
def pair():
    with started_pair() as pair:
        yield pair


def variants():
    """Yields recipes of both API levels with settings that matter for the division of a batch."""
    choices = random.Random(0)
    for number in range(24):
        name = ("images", "tokens", "gan")[number % 3]
        sets = [f"train.batch_size={choices.randint(2, 9)}", f"seed={number}"]
        if name != "gan":
            sets.append(f"optimizer.max_grad_norm={choices.choice(['null', '0.1', '1.0'])}")
            if choices.random() < 0.4:
                sets.append(f"optimization.gradient_accumulation={{micro_batch: {choices.randint(1, 4)}}}")
        if choices.random() < 0.3:
            sets.append("train.ema=0.5")
        if choices.random() < 0.3:
            sets.append("lr_scheduler={kind: cosine, warmup: 0.4}")
        yield name, tuple(sets)


def test_two_processes_train_the_model_of_one(pair):
    for name, sets in variants():
        single = train(None, name, sets)
        first, second = pair.call(train, name, sets)
        assert difference(first["modules"], second["modules"]) == 0, (name, sets)
        assert difference(single, first) < 1e-11, (name, sets)
        assert difference(first["outputs"], second["outputs"]) == 0, (name, sets)


@pytest.mark.parametrize(
    ("used", "sets"),
    [
        ("MeanOfMeans", ("train.batch_size=5",)),
        ("EarlyClipping", ("optimizer.max_grad_norm=0.05",)),
        ("RepeatedSamples", ()),
    ],
)
def test_an_incorrect_division_trains_another_model(pair, used, sets):
    single = train(None, "tokens", sets)
    first, _ = pair.call(train, "tokens", sets, 3, used)
    assert difference(single["modules"], first["modules"]) > 1e-5


def test_an_evaluation_in_turns_has_the_bits_of_a_single_process(pair):
    for name, size in itertools.product(("images", "tokens"), (2, 5, 12)):
        sets = f"train.batch_size={size}"
        single = evaluate(None, name, sets)
        assert pair.call(evaluate, name, sets) == (single, single)


RUNNING = """
class K(Classifier):
    kind = "odd"
    implementation = "N"
    buffer_rule = "{rule}"
class Running(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
    def forward(self, image):
        self.average = 0.5 * self.average + 0.5 * image.detach().mean((0, 2, 3))
        self.batches += 1
        return self.inner(image)
class N(ClassifierLearner):
    def build(self, config, shapes, context):
        return Running(super().build(config, shapes, context))
"""


@pytest.mark.parametrize("rule", ["broadcast", "average"])
def test_buffers_are_the_same_in_all_processes(pair, tmp_path, rule):
    path = write_plugin(tmp_path, RUNNING.format(rule=rule))
    single = buffers(None, path)
    first, second = pair.call(buffers, path)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert int(first["batches"]) == 3
    is_equal = torch.allclose(first["average"], single["average"], rtol=1e-5, atol=1e-6)
    # The first process has seen two of five samples.
    assert is_equal == (rule == "average")


def test_parts_of_all_processes_are_the_batch_without_overlap(pair):
    group = pair.group
    for size, count in itertools.product(range(1, 40), range(2, 8)):
        parts = []
        for rank in range(count):
            group.rank, group.count = rank, count
            if size < count:
                with pytest.raises(RunnerError, match=f"{size} samples cannot be divided among {count}"):
                    group.rows(size)
                continue
            rows = group.rows(size)
            parts += range(size)[rows]
            assert rows.stop - rows.start in (size // count, -(-size // count))
        assert parts == ([] if size < count else list(range(size)))
    group.rank, group.count = 0, 2


def write_plugin(tmp_path, body):
    """Writes a plugin that extends the tiny learners."""
    path = tmp_path / "divided.py"
    path.write_text(
        "import torch\nfrom torch import nn\nfrom tiny_learners import Classifier, ClassifierLearner, Gan\n" + body
    )
    return path


KINDS = {
    "counts": (
        "class K(Gan):\n    kind = 'odd'\n    implementation = 'tiny_learners:GanLearner'\n"
        "    losses_are_means = False\n",
        "gan",
        "does not declare how losses",
    ),
    "norm": (
        "class K(Classifier):\n    kind = 'odd'\n    implementation = 'N'\n"
        "class N(ClassifierLearner):\n"
        "    def build(self, config, shapes, context):\n"
        "        return nn.Sequential(nn.BatchNorm2d(2), super().build(config, shapes, context))\n",
        "images",
        "batch normalisation",
    ),
    "seedless": (
        "import os\nclass K(Classifier):\n    kind = 'odd'\n    implementation = 'N'\n"
        "class N(ClassifierLearner):\n"
        "    def build(self, config, shapes, context):\n"
        "        torch.manual_seed(os.getpid())\n        return super().build(config, shapes, context)\n",
        "images",
        "differ between processes",
    ),
    "past_step": (
        "class K(Classifier):\n    kind = 'odd'\n    implementation = 'N'\n"
        "class N(ClassifierLearner):\n"
        "    def update(self, batch, noise, progress):\n"
        "        self.model.zero_grad()\n"
        "        loss = self.slots.forward_backward(batch, noise, progress)\n"
        "        self.model.optimizer.step()\n        return loss.means()\n",
        "images",
        "have become different",
    ),
    "past_loss": (
        "class K(Classifier):\n    kind = 'odd'\n    implementation = 'N'\n"
        "class N(ClassifierLearner):\n"
        "    def update(self, batch, noise, progress):\n"
        "        self.model.zero_grad()\n        loss = self.loss(batch, noise, progress)\n"
        "        (loss.sum / loss.count).backward()\n        self.model.step()\n"
        "        return {'loss': loss.sum.detach()}\n",
        "images",
        "past the slots forward_backward and backward",
    ),
    "drawing": (
        "class K(Classifier):\n    kind = 'odd'\n    implementation = 'N'\n"
        "class N(ClassifierLearner):\n"
        "    def loss(self, batch, noise, progress):\n"
        "        torch.rand(1)\n        return super().loss(batch, noise, progress)\n",
        "images",
        "declare it by K.draws()",
    ),
    "rows": (
        "class K(Classifier):\n    kind = 'odd'\n    implementation = 'N'\n"
        "class N(ClassifierLearner):\n"
        "    def update(self, batch, noise, progress):\n"
        "        return {**super().update(batch, noise, progress), 'rows': batch['label'].float()}\n",
        "images",
        "returns 'rows' with dimensions",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_would_train_another_model_is_refused_in_one_line(pair, tmp_path, kind):
    body, name, expected = KINDS[kind]
    path = write_plugin(tmp_path, body)
    for message in pair.call(refused, path, name):
        problem, *place = message.splitlines()
        assert expected in problem
        # The setting that was refused, and a mark below it.
        assert len(place) in (0, 2)
