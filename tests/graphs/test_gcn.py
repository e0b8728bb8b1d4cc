import networkx as nx
import numpy as np
import pytest
import torch

from runner.plugin.registry import Registry
from runner.plugins.graphs.citation import Graph, borders, normalized_adjacency, partition
from runner.plugins.graphs.gcn import propagate
from runner.recipe.loader import load
from runner.system.errors import UsageError
from runner.training.pipeline import assemble
from runner.training.step import Step

NODES, FEATURES, CLASSES = 60, 20, 3


@pytest.fixture
def file(tmp_path):
    """A small graph of three communities, of which features say something, too."""
    draw = np.random.default_rng(0)
    label = np.arange(NODES) % CLASSES
    found = nx.planted_partition_graph(CLASSES, NODES // CLASSES, 0.3, 0.03, seed=0)
    order = np.argsort(label, kind="stable")
    edges = np.array([sorted((order[a], order[b])) for a, b in found.edges])
    features = draw.random((NODES, FEATURES)) < 0.2
    features[np.arange(NODES), label] = True
    rows, columns = features.nonzero()
    path = tmp_path / "graph.npz"
    np.savez(
        path,
        feature_indptr=np.concatenate([[0], np.bincount(rows, minlength=NODES).cumsum()]),
        feature_indices=columns,
        num_features=FEATURES,
        edge_index=edges.T,
        label=label,
        train_index=np.arange(12),
        val_index=np.arange(12, 24),
        test_index=np.arange(24, NODES),
    )
    return path


def pipeline(file, *sets, name="gcn_cora"):
    sets = ("device=cpu", "optimization.fused_optimizer=off", f"data.file={file}", *sets)
    return assemble(load(name, sets, Registry()))


def trained(made, updates):
    step = Step(made)
    return [step(step.next()) for _ in range(updates)]


def graph_of(edges, nodes):
    edges = torch.tensor(edges).reshape(-1, 2)
    nothing = torch.zeros(0, dtype=torch.int64)
    return Graph(torch.eye(nodes), edges, torch.zeros(nodes, dtype=torch.int64), nothing, nothing, "")


def test_smoothing_is_its_equation():
    graph = graph_of([(0, 1), (1, 2), (1, 3)], 5)
    adjacency = torch.eye(5)
    for a, b in graph.edges.tolist():
        adjacency[a, b] = adjacency[b, a] = 1
    degree = adjacency.sum(1)
    wanted = adjacency / (degree[:, None] * degree).sqrt()
    edge, weight = normalized_adjacency(graph)
    torch.testing.assert_close(propagate(torch.eye(5)[None], edge[None], weight[None])[0], wanted)


def test_the_layer_is_that_of_torch_geometric(file):
    geometric = pytest.importorskip("torch_geometric.nn")
    made = pipeline(file)
    network, graph = made.learner.module.eval(), made.source.train.tensors
    layers = [geometric.GCNConv(len(w.weight.T), len(w.weight)) for w in network.weights]
    pairs = graph["edge"][0, :-NODES].T  # it adds a node to itself
    x = graph["x"][0]
    for place, (layer, own, bias) in enumerate(zip(layers, network.weights, network.biases, strict=True)):
        layer.lin.weight, layer.bias = own.weight, bias
        x = layer(x, pairs) if place else layer(x, pairs).relu()
    torch.testing.assert_close(network(made.learner.inputs(graph))[0], x)


def test_it_learns_what_neighbours_say(file):
    made = pipeline(file)
    trained(made, 60)
    assert made.source.evaluate(made.learner)["accuracy"] > 0.75


def test_averaged_features_give_the_same_algebra(file):
    sets = ("model.input_dropout=0", "model.dropout=0")
    plain, cached = (pipeline(file, *sets, f"optimization.propagation_cache={state}") for state in ("off", "on"))
    for one, other in zip(trained(plain, 5), trained(cached, 5), strict=True):
        torch.testing.assert_close(one["loss"].sum, other["loss"].sum)
    assert plain.source.evaluate(plain.learner) == pytest.approx(cached.source.evaluate(cached.learner), rel=1e-5)


def test_another_graph_or_one_that_was_written_to_is_averaged_anew(file):
    sets = ("model.input_dropout=0", "model.dropout=0")
    plain, cached = (pipeline(file, *sets, f"optimization.propagation_cache={state}") for state in ("off", "on"))
    graph = cached.learner.inputs(cached.source.train.tensors)
    for _ in range(2):
        torch.testing.assert_close(plain.learner.predict(graph), cached.learner.predict(graph))
        graph["x"].mul_(2)
    torch.testing.assert_close(*(each.learner.predict({**graph, "x": graph["x"] + 1}) for each in (plain, cached)))


def test_dropout_of_features_refuses_the_cache(file):
    with pytest.raises(UsageError, match=r"set model\.input_dropout to 0"):
        pipeline(file, "optimization.propagation_cache=on")


@pytest.mark.parametrize("order", ["breadth", "degree", "random"])
def test_parts_are_of_one_size_and_borders_are_what_crosses(order):
    found = nx.random_regular_graph(4, 50, seed=1)
    graph = graph_of([sorted(pair) for pair in found.edges], 50)
    part = partition(graph, 4, order)
    assert sorted(part.bincount().tolist()) == [12, 12, 13, 13]
    told = borders(graph, part)
    for node in range(50):
        elsewhere = {int(part[other]) for other in found[node]} - {int(part[node])}
        assert told["readers"][node] == len(elsewhere)
    copies = [told["readers"][told["turn"] % 4 == chunk].sum().item() for chunk in range(4)]
    assert max(copies) <= sum(copies) / 4 + 3  # nobody is in more parts than that
    assert sorted(told["turn"].tolist()) == list(range(50))


def test_everything_sent_is_the_network_on_the_whole_graph(file):
    sets = ("model.dropout=0", "data.parts=3")
    whole = trained(pipeline(file, "model.dropout=0"), 6)
    for exchange in (
        "model.exchange=full_halo",
        "model={exchange: emma, chunks: 1}",
        "model={exchange: historical, chunks: 1}",
    ):
        parts = trained(pipeline(file, *sets, exchange, name="emma_cora"), 6)
        for one, other in zip(whole, parts, strict=True):
            torch.testing.assert_close(one["loss"].sum, other["loss"].sum)


def test_emma_sends_a_chunk_and_receivers_hold_the_sum_of_what_was_sent_last(file):
    """The running sums of the paper, kept here by hand, are what the network adds up."""
    made = pipeline(file, "model={exchange: emma, chunks: 3}", "model.dropout=0", "data.parts=3", name="emma_cora")
    network, graph = made.learner.module, made.source.train.tensors
    origin, target = graph["edge"][0].unbind(-1)
    crosses = graph["part"][0][origin] != graph["part"][0][target]
    running = torch.zeros(NODES, 16, dtype=torch.float64)
    sent = torch.zeros(NODES, 16, dtype=torch.float64)
    step = Step(made)
    for update in range(7):
        x = network.weights[0](graph["x"][0]).detach().double()
        fresh = made.learner.sends(graph["turn"], update)[0]
        for edge in (crosses & fresh[origin]).nonzero()[:, 0].tolist():
            weight, source = graph["weight"][0, edge], origin[edge]
            running[target[edge]] += weight * (x[source] - sent[source])
        sent[fresh] = x[fresh]
        step(step.next())
        torch.testing.assert_close(network.sent0[0].double(), sent, rtol=1e-5, atol=1e-6)
        wanted = torch.zeros_like(running).index_add(
            0, target[crosses], sent[origin[crosses]] * graph["weight"][0, crosses, None]
        )
        torch.testing.assert_close(running, wanted)


def test_bytes_are_four_for_every_number_that_crosses(file):
    counted = {}
    for exchange in ("full_halo", "historical", "emma"):
        made = pipeline(file, f"model={{exchange: {exchange}, chunks: 4}}", "data.parts=3", name="emma_cora")
        found = [float(each["bytes_sent"].sum) for each in trained(made, 9)]
        counted[exchange] = found
        readers = int(made.source.train.tensors["readers"].sum())
    everything = 4 * (16 + CLASSES) * readers
    assert counted["full_halo"] == [everything] * 9
    assert counted["historical"] == [everything, 0, 0, 0] * 2 + [everything]
    assert counted["emma"][0] == everything
    assert sum(counted["emma"][1:5]) == sum(counted["emma"][5:9]) == everything


def test_a_graph_without_parts_is_refused(file):
    with pytest.raises(UsageError, match=r"data\.parts: model 'partitioned_gnn' needs two parts or more"):
        pipeline(file, "data.parts=1", name="emma_cora")


@pytest.mark.parametrize("content", [b"", b"no zip file", b"PK\x03\x04 torn"])
def test_a_file_that_is_no_graph_is_one_clear_line(tmp_path, content):
    path = tmp_path / "graph.npz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"data\.file: .* cannot be read as an \.npz"):
        pipeline(path)


def test_a_missing_array_is_named(tmp_path):
    path = tmp_path / "graph.npz"
    np.savez(path, label=np.zeros(3))
    with pytest.raises(UsageError, match="has no array 'feature_indptr'"):
        pipeline(path)
