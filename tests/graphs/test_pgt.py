import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import Progress, UsageError
from runner.plugin.registry import Registry
from runner.plugins.graphs.attention import Attention, linear_attention, softmax_attention
from runner.plugins.graphs.contexts import best, chosen_strength, neighbours, personalised_pagerank, probed, reduced
from runner.plugins.graphs.pgt import info_nce, visible_nodes
from runner.recipe.loader import load
from runner.training.pipeline import assemble
from runner.training.step import Step

PROGRESS = Progress("updates", 1)
NODES, FEATURES, KINDS = 24, 12, ("softmax", "linear")
SMALL = (
    *("model.layers=1", "model.width=16", "model.heads=2", "data.context=6", "data.components=8", "device=cpu"),
    *("train={updates: 3, batch_size: 6, evaluate_every: 3, checkpoint_every: 3}",),
)


@pytest.fixture
def graph(tmp_path):
    """A file with two rings of nodes that differ in features and class, and one node alone."""
    rng = np.random.default_rng(0)
    label = np.arange(NODES) % 2
    rows = [np.sort(rng.choice(6, 3, replace=False)) + 6 * each for each in label]
    ring = [(node, node + 2) for node in range(NODES - 3)]
    nodes = rng.permutation(NODES - 1)
    path = tmp_path / "rings.npz"
    np.savez(
        path,
        feature_indptr=np.arange(0, 3 * NODES + 1, 3),
        feature_indices=np.concatenate(rows),
        num_features=FEATURES,
        edge_index=np.array(ring).T,
        label=label,
        train_index=nodes[:8],
        val_index=nodes[8:14],
        test_index=nodes[14:],
    )
    return path


def pipeline(graph, *sets):
    return assemble(load("pgt_cora", [*SMALL, f"data.file={graph}", *sets], Registry()))


def drawn(made, size=6):
    batch = made.slots.next_batch(size, made.progress)
    return batch, made.learner.noise(batch, torch.Generator().manual_seed(0))


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1, 10])
def test_attention_to_ones_is_one(dtype, scale):
    q, k = scale * torch.randn(2, 2, 3, 50, 8, dtype=dtype).unbind(0)[0], torch.randn(2, 3, 50, 8, dtype=dtype)
    mask = torch.arange(50) < torch.tensor([[50], [1]])
    for function in (linear_attention, softmax_attention):
        ones = function(q, k, torch.ones_like(k), mask)
        torch.testing.assert_close(ones, torch.ones_like(ones), atol=1e-6, rtol=0)


def test_linear_attention_is_the_quadratic_formula():
    q, k, v = torch.randn(3, 2, 3, 9, 4, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    weight = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(2, 3) * mask[:, None, None, :]
    torch.testing.assert_close(linear_attention(q, k, v, mask), weight / weight.sum(-1, keepdim=True) @ v)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_never_reaches_real_nodes(kind):
    layer, x = Attention(16, 4, kind), torch.randn(3, 7, 16)
    mask = torch.arange(7) < torch.tensor([[7], [4], [1]])
    other = torch.where(mask[..., None], x, 100 * torch.randn_like(x))
    torch.testing.assert_close(layer(x, mask)[mask], layer(other, mask)[mask])
    torch.testing.assert_close(layer(x, mask)[1, :4], layer(x[1:2, :4], mask[1:2, :4])[0])


def test_sums_of_linear_attention_are_not_in_16_bits():
    layer, x = Attention(16, 4, "linear"), torch.randn(1, 600, 16)
    mask = torch.ones(1, 600, dtype=torch.bool)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear_attention(*torch.randn(3, 1, 1, 600, 4).bfloat16(), mask).dtype == torch.float32
        torch.testing.assert_close(layer(x, mask).float(), layer.float()(x, mask).float(), atol=0.02, rtol=0.02)


# --- contexts ---------------------------------------------------------------------------------------------------------


def ring_with_chords():
    edges = torch.tensor([(node, (node + 1) % 9) for node in range(9)] + [(0, 4), (2, 7), (0, 2)])
    return torch.cat([edges, edges.flip(1)])


def test_page_rank_is_the_solution_of_its_equation():
    edges = ring_with_chords()
    walk = torch.zeros(9, 9, dtype=torch.float64).index_put_((edges[:, 0], edges[:, 1]), torch.tensor(1.0).double())
    walk /= walk.sum(1, keepdim=True)
    exact = 0.15 * torch.linalg.inv(torch.eye(9, dtype=torch.float64) - 0.85 * walk)
    rank = personalised_pagerank(edges, torch.arange(9), 9, 0.15, 100)
    torch.testing.assert_close(rank.double(), exact, atol=1e-6, rtol=0)
    early = personalised_pagerank(edges, torch.arange(9), 9, 0.15, 20)
    torch.testing.assert_close(early.sum(1), torch.ones(9))
    assert (early.double() - exact).abs().sum(1).max() <= 2 * 0.85**20


def test_a_context_begins_with_its_node_and_falls():
    rank = torch.tensor([[0.2, 0.5, 0.0, 0.3], [0.0, 0.0, 0.15, 0.0]])
    context, weight = best(rank, torch.tensor([0, 2]), 5)
    assert context[0, :3].tolist() == [0, 1, 3]
    assert context[1, 0] == 2
    torch.testing.assert_close(weight, torch.tensor([[0.2, 0.5, 0.3, 0, 0], [0.15, 0, 0, 0, 0]]))


@pytest.mark.parametrize("shape", [(30, 9), (9, 30)])
def test_features_are_reduced_as_an_svd_does(shape):
    features = torch.rand(*shape, generator=torch.Generator().manual_seed(0))
    scores = reduced(features, 4)
    u, s, _ = torch.linalg.svd(features.double(), full_matrices=False)
    cosines = F.cosine_similarity(scores.double(), u[:, :4] * s[:4], dim=0).abs()
    torch.testing.assert_close(cosines, torch.ones(4, dtype=torch.float64), atol=1e-4, rtol=0)
    torch.testing.assert_close(scores.norm(dim=0).double(), s[:4], atol=1e-4, rtol=0)
    assert (scores.gather(0, scores.abs().argmax(0, keepdim=True)) > 0).all()
    assert reduced(features, 100).shape == (shape[0], 9)


def test_a_sample_is_the_same_alone_and_among_others(graph):
    contexts = pipeline(graph).source.train
    for index, sample in enumerate(contexts.__getitems__(range(NODES))):
        for name, tensor in contexts[index].items():
            assert torch.equal(tensor, sample[name])


def test_a_node_without_neighbours_is_padded_and_its_own_neighbour(graph):
    source = pipeline(graph).source
    batch = source.collate(source.train.__getitems__([NODES - 1, 0]))
    assert batch["mask"].sum(1).tolist() == [1, 6]
    assert batch["x"].shape == (2, 6, 8)
    assert not batch["x"][0, 1:].any()
    assert batch["node"].tolist() == [NODES - 1, 0]
    assert torch.equal(batch["neighbour"]["x"][0], batch["x"][0])
    assert not torch.equal(batch["neighbour"]["x"][1], batch["x"][1])


def test_a_neighbour_is_the_best_or_drawn_by_the_walk():
    weight = torch.tensor([[0.5, 0.1, 0.4], [0.15, 0, 0]])
    assert neighbours(weight, "best").tolist() == [[2], [0]]
    drawn = neighbours(weight.repeat(2000, 1), "walk").view(-1, 2)
    assert drawn[:, 1].max() == 0
    assert drawn[:, 0].min() == 1
    assert 0.75 < (drawn[:, 0] == 2).float().mean() < 0.85


def test_an_evaluation_leaves_the_generator_as_it_was(graph):
    made = pipeline(graph)
    before = torch.get_rng_state()
    first = made.source.evaluate(made.learner)
    assert torch.equal(torch.get_rng_state(), before)
    assert made.source.evaluate(made.learner) == first


def test_workers_draw_the_same_batches(graph):
    alone, helped = (drawn(pipeline(graph, f"data.workers={each}"))[0] for each in (0, 1))
    for name in ("x", "weight"):
        assert torch.equal(alone[name], helped[name])
        assert torch.equal(alone["neighbour"][name], helped["neighbour"][name])


def test_samples_that_are_kept_are_those_that_are_made(graph):
    kept, made = (drawn(pipeline(graph, f"optimization.preprocess_once={each}"))[0] for each in ("on", "off"))
    assert torch.equal(kept["x"], made["x"])
    assert torch.equal(kept["neighbour"]["weight"], made["neighbour"]["weight"])


# --- the learner ------------------------------------------------------------------------------------------------------


def test_a_share_of_the_real_nodes_is_shown():
    chance, mask = torch.rand(4, 8), torch.arange(8) < torch.tensor([[8], [5], [2], [1]])
    kept, real = visible_nodes(chance, mask, 0.5)
    assert kept.shape == (4, 4)
    assert real.sum(1).tolist() == [4, 3, 1, 1]
    assert mask.gather(1, kept)[real].all()
    assert chance[0].gather(0, kept[0]).max() <= chance[0].sort().values[3]


def test_info_nce_is_the_share_of_the_right_one():
    one, other = torch.randn(2, 5, 3).unbind(0)
    similarity = torch.tensor([[F.cosine_similarity(a, b, dim=0) / 0.2 for b in other] for a in one])
    expected = -(similarity.diagonal() - similarity.exp().sum(1).log()).mean()
    torch.testing.assert_close(info_nce(one, other, 0.2), expected)
    assert info_nce(10 * torch.eye(4), torch.eye(4), 0.01) < 1e-6


def test_the_loss_is_that_of_its_parts(graph):
    made = pipeline(graph, "model.contrast=0.5")
    batch, noise = drawn(made)
    loss = made.learner.loss(batch, noise, PROGRESS)
    means = {name: mean.sum / mean.count for name, mean in loss.also.items()}
    torch.testing.assert_close(loss.sum.detach() / loss.count, means["restoration"] + 0.5 * means["contrast"])
    both = [torch.cat([batch[name], batch["neighbour"][name]]) for name in ("x", "mask", "weight")]
    chance = noise["chance"].transpose(0, 1).flatten(0, 1)
    restored, hidden, mean = made.learner.module(*both, chance)
    assert not (hidden & ~batch["mask"]).any()
    missed = torch.stack(
        [(1 - F.cosine_similarity(a, b, dim=0)) ** 2 for a, b in zip(restored[hidden], batch["x"][hidden], strict=True)]
    )
    torch.testing.assert_close(means["restoration"], missed.mean().detach())
    torch.testing.assert_close(means["contrast"], info_nce(*mean.chunk(2), 0.2).detach())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_hidden_is_not_seen(graph, kind):
    made = pipeline(graph, f"model.attention={kind}")
    batch, noise = drawn(made)
    both = [torch.cat([batch[name], batch["neighbour"][name]]) for name in ("x", "mask", "weight")]
    chance = noise["chance"].transpose(0, 1).flatten(0, 1)
    restored, hidden, mean = made.learner.module(*both, chance)
    both[0][: len(hidden)][hidden] = 100.0
    again = made.learner.module(*both, chance)
    torch.testing.assert_close(again[0], restored)
    torch.testing.assert_close(again[2], mean)


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_do_not_depend_on_padding_or_company(graph, kind):
    made = pipeline(graph, f"model.attention={kind}")
    inputs = made.learner.inputs(drawn(made)[0])
    embedding = made.learner.predict(inputs)
    assert embedding.shape == (6, 16)
    alone = made.learner.predict({name: tensor[2:3] for name, tensor in inputs.items()})
    torch.testing.assert_close(alone, embedding[2:3], atol=1e-5, rtol=1e-5)
    padded = {name: F.pad(tensor, (0, 0, 0, 3) if name == "x" else (0, 3)) for name, tensor in inputs.items()}
    torch.testing.assert_close(made.learner.predict(padded), embedding, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_what_was_hidden(graph, kind):
    made = pipeline(
        graph, f"model.attention={kind}", "optimizer.lr=5e-3", "train.updates=60", "train.evaluate_every=60"
    )
    step = Step(made)
    losses = [float(step()["loss"].sum) for _ in range(60)]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    metrics = made.source.evaluate(made.learner)
    assert set(metrics) == {"accuracy", "loss", "restoration", "contrast"}
    assert all(map(math.isfinite, metrics.values()))
    assert made.source.rehearse(made.learner, drawn(made)[0]).keys() == metrics.keys()


# --- the probe and the settings ---------------------------------------------------------------------------------------


def test_the_probe_tells_what_can_be_told():
    labels = torch.arange(90) % 3
    embedding = F.one_hot(labels).float() + 0.1 * torch.randn(90, 3, generator=torch.Generator().manual_seed(0))
    train, validated, tested = torch.arange(90).split(30)
    assert probed(embedding, labels, train, tested, 0.1) == 1
    assert probed(torch.zeros(90, 3), labels, train, tested, 0.1) <= 0.5
    assert probed(embedding, labels, train, tested, 0.1) == probed(embedding.clone(), labels, train, tested, 0.1)
    assert chosen_strength(embedding, labels, train, validated) == 1
    assert chosen_strength(embedding, labels, train, None) == 0.1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.heads=3", r"model\.heads: .*divide the width of 16"),
        ("model.attention=performer", r"model\.attention"),
        ("model.masked=1", r"model\.masked"),
        ("model.temperature=0", r"model\.temperature"),
        ("data.context=1", r"data\.context"),
        ("data.restart=0", r"data\.restart"),
        ("data.file=nowhere.npz", r"data\.file: .*nowhere\.npz"),
        ("optimization.gradient_accumulation=on", r"gradient_accumulation.*cannot be cut"),
    ],
)
def test_bad_settings_are_said_by_their_key(graph, setting, message):
    with pytest.raises(UsageError, match=f"(?s){message}"):
        pipeline(graph, setting)
