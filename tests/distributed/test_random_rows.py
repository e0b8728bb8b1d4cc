"""Random numbers of updates (dropout) belong to samples: two processes draw those of one."""

from unittest.mock import patch

import pytest
import torch
from process_pairs import refused, started_pair, tiny_recipe, train
from test_data_parallel import difference, write_plugin
from torch import nn
from torch.nn import functional as F  # noqa: N812 (its usual name)
from torch.utils.checkpoint import checkpoint

from runner.distributed import data_parallel
from runner.distributed.random_rows import RandomRows, physical_order, uneven
from runner.distributed.refusals import refuse_recipe, refuse_stages
from runner.system.errors import RunnerError, UsageError
from runner.training.pipeline import setting_of

SIZE = 7
PARTS = (slice(0, 3), slice(3, 4), slice(4, 7))
"""Rows of three processes, of which one has a single sample."""
torch.manual_seed(0)
ENCODER = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)


def recomputed(x):
    """Returns the gradient through a dropout that the backward pass computes again."""
    x = x.clone().requires_grad_()
    y = checkpoint(lambda hidden: F.dropout(hidden, 0.5).sin(), x, use_reentrant=False)
    return torch.autograd.grad(y.sum(), x)[0]


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "transposed": lambda x: F.dropout(x.permute(0, 2, 3, 1), 0.5),
    "channels": lambda x: F.dropout2d(x, 0.5),
    "alpha": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "native": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.2, is_causal=True),
    "layer": lambda x: ENCODER(x[:, 0]),
    "recomputed": recomputed,
    "uniform": lambda x: torch.rand(len(x), 5) + torch.rand(()) + torch.rand_like(x[:, 0, 0, :5]),
    "normal": lambda x: torch.normal(x, torch.ones(())) + torch.normal(torch.zeros(()), x.abs()),
    "integers": lambda x: torch.randint(9, (len(x), 3)) + torch.empty(len(x), 3).random_(0, 9),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) + torch.bernoulli(x, 0.5),
    "classes": lambda x: torch.multinomial(x[:, 0, 0].exp(), 2),
    "exponential": lambda x: F.gumbel_softmax(x),
    "generator": lambda x: torch.randn(len(x), 4, generator=torch.Generator().manual_seed(5)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_process_draws_the_rows_of_a_single_one(name):
    draw = DRAWS[name]
    x = torch.randn(SIZE, 4, 5, 6, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(3)
    single = draw(x)
    state = torch.get_rng_state()
    pieces = []
    for rows in PARTS:
        torch.manual_seed(3)
        with RandomRows({"model": ENCODER}, "toy").of(SIZE, rows):
            pieces.append(draw(x[rows]))
        assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(torch.cat(pieces), single)


REFUSED = {
    "number": (lambda x: torch.rand(1), "of shape [1] by torch.ops.aten.rand, whose dimension 0"),
    "order": (lambda x: torch.randperm(len(x)), "a kernel that draws by itself"),
    "rejection": (lambda x: torch.poisson(x.abs()), "as many numbers as its inputs need"),
    "slopes": (lambda x: F.rrelu(x, training=True), "torch.ops.aten.rrelu_with_noise"),
    "steps": (lambda x: F.dropout(x.transpose(0, 1), 0.5), "whose dimension 0 is not the 3 samples"),
    "heads": (
        lambda x: ENCODER.self_attn(x[:, 0], x[:, 0], x[:, 0]),
        "module 'model.self_attn' (MultiheadAttention) draws random numbers of shape [6, 5, 5]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_without_samples_are_refused_with_the_module(name):
    draw, message = REFUSED[name]
    x = torch.randn(SIZE, 4, 5, 6)[PARTS[0]]
    with RandomRows({"model": ENCODER}, "toy").of(SIZE, PARTS[0]), pytest.raises(RunnerError) as caught:
        draw(x)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_kernel_without_dropout_computes():
    x = torch.randn(3, 2, 4, 5)
    expected = F.scaled_dot_product_attention(x, x, x)
    with RandomRows({}, "toy").of(SIZE, PARTS[0]):
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), expected)


def test_parts_become_uneven_without_overlap():
    assert physical_order(torch.empty(5, 1, 6).transpose(0, 1)) == [1, 0, 2]
    for size, count, lengths in ((6, 2, [4, 2]), (9, 3, [4, 2, 3]), (7, 2, [3, 4]), (2, 2, [1, 1])):
        parts = [slice(rank * size // count, (rank + 1) * size // count) for rank in range(count)]
        parts = [uneven(rows, size, rank, count) for rank, rows in enumerate(parts)]
        assert [row for rows in parts for row in range(size)[rows]] == [*range(size)]
        assert [rows.stop - rows.start for rows in parts] == lengths


# --- trainings ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    with started_pair() as pair:
        yield pair


class MaskPerProcess(RandomRows):
    """Every process draws for its samples alone, from a generator of its own."""

    def draw(self, func, args, options):
        torch.manual_seed(self.rows.start + torch.initial_seed())
        return func(*args, **options)


class RepeatedMask(RandomRows):
    """All processes take the numbers of the first samples."""

    def draw(self, func, args, options):
        rows, self.rows = self.rows, slice(0, self.rows.stop - self.rows.start)
        try:
            return super().draw(func, args, options)
        finally:
            self.rows = rows


class SeparateStream(RandomRows):
    """Numbers of the entire batch come from another stream than in a single process."""

    def draw(self, func, args, options):
        state = torch.get_rng_state()
        torch.manual_seed(torch.initial_seed() + 1)
        result = super().draw(func, args, options)
        torch.set_rng_state(state)
        return result


CLASSES = {cls.__name__: cls for cls in (RandomRows, MaskPerProcess, RepeatedMask, SeparateStream)}


def train_with(group, used, sets):
    """Trains the tagger with dropout; returns the state, or the message of an error."""
    with patch.object(data_parallel, "RandomRows", CLASSES[used]):
        try:
            return train(group, "tokens", ["model.dropout=0.5", *sets])
        except RunnerError as error:
            return str(error)


@pytest.mark.parametrize(
    "sets",
    [
        ("train.batch_size=6", "train.ema=0.5"),
        ("train.batch_size=5", "optimizer.max_grad_norm=0.1"),
        ("train.batch_size=7", "optimization.activation_checkpointing=on"),
        # The last batch of an epoch has as many samples as there are processes.
        ("train.batch_size=11",),
    ],
)
def test_two_processes_drop_what_one_drops(pair, sets):
    single = train_with(None, "RandomRows", sets)
    first, second = pair.call(train_with, "RandomRows", sets)
    assert difference(first["modules"], second["modules"]) == 0
    assert difference(single, first) < 1e-11


@pytest.mark.parametrize("used", ["MaskPerProcess", "RepeatedMask", "SeparateStream"])
def test_other_masks_train_another_model(pair, used):
    sets = ("train.batch_size=6",)
    single = train_with(None, "RandomRows", sets)
    first, second = pair.call(train_with, used, sets)
    if isinstance(first, str):
        assert "of different shapes in each process" in first
        assert first == second
        return
    assert difference(single["modules"], first["modules"]) > 1e-5


TRIMMED = (
    "class K(Tagger):\n    kind = 'odd'\n    implementation = 'N'\n"
    "class N(TaggerLearner):\n"
    "    def loss(self, batch, noise, progress):\n"
    "        used = int((batch['token'] > 0).sum(1).max())\n"
    "        return super().loss({'token': batch['token'][:, :used]}, noise, progress)\n"
)
STEPS_FIRST = (
    "class K(Tagger):\n    kind = 'odd'\n    implementation = 'N'\n"
    "class Turned(nn.Sequential):\n"
    "    def forward(self, x):\n        return super().forward(x.transpose(0, 1)).transpose(0, 1)\n"
    "class N(TaggerLearner):\n"
    "    def build(self, config, shapes, context):\n"
    "        return Turned(*super().build(config, shapes, context))\n"
    "    def loss(self, batch, noise, progress):\n"
    "        return super().loss({'token': batch['token'][:, :3]}, noise, progress)\n"
)


@pytest.mark.parametrize(
    ("body", "message"),
    [(TRIMMED, "of different shapes in each process"), (STEPS_FIRST, "whose dimension 0 is not")],
    ids=["trimmed", "steps_first"],
)
def test_numbers_that_follow_other_dimensions_are_refused(pair, tmp_path, body, message):
    """The second model has three steps, and each process has three of six samples."""
    path = write_plugin(tmp_path, "from tiny_learners import Tagger, TaggerLearner\n" + body)
    messages = pair.call(refused, path, "tokens", ["model.dropout=0.5"])
    assert any(message in text.splitlines()[0] for text in messages), messages


def test_parts_of_a_batch_and_compiled_code_are_refused():
    for stage in ("gradient_accumulation", "compile"):
        recipe = tiny_recipe("tokens", "model.dropout=0.5", f"optimization.{stage}=on")
        setting = setting_of(recipe, torch.device("cpu"))
        with pytest.raises(UsageError, match=rf"optimization.{stage}: .*\(dropout\)"):
            refuse_stages(recipe.stages, setting)
    with pytest.raises(UsageError, match=r"train.batch_size: 2 samples, one in each of 2 processes"):
        refuse_recipe(tiny_recipe("tokens", "model.dropout=0.5", "train.batch_size=2"), 2)
