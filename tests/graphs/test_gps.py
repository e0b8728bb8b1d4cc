import pytest
import torch
from torch import nn

from runner.plugin.registry import Registry
from runner.plugins.graphs.config import GpsConfig
from runner.plugins.graphs.gps import Fusion, GpsLayer
from runner.plugins.graphs.molecules import MoleculeGraphs
from runner.plugins.graphs.padding import NODES, padded_nodes
from runner.recipe.loader import load
from runner.system.errors import UsageError
from runner.training.pipeline import assemble
from runner.training.step import Step

SMALL = ("device=cpu", "model.layers=2", "model.width=8", "model.heads=2", "train.batch_size=12")
MOLECULES = [
    *("C" * n for n in range(1, 9)), *("C" * n + "O" for n in range(1, 9)), "c1ccccc1", "Cc1ccccc1", "C1CCCCC1",
    "c1ccc2ccccc2c1", "CC(=O)O", "CC#N", "C[N+](=O)[O-]", "O", "[Na+].[Cl-]", "CCOC(=O)CCCCCCCCCCCCCCC", "C" * 30,
]  # fmt: skip


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("\n".join(["smiles,target", *(f"{text},{text.count('O') / len(text)}" for text in MOLECULES)]))
    return path


def pipeline(table, *sets):
    plain = ("optimization.fused_optimizer=off", "optimization.preprocess_once=off")
    return assemble(load("gps_esol", [*SMALL, *plain, f"data.file={table}", *sets], Registry()))


def graphs(sizes, width, seed=0):
    """Random graphs of these numbers of nodes, with the edges' vectors: dense, padded; and as lists."""
    draw = torch.Generator().manual_seed(seed)
    pairs = [[(a, b) for a in range(n) for b in range(n) if a != b and (a + b) % 3] for n in sizes]
    nodes, edges = max(sizes), max(map(len, pairs))
    x = torch.randn(len(sizes), nodes, width, generator=draw, dtype=torch.float64)
    kind = torch.randn(len(sizes), edges, width, generator=draw, dtype=torch.float64)
    edge = torch.zeros(len(sizes), edges, 2, dtype=torch.int64)
    real, mask = torch.zeros(len(sizes), edges, dtype=torch.bool), torch.zeros(len(sizes), nodes, dtype=torch.bool)
    for row, (size, each) in enumerate(zip(sizes, pairs, strict=True)):
        mask[row, :size], real[row, : len(each)] = True, True
        edge[row, : len(each)] = torch.tensor(each).reshape(-1, 2)
    return x, edge, real, kind, mask


def test_a_layer_is_that_of_torch_geometric():
    geometric = pytest.importorskip("torch_geometric.nn")
    width, heads = 12, 3
    torch.manual_seed(0)
    ours = GpsLayer(GpsConfig(width=width, heads=heads)).double()
    for norm in (ours.norm1, ours.norm2, ours.norm3):
        nn.init.normal_(norm.weight)
    local = geometric.GINEConv(ours.local.update, train_eps=True, edge_dim=None)
    theirs = geometric.GPSConv(width, local, heads=heads, norm=None, act="relu").double()
    theirs.norm1, theirs.norm2, theirs.norm3 = ours.norm1, ours.norm2, ours.norm3  # its own normalise whole graphs
    theirs.norm_with_batch = False
    nn.init.constant_(ours.local.epsilon, 0.3)
    nn.init.constant_(theirs.conv.eps, 0.3)
    theirs.attn.in_proj_weight, theirs.attn.in_proj_bias = ours.attention.qkv.weight, ours.attention.qkv.bias
    theirs.attn.out_proj.weight, theirs.attn.out_proj.bias = ours.attention.out.weight, ours.attention.out.bias
    theirs.mlp[0], theirs.mlp[3] = ours.feed[0], ours.feed[2]
    sizes = [5, 9, 1, 7]
    x, edge, real, kind, mask = graphs(sizes, width)
    first = torch.tensor([sum(sizes[:row]) for row in range(len(sizes))])
    flat = (edge + first[:, None, None])[real].T
    batch = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    found, wanted = ours(x, edge, real, kind, mask)[mask], theirs(x[mask], flat, batch, edge_attr=kind[real])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["scalar", "channel", "node"])
def test_every_fusion_begins_as_the_sum(kind):
    one, other = torch.randn(2, 3, 4, 8).unbind()
    torch.testing.assert_close(Fusion(kind, 8)(one, other), one + other)


def test_padding_and_the_other_molecules_do_not_change_an_answer(table):
    made = pipeline(table)
    samples = [made.source.train[index] for index in range(12)]
    together = made.learner.predict(made.learner.inputs(made.source.collate(samples)))
    alone = [made.learner.predict(made.learner.inputs(made.source.collate([each]))) for each in samples]
    torch.testing.assert_close(together, torch.cat(alone))


def test_the_order_of_the_atoms_does_not_change_an_answer(table):
    made = pipeline(table)
    batch = made.source.collate([made.source.train[index] for index in range(6)])
    order = torch.randperm(batch["x"].shape[1])
    moved = {
        **batch,
        "x": batch["x"][:, order],
        "mask": batch["mask"][:, order],
        "edge": order.argsort()[batch["edge"]],
    }
    torch.testing.assert_close(*(made.learner.predict(made.learner.inputs(each)) for each in (batch, moved)))


def test_a_bucket_has_room_for_nodes_and_edges():
    assert [padded_nodes(nodes, 0) for nodes in (1, 16, 17, 33, 56, 57, 113)] == [16, 16, 24, 56, 56, 112, 168]
    assert padded_nodes(16, 41) == NODES[1]


def test_buckets_hold_every_molecule_once_and_lose_nothing(table):
    made = pipeline(table)
    batch = made.source.collate(sorted(made.source.train, key=lambda graph: len(graph.x))[-12:])
    parts = list(made.source.buckets(batch))
    assert len(parts) > 1
    assert sorted(torch.cat([index for index, _ in parts]).tolist()) == list(range(12))
    for index, part in parts:
        for name in ("x", "bond", "mask"):
            assert part[name].sum() == pytest.approx(batch[name][index].sum())


def test_a_bucket_keeps_every_node_that_an_edge_names(table):
    made = pipeline(table)
    batch = made.source.collate([made.source.train[index] for index in range(12)])
    batch["edge"][0, -1, 0] = batch["x"].shape[1] - 1
    for _, part in made.source.buckets(batch):
        assert part["edge"].max() < part["x"].shape[1]


def test_the_error_is_reported_in_the_tables_unit(table):
    made = pipeline(table)
    found = made.source.evaluate(made.learner)
    batch = made.source.collate([made.source.held_out[index] for index in range(len(made.source.held_out))])
    error = (made.learner.predict(made.learner.inputs(batch)) - batch["target"]) * made.source.table.std
    assert found["rmse"] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-5)


def test_it_learns(table):
    made = pipeline(table, "optimizer.lr=0.03")
    step, batch = Step(made), made.source.collate(list(made.source.train))
    before = float(made.learner.metrics(batch)["loss"].sum)
    for _ in range(60):
        step(step.next())
    assert float(made.learner.metrics(batch)["loss"].sum) < before / 4


def losses(made, updates=6):
    step = Step(made)
    return [step(step.next())["loss"].sum for _ in range(updates)]


def test_samples_that_are_made_once_are_the_same(table):
    plain, kept = (pipeline(table, f"optimization.preprocess_once={state}") for state in ("off", "on"))
    assert all(map(torch.equal, losses(plain), losses(kept)))
    (note,) = kept.stages["preprocess_once"].closing_notes()
    assert note == "23 samples made once, found again 49 times"  # six batches of twelve


def test_samples_are_kept_by_workers_for_themselves(table):
    sets = ("optimization.preprocess_once=on", "data.workers=1")
    assert all(map(torch.equal, losses(pipeline(table)), losses(pipeline(table, *sets))))


def test_buckets_add_up_to_the_batch(table):
    whole, parts = (pipeline(table, f"optimization.bucketing={state}") for state in ("off", "on"))
    for one, other in zip(losses(whole), losses(parts), strict=True):
        torch.testing.assert_close(one, other)


def test_buckets_refuse_a_model_that_draws(table):
    with pytest.raises(UsageError, match="switch the model's dropout off"):
        pipeline(table, "optimization.bucketing=on", "model.dropout=0.1")


def test_buckets_need_a_source_that_cuts_its_batches(table, monkeypatch):
    monkeypatch.delattr(MoleculeGraphs, "buckets")
    with pytest.raises(UsageError, match=r"bucketing needs a method MoleculeGraphs\.buckets\(batch\)"):
        pipeline(table, "optimization.bucketing=on")
