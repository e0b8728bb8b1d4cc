import math

import pytest
import torch

from runner.api import Progress
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.training.pipeline import assemble
from runner.training.step import Step

SMALL = ("device=cpu", "model.layers=2", "model.width=16", "model.heads=2", "data.context=12", "train.batch_size=4")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join("the quick brown fox jumps over the lazy dog "[i * i % 43] for i in range(600)))
    return path


def pipeline(text, *sets):
    off = ("optimization.amp=off", "optimization.fused_optimizer=off")
    return assemble(load("shakespeare_gpt", [*SMALL, f"data.file={text}", *off, *sets], Registry()))


def test_logits_have_the_shape_of_the_symbols(text):
    made = pipeline(text)
    batch = made.slots.next_batch(4, made.progress)
    assert batch["tokens"].shape == (4, 13)
    assert made.learner.predict(made.learner.inputs(batch)).shape == (4, 12, made.source.sizes["vocabulary"])


def test_an_untrained_model_knows_nothing(text):
    made = pipeline(text)
    loss = made.source.evaluate(made.learner)["nats_per_character"]
    assert loss == pytest.approx(math.log(made.source.sizes["vocabulary"]), abs=0.05)


def test_what_comes_later_changes_nothing_before(text):
    made = pipeline(text)
    tokens = made.slots.next_batch(4, made.progress)["tokens"][:, :-1].clone()
    before = made.learner.predict(tokens)
    for place in range(1, 12):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % made.source.sizes["vocabulary"]
        after = made.learner.predict(changed)
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-6)
        assert not torch.allclose(after[:, place], before[:, place])


def test_a_shorter_window_has_the_same_answers(text):
    made = pipeline(text)
    tokens = made.slots.next_batch(4, made.progress)["tokens"][:, :-1]
    torch.testing.assert_close(made.learner.predict(tokens[:, :5]), made.learner.predict(tokens)[:, :5])


def test_the_last_layer_is_the_embedding(text):
    learner = pipeline(text).learner
    vocabulary = learner.context.sizes["vocabulary"]
    names = [name for name, value in learner.named_parameters() if vocabulary in value.shape]
    assert names == ["model.embedding.weight"]
    assert len(learner.blocks()) == 2


def test_the_embedding_is_spared_from_weight_decay(text):
    learner = pipeline(text).learner
    decayed, spared = learner.model.optimizer.param_groups
    assert any(each is learner.module.embedding.weight for each in spared["params"])
    assert {each.dim() for each in decayed["params"]} == {2}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0)


def test_dropout_draws_in_training_alone(text):
    still, dropping = pipeline(text), pipeline(text, "model.dropout=0.5")
    assert (still.recipe.model.draws(), dropping.recipe.model.draws()) == (False, True)
    batch = dropping.slots.next_batch(4, dropping.progress)
    losses = {dropping.learner.loss(batch, {}, Progress("updates", 1)).sum.item() for _ in range(2)}
    assert len(losses) == 2
    assert dropping.source.evaluate(dropping.learner) == dropping.source.evaluate(dropping.learner)


def test_it_learns_a_text_by_heart(text):
    made = pipeline(text, "lr_scheduler={kind: constant}")
    batch = made.slots.next_batch(4, made.progress)
    for _ in range(150):
        loss = made.slots.update(batch, {}, made.progress)["loss"]
    assert loss.sum / loss.count < 0.3


def test_tokens_are_counted_and_a_training_goes_on_bit_for_bit(text):
    dropout = "model.dropout=0.1"
    through, begun, resumed = (pipeline(text, dropout) for _ in range(3))
    step = Step(through)
    wanted = [step()["loss"].sum for _ in range(9)]
    half = Step(begun)
    for _ in range(4):
        half()
    resumed.load_state_dict(begun.state_dict())
    rest = Step(resumed)
    got = [rest()["loss"].sum for _ in range(5)]
    assert all(torch.equal(*pair) for pair in zip(got, wanted[4:], strict=True))
    assert resumed.progress.tokens == 9 * 4 * 12 == resumed.progress.samples * 12
    for one, other in zip(through.learner.module.parameters(), resumed.learner.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_heads_divide_the_width(text):
    with pytest.raises(RecipeError, match=r"model\.heads: should divide the width of 16"):
        pipeline(text, "model.heads=3")
