"""Graphs of other people: edges as they list them, and files that contradict themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.api import UsageError
from runner.plugins.graphs.citation_file import read_arrays, undirected

NODES = 6
GRAPH = {
    "feature_indptr": np.arange(NODES + 1),
    "feature_indices": np.arange(NODES) % 3,
    "num_features": np.array(3),
    "edge_index": np.array([[0, 1, 2], [1, 2, 5]]),
    "label": np.array([0, 1, 2, 0, 1, -1]),
    "train_index": np.array([0, 1]),
    "val_index": np.array([2]),
    "test_index": np.array([3, 4]),
}


def read(folder, **changes):
    path = folder / "graph.npz"
    np.savez(path, **{**GRAPH, **changes})
    return read_arrays(path)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_edges_count_once_however_they_are_listed(tmp_path_factory, data):
    pair = st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda nodes: nodes[0] < nodes[1])
    edges = data.draw(st.lists(pair, min_size=1, max_size=8, unique=True))
    listed = [edge if data.draw(st.booleans()) else edge[::-1] for edge in edges]
    listed += data.draw(st.lists(st.sampled_from(edges), max_size=5))
    listed += [edge[::-1] for edge in data.draw(st.lists(st.sampled_from(edges), max_size=5))]
    listed += [(node, node) for node in data.draw(st.lists(st.integers(0, 5), max_size=3))]
    listed = data.draw(st.permutations(listed))
    result = undirected(torch.tensor(listed).T, tmp_path_factory.getbasetemp())
    assert sorted(map(tuple, result.T.tolist())) == sorted(edges)


def test_a_graph_without_repeated_edges_keeps_its_order(tmp_path, caplog):
    edges = np.array([[2, 0, 5], [1, 1, 2]])
    assert read(tmp_path, edge_index=edges)["edge_index"].tolist() == [[1, 0, 2], [2, 1, 5]]
    assert not caplog.records


def test_a_warning_counts_what_is_left_out(tmp_path, caplog):
    edges = np.array([[0, 1, 2, 2, 4], [1, 0, 5, 5, 4]])
    assert read(tmp_path, edge_index=edges)["edge_index"].tolist() == [[0, 2], [1, 5]]
    (record,) = caplog.records
    message = "2 of 5 edges are listed again or in both directions, 1 join a node to itself"
    assert message in record.getMessage()


def test_a_graph_without_edges_is_a_graph(tmp_path):
    assert read(tmp_path, edge_index=np.zeros((2, 0), int))["edge_index"].shape == (2, 0)


WRONG = {
    "edge_index: 6 should be at least 0 and less than 6": {"edge_index": np.array([[0], [6]])},
    "edge_index: -1 should be at least 0": {"edge_index": np.array([[-1], [2]])},
    "edge_index: should be .2, edges., got .3, 2.": {"edge_index": GRAPH["edge_index"].T},
    "test_index: 9 should be": {"test_index": np.array([3, 9])},
    "label: should have an entry for each of 6 nodes": {"label": np.arange(5)},
    "test_index: node 5 has no label": {"test_index": np.array([5])},
    "node 1 is in train_index and in test_index: remove it": {"test_index": np.array([1, 3])},
    "node 2 is in train_index and in val_index": {"train_index": np.array([0, 2])},
    "feature_indices: 3 should be at least 0 and less than 3, num_features": {"feature_indices": np.arange(NODES) % 4},
    "feature_indptr: should rise from 0 to 6": {"feature_indptr": np.arange(NODES + 1)[::-1]},
    "num_features: should be one positive number": {"num_features": np.array(0)},
    "train_index: should have integers, got bool": {"train_index": np.arange(NODES) < 2},
    "edge_index: should have integers, got float64": {"edge_index": GRAPH["edge_index"] + 0.5},
    "label: should have integers, got <U1": {"label": np.array(list("abcdef"))},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_contradiction_is_one_line(tmp_path, message):
    with pytest.raises(UsageError, match=rf"^data\.file: .*graph\.npz: {message}[^\n]*$"):
        read(tmp_path, **WRONG[message])
