"""Models with sparse gradients are trained, measured and resumed as others are."""

import pytest
import torch
from toy_runs import RECIPE, TOYS, trained

from runner.api import RunnerError
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.training.pipeline import assemble

SPARSE = """
from torch import nn
from torch.nn import functional as F

from runner.api import GradientLearner, GradientLearnerConfig, Loss


class NetConfig(GradientLearnerConfig):
    '''Guesses the next word from an embedding.'''

    kind, learns_from, implementation = "sparse", "toy_words", "Net"
    sparse: bool = True


class Net(GradientLearner):
    def build(self, config, shapes, context):
        return nn.Embedding(16, 16, sparse=config.sparse)

    def loss(self, batch, noise, progress):
        words, following = batch["words"][:, :-1], batch["words"][:, 1:]
        loss = F.cross_entropy(self.slots.forward(words).flatten(0, 1), following.flatten(), reduction="sum")
        return Loss(loss, following.numel())
"""
SETTINGS = ("train.updates=6", "train.log_every=3", "train.evaluate_every=3")


def pipeline_of(tmp_path, *sets):
    plugin = tmp_path / "sparse.py"
    plugin.write_text(SPARSE)
    recipe_text = RECIPE.replace("kind: toy}", "kind: sparse}").replace("{lr: 1e-2}", "{kind: sgd, lr: 0.1}")
    (tmp_path / "toy.yaml").write_text(recipe_text)
    plugins = [TOYS, plugin]
    return assemble(load(tmp_path / "toy.yaml", [*SETTINGS, *sets], Registry(plugins)), plugins)


def weights_of(loop):
    return loop.pipeline.learner.module.weight.detach().clone()


@pytest.mark.parametrize("sets", [(), ("train.ema=0.9",), ("train.on_nonfinite=skip",)])
def test_sparse_gradients_train_the_model_of_dense_ones(sets, tmp_path):
    sparse, notes = trained(tmp_path, pipeline_of(tmp_path, *sets))
    dense, dense_notes = trained(tmp_path, pipeline_of(tmp_path, "model.sparse=false", *sets))
    torch.testing.assert_close(weights_of(sparse), weights_of(dense))
    (name,) = [name for name in dense_notes.points if "gradient_norm" in name]
    assert dict(notes.points[name]) == pytest.approx(dict(dense_notes.points[name]))


def test_a_sparse_adam_is_resumed(tmp_path):
    sets = ("optimizer.kind=sparseadam",)
    loop, _ = trained(tmp_path, pipeline_of(tmp_path, *sets))
    state = loop.state_dict()
    resumed = pipeline_of(tmp_path, *sets)
    resumed.load_state_dict(state["pipeline"])
    assert torch.equal(resumed.learner.module.weight, loop.pipeline.learner.module.weight)


def test_parts_of_a_batch_add_up_to_its_sparse_gradient(tmp_path):
    accumulated = "optimization={gradient_accumulation: {micro_batch: 4}}"
    parts, _ = trained(tmp_path, pipeline_of(tmp_path, accumulated))
    whole, _ = trained(tmp_path, pipeline_of(tmp_path))
    torch.testing.assert_close(weights_of(parts), weights_of(whole))


def test_a_sparse_gradient_that_torch_cannot_clip_is_refused_in_one_line(tmp_path):
    with pytest.raises(RunnerError, match=r"^optimizer\.max_grad_norm: torch cannot clip sparse gradients"):
        trained(tmp_path, pipeline_of(tmp_path, "optimizer.max_grad_norm=0.5"))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
@pytest.mark.parametrize("sparse", [True, False])
def test_an_optimizer_without_a_fused_kernel_for_sparse_gradients_stays_as_it_is(kind, sparse, tmp_path):
    sets = (f"optimizer.kind={kind}", f"model.sparse={sparse}".lower())
    fused, _ = trained(tmp_path, pipeline_of(tmp_path, *sets, "optimization={fused_optimizer: on}"))
    plain, _ = trained(tmp_path, pipeline_of(tmp_path, *sets))
    torch.testing.assert_close(weights_of(fused), weights_of(plain))
    notes = fused.pipeline.stages["fused_optimizer"].closing_notes()
    name = {"sgd": "SGD", "adagrad": "Adagrad"}[kind]
    expected = [f"sparse gradients have no fused kernel: {name} stays as it is"]
    assert notes == (expected if sparse else [])
