import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.plugin.registry import Registry
from runner.plugins.sequences.config import Mamba2Config
from runner.plugins.sequences.mamba2 import Mamba2Mixer
from runner.plugins.sequences.scans import associative, chunked, recurrence
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.training.pipeline import assemble
from runner.training.step import Step

SMALL = ("device=cpu", "model.layers=2", "model.width=16", "data.context=12", "train.batch_size=4")
RECIPES = {
    "shakespeare_gpt": ("model.heads=2", "optimization.amp=off"),
    "mamba2_shakespeare": ("model.head_width=8", "optimization.chunked_scan=off"),
}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join("the quick brown fox jumps over the lazy dog "[i * i % 43] for i in range(600)))
    return path


def pipeline(text, *sets, name="mamba2_shakespeare"):
    sets = (*SMALL, *RECIPES[name], "optimization.fused_optimizer=off", f"data.file={text}", *sets)
    return assemble(load(name, sets, Registry()))


def inputs_of(length, rows=2, heads=3, width=4, states=5):
    """Random inputs of a recurrence, whose decays are anywhere from strong to none."""
    draw = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(rows, length, *shape, generator=draw, dtype=torch.float64)

    inputs = (normal(heads, width), -normal(heads).square(), normal(states), normal(states))
    return [each.requires_grad_() for each in inputs]


@given(st.integers(2, 150), st.sampled_from([1, 7, 16, 64]))
def test_every_scan_is_the_recurrence_in_values_and_gradients(length, chunk):
    inputs = inputs_of(length)
    wanted = recurrence(*inputs)
    slopes = torch.autograd.grad(wanted.square().sum(), inputs)
    for found in (chunked(*inputs, chunk=chunk), associative(*inputs)):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        for pair in zip(torch.autograd.grad(found.square().sum(), inputs), slopes, strict=True):
            torch.testing.assert_close(*pair, rtol=1e-10, atol=1e-10)


def test_the_recurrence_is_its_equation():
    x, log_decay, b, c = inputs_of(9)
    state = torch.zeros(2, 3, 4, 5, dtype=torch.float64)
    for t in range(9):
        state = log_decay[:, t].exp()[..., None, None] * state + torch.einsum("bhp,bn->bhpn", x[:, t], b[:, t])
        y = torch.einsum("bhpn,bn->bhp", state, c[:, t])
        torch.testing.assert_close(recurrence(x, log_decay, b, c)[:, t], y, rtol=1e-12, atol=1e-12)


def test_a_weak_decay_keeps_its_digits_beside_a_strong_one():
    x, log_decay, b, c = (each.detach() for each in inputs_of(48))
    log_decay = torch.where(torch.arange(48)[None, :, None] % 7 == 3, -1e12, -0.1 * log_decay.abs())
    wanted = recurrence(x, log_decay, b, c)
    for found in (chunked(x, log_decay, b, c, chunk=16), associative(x, log_decay, b, c)):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, -1e-8, -50.0, -1e4])
def test_no_decay_and_a_complete_one_are_finite(decay):
    x, _, b, c = inputs_of(40)
    log_decay = torch.full((2, 40, 3), decay, dtype=torch.float64, requires_grad=True)
    wanted = recurrence(x, log_decay, b, c)
    for found in (chunked(x, log_decay, b, c, chunk=16), associative(x, log_decay, b, c)):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
        (slope,) = torch.autograd.grad(found.sum(), log_decay)
        assert slope.isfinite().all()


@pytest.mark.parametrize("length", [1, 5, 64, 100])
def test_the_mixer_is_that_of_transformers(length):
    reference = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    settings = pytest.importorskip("transformers").Mamba2Config(
        hidden_size=24, num_heads=6, head_dim=8, state_size=5, expand=2, n_groups=1, conv_kernel=4, chunk_size=16,
        num_hidden_layers=1, use_bias=False, use_conv_bias=True,
    )  # fmt: skip
    theirs = reference.Mamba2Mixer(settings, layer_idx=0).eval()
    ours = Mamba2Mixer(Mamba2Config(width=24, head_width=8, state=5), recurrence)
    pairs = {
        "enter.weight": "in_proj.weight", "convolution.weight": "conv1d.weight", "convolution.bias": "conv1d.bias",
        "delta_bias": "dt_bias", "log_rate": "A_log", "skip": "D", "norm.weight": "norm.weight",
        "leave.weight": "out_proj.weight",
    }  # fmt: skip
    state = theirs.state_dict()
    ours.load_state_dict({own: state[other] for own, other in pairs.items()})
    assert len(pairs) == len(state)
    u = torch.randn(3, length, 24, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(u), theirs(u), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", RECIPES)
def test_symbol_by_symbol_the_answers_are_those_of_the_whole(text, name):
    learner = pipeline(text, name=name).learner
    tokens = torch.randint(learner.context.sizes["vocabulary"], (3, 12))
    with torch.no_grad(), learner.evaluating():
        decode = learner.decoder()
        found = torch.stack([decode(symbols) for symbols in tokens.split(1, 1)], 1)
        at_once = learner.decoder()(tokens)
    torch.testing.assert_close(found, learner.predict(tokens), rtol=0, atol=1e-5)
    torch.testing.assert_close(found[:, -1], at_once, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", RECIPES)
def test_what_was_learnt_by_heart_is_written_down(text, tmp_path, name):
    text.write_text("to be or not to be, " * 40)
    made = pipeline(text, "optimizer.lr=0.02", "train.tokens=9600", "train.batch_size=8", name=name)
    step = Step(made)
    for _ in range(100):
        step()
    made.source.render(made.learner, tmp_path / "written.txt")
    written = (tmp_path / "written.txt").read_text()
    assert len(written) == 64 + 1_000 + 1
    words = written[64:].split()
    assert sum(word in ("to", "be", "be,", "or", "not") for word in words) > 0.8 * len(words)
    assert made.learner.module.training


def test_a_decoder_may_read_on_after_its_window(text):
    learner = pipeline(text, name="shakespeare_gpt").learner
    prompt = torch.zeros(2, 1, dtype=torch.long)
    assert learner.write(prompt, torch.rand(2, 30)).shape == (2, 30)


@pytest.mark.parametrize("name", RECIPES)
def test_symbols_are_drawn_as_often_as_the_model_finds_them_likely(text, name):
    learner = pipeline(text, name=name).learner
    with torch.no_grad():
        for parameter in learner.module.parameters():
            parameter.mul_(3)  # shares that differ
    count, prompt = 20_000, torch.tensor([[0, 1, 2]])
    shares = (learner.predict(prompt)[0, -1] / 0.5).softmax(-1)
    drawn = learner.write(prompt.expand(count, 3), torch.rand(count, 1), temperature=0.5)
    found = torch.bincount(drawn[:, 0], minlength=len(shares)) / count
    assert shares.max() > 2 * shares.min()
    torch.testing.assert_close(found, shares, rtol=0, atol=5 * 0.5 / count**0.5)


def test_the_ends_of_a_draw_are_symbols(text):
    learner = pipeline(text, name="shakespeare_gpt").learner
    written = learner.write(torch.zeros(2, 1, dtype=torch.long), torch.tensor([[0.0], [1.0]]))
    assert 0 <= int(written.min()) <= int(written.max()) < learner.context.sizes["vocabulary"]


@pytest.mark.parametrize("stage", ["chunked_scan={chunk: 5}", "associative_scan=on"])
def test_a_stage_computes_the_same_loss_and_gradient(text, stage):
    plain, staged = pipeline(text), pipeline(text, f"optimization.{stage}")
    for _ in range(3):
        losses = [Step(each)()["loss"].sum for each in (plain, staged)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    for name, slope in plain.learner.gradients().items():
        torch.testing.assert_close(staged.learner.gradients()[name], slope, rtol=1e-3, atol=1e-6)


def test_two_scans_at_once_are_refused(text):
    with pytest.raises(RecipeError, match="scan"):
        pipeline(text, "optimization.chunked_scan=on", "optimization.associative_scan=on")


def test_what_comes_later_changes_nothing_before(text):
    made = pipeline(text, "optimization.chunked_scan={chunk: 5}")
    tokens = made.slots.next_batch(4, made.progress)["tokens"][:, :-1].clone()
    before = made.learner.predict(tokens)
    for place in range(1, 12):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % made.source.sizes["vocabulary"]
        after = made.learner.predict(changed)
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-6)
        assert not torch.allclose(after[:, place], before[:, place])


def test_decays_steps_and_norms_are_spared_from_weight_decay(text):
    learner = pipeline(text).learner
    decayed, spared = learner.model.optimizer.param_groups
    names = {id(parameter): name for name, parameter in learner.named_parameters()}
    assert {names[id(each)].rpartition("mixer.")[2] for each in decayed["params"]} == {
        "enter.weight", "convolution.weight", "leave.weight",
    }  # fmt: skip
    assert len(spared["params"]) + len(decayed["params"]) == len(names)


def test_first_steps_are_between_their_bounds(text):
    for block in pipeline(text).learner.module.blocks:
        steps = torch.nn.functional.softplus(block.mixer.delta_bias)
        assert ((steps > 0.99e-3) & (steps < 1.01e-1)).all()


def test_heads_divide_the_inner_width(text):
    with pytest.raises(RecipeError, match=r"model\.head_width: should divide the width inside of a block, 32"):
        pipeline(text, "model.head_width=5")
