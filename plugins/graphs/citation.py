"""Graphs of papers that cite each other, read and checked; the entire graph is one batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import networkx as nx
import torch
from torch import Tensor

from runner.api import Batch, DatasetSource, Learner, TensorRows, UsageError

from .citation_file import read_arrays
from .graph_figure import LabelledGraph, draw_graph

if TYPE_CHECKING:
    from .config import CitationConfig, CitationGraphConfig

NEAREST = 10
"""Neighbours of a digit in the synthetic graph."""
TRAINED = 20
VALIDATED = 500
TESTED = 1000
"""Of its nodes: for each class to train on, then in all."""


class Graph(NamedTuple):
    """Nodes with features and classes."""

    # [N, F]; the sum of a row is one.
    features: Tensor
    # [E, 2], every edge once, the smaller number first.
    edges: Tensor
    # -1 where it is unknown.
    labels: Tensor
    # Numbers of nodes.
    train: Tensor
    held_out: Tensor
    digest: str

    def directed(self) -> Tensor:
        """Every edge from either end, [2 E, 2]."""
        return torch.cat([self.edges, self.edges.flip(1)])


def read(config: CitationConfig) -> Graph:
    """Reads the configured graph, or generates the synthetic one.

    Raises:
        UsageError: There is no such file, it contains no graph, or scikit-learn is missing.
    """
    if config.synthetic:
        return _digits(config)
    path = config.require(config.file)
    arrays = read_arrays(path)
    starts = arrays["feature_indptr"]
    columns = arrays["feature_indices"]
    features = torch.zeros(len(starts) - 1, int(arrays["num_features"]))
    features[
        torch.repeat_interleave(torch.arange(len(features)), starts.diff()), columns
    ] = 1
    held_out = arrays["test_index" if config.held_out == "test" else "val_index"]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    edges = arrays["edge_index"].T.contiguous()
    return Graph(
        _normalised(features),
        edges,
        arrays["label"],
        arrays["train_index"],
        held_out,
        digest,
    )


def _normalised(features: Tensor) -> Tensor:
    return features / features.sum(1, keepdim=True).clamp(min=1e-12)


def _digits(config: CitationConfig) -> Graph:
    """Returns the graph of scikit-learn's digits, each connected with its nearest ones."""
    try:
        features, labels, edges = (tensor.clone() for tensor in _nearest_digits())
    except ModuleNotFoundError as error:
        hint = "install them with: pip install 'proven-runner[vision]'"
        raise UsageError(
            f"data.synthetic: the digits of scikit-learn are missing; {hint}"
        ) from error
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train = torch.cat([order[labels[order] == each][:TRAINED] for each in range(10)])
    others = order[~torch.isin(order, train)]
    parts = {
        "validation": others[:VALIDATED],
        "test": others[VALIDATED : VALIDATED + TESTED],
    }
    digest = hashlib.sha256(edges.numpy().tobytes()).hexdigest()
    return Graph(
        _normalised(features), edges, labels, train, parts[config.held_out], digest
    )


@cache
def _nearest_digits() -> tuple[Tensor, Tensor, Tensor]:
    """Returns pixels [N, F] and labels [N] of digits, and edges [E, 2] between each and those
    nearest to it.

    Computed once in a process, however many pipelines it builds: nothing may change them in place.

    Raises:
        ModuleNotFoundError: scikit-learn is missing.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    features = torch.from_numpy(digits.data).float()
    labels = torch.from_numpy(digits.target).long()
    nearest = (
        torch.cdist(features, features)
        .fill_diagonal_(torch.inf)
        .topk(NEAREST, largest=False)
        .indices
    )
    pairs = torch.stack(
        [torch.arange(len(features)).repeat_interleave(NEAREST), nearest.flatten()], 1
    )
    return features, labels, torch.unique(pairs.sort(1).values, dim=0)


def smoothing(graph: Graph) -> tuple[Tensor, Tensor]:
    """The edges and weights of D^-1/2 (A + I) D^-1/2 (Kipf and Welling 2017, equation 2).

    Returns:
        From which node to which, [2 E + N, 2], and how much of it, [2 E + N].
    """
    nodes = torch.arange(len(graph.features))
    edges = torch.cat([graph.directed(), torch.stack([nodes, nodes], 1)])
    degree = torch.bincount(edges[:, 1], minlength=len(nodes)).float()
    return edges, (degree[edges[:, 0]] * degree[edges[:, 1]]).rsqrt()


def partition(graph: Graph, parts: int, order: str) -> Tensor:
    """Equally many nodes in each part, in an order that puts some together.

    Args:
        graph: the nodes and edges.
        parts: how many parts.
        order: ``breadth`` first, ``degree``, or ``random``.

    Returns:
        The part of every node, [N].
    """
    nodes = len(graph.features)
    if order == "random":
        chain = torch.randperm(nodes, generator=torch.Generator().manual_seed(0))
    elif order == "degree":
        chain = torch.bincount(graph.edges.flatten(), minlength=nodes).argsort(
            descending=True, stable=True
        )
    else:
        found: nx.Graph[int] = nx.Graph()
        found.add_nodes_from(range(nodes))
        found.add_edges_from(graph.edges.tolist())
        starts = [min(component) for component in nx.connected_components(found)]
        chain = torch.tensor(
            [
                node
                for start in starts
                for node in (start, *(b for _, b in nx.bfs_edges(found, start)))
            ]
        )
    part = torch.empty(nodes, dtype=torch.int64)
    part[chain] = torch.arange(nodes) * parts // nodes
    return part


def borders(graph: Graph, part: Tensor) -> dict[str, Tensor]:
    """Returns which nodes each part has to send to others.

    Args:
        graph: the nodes and edges.
        part: of every node, [N].

    Returns:
        ``part``; ``readers``, how many other parts need a node, [N]; ``turn``, in what order such
        nodes send, so that the number of copies is about the same for all, [N].
    """
    origin, target = graph.directed().unbind(1)
    crosses = part[origin] != part[target]
    pairs = torch.unique(torch.stack([origin, part[target]], 1)[crosses], dim=0)
    readers = torch.bincount(pairs[:, 0], minlength=len(part))
    turn = readers.argsort(descending=True, stable=True).argsort()
    return {"part": part, "readers": readers, "turn": turn}


class WholeGraph(TensorRows):
    """One graph, which is never copied."""

    def take(self, index: Tensor) -> Batch:
        """Returns the graph, which is the only sample."""
        return dict(self.tensors)

    def to(self, device: torch.device) -> WholeGraph:
        """Returns the same graph on a device."""
        return WholeGraph(
            {name: tensor.to(device) for name, tensor in self.tensors.items()}
        )


class CitationGraph(DatasetSource):
    """A source with the same graph for training and evaluation, and different masks of nodes."""

    def datasets(self, config: CitationGraphConfig) -> tuple[Any, Any]:
        """Returns nodes x [1, N, F], edge [1, E, 2] with weight [1, E], label [1, N], and the mask
        of nodes that count, [1, N].

        For a graph in parts, it also returns the result of ``borders``.
        """
        graph = read(config)
        edge, weight = smoothing(graph)
        self._digest = graph.digest
        self.sizes = {"classes": int(graph.labels.max()) + 1}
        shared = {
            "x": graph.features,
            "edge": edge,
            "weight": weight,
            "label": graph.labels,
        }
        parts = config.parts
        order = config.partition
        if parts > 1:
            shared |= borders(graph, partition(graph, parts, order))

        def counted(nodes: Tensor) -> WholeGraph:
            mask = torch.zeros(len(graph.labels), dtype=torch.bool)
            mask[nodes] = True
            return WholeGraph(
                {
                    name: tensor[None]
                    for name, tensor in {**shared, "mask": mask}.items()
                }
            )

        return counted(graph.train), counted(graph.held_out)

    def split(self, batch: Batch, size: int) -> Iterator[Batch]:
        """A graph is not cut."""
        yield batch

    def fingerprint(self) -> str:
        """Returns the SHA-256 of the file, or of the edges of the synthetic graph."""
        return self._digest

    def show_data(self, learner: Learner, canvas: Any) -> None:
        """Draws a part of the graph, nodes by class and nodes by number of edges."""
        tensors = {name: table[0].cpu() for name, table in self.train.tensors.items()}
        held_out = self.held_out.tensors["mask"][0].cpu()
        edge = tensors["edge"]
        # The batch contains each edge in both directions, and an edge from each node to itself.
        edges = edge[edge[:, 0] < edge[:, 1]]
        graph = LabelledGraph(edges, tensors["label"], tensors["mask"], held_out)
        title = (
            "synthetic: graph of digits"
            if self.config.synthetic
            else Path(self.config.file).name
        )
        draw_graph(graph, title, canvas)
