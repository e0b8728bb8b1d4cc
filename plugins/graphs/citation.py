"""Graphs of papers that cite each other, read and checked; the entire graph is one batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
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

    features: Tensor
    """[N, F]; the sum of a row is one."""
    edges: Tensor
    """[E, 2], every edge once, the smaller number first."""
    labels: Tensor
    """[N]; -1 where the class is unknown."""
    train: Tensor
    """Numbers of the training nodes."""
    held_out: Tensor
    """Numbers of the nodes for evaluation."""
    digest: str
    test: Tensor | None = None
    """Numbers of the nodes for the test; None if evaluation looks at them."""

    def directed(self) -> Tensor:
        """Returns every edge in both directions, [2 E, 2]."""
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
    # The file contains a sparse matrix in CSR form, whose values are all one.
    starts = arrays["feature_indptr"]
    columns = arrays["feature_indices"]
    nodes = len(starts) - 1
    rows = torch.repeat_interleave(torch.arange(nodes), starts.diff())
    features = torch.zeros(nodes, int(arrays["num_features"]))
    features[rows, columns] = 1

    parts = {"validation": arrays["val_index"], "test": arrays["test_index"]}
    if not len(parts[config.held_out]):
        other = "test" if config.held_out == "validation" else "validation"
        raise UsageError(
            f"data.held_out: {path} has no {config.held_out} nodes; set it to {other}"
        )
    return Graph(
        features=_normalised(features),
        edges=arrays["edge_index"].T.contiguous(),
        labels=arrays["label"],
        train=arrays["train_index"],
        held_out=parts[config.held_out],
        digest=hashlib.sha256(path.read_bytes()).hexdigest(),
        test=_tested(config, parts),
    )


def _tested(
    config: CitationConfig, parts: Mapping[str, Tensor]
) -> Tensor | None:
    """Returns the test nodes; None if there are none, or if evaluation looks at them."""
    is_evaluated = config.held_out == "test"
    return None if is_evaluated or not len(parts["test"]) else parts["test"]


def _normalised(features: Tensor) -> Tensor:
    return features / features.sum(1, keepdim=True).clamp(min=1e-12)


def _digits(config: CitationConfig) -> Graph:
    """Returns the graph of scikit-learn's digits, each connected with its nearest ones."""
    try:
        features, labels, edges = (
            tensor.clone() for tensor in _nearest_digits()
        )
    except ModuleNotFoundError as error:
        hint = "install them with: pip install 'proven-runner[vision]'"
        raise UsageError(
            f"data.synthetic: the digits of scikit-learn are missing; {hint}"
        ) from error
    # The seed is fixed, because a published split does not depend on the recipe's seed either.
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=generator)
    train = torch.cat(
        [order[labels[order] == digit][:TRAINED] for digit in range(10)]
    )
    remaining = order[~torch.isin(order, train)]
    held_out_nodes = {
        "validation": remaining[:VALIDATED],
        "test": remaining[VALIDATED : VALIDATED + TESTED],
    }
    return Graph(
        features=_normalised(features),
        edges=edges,
        labels=labels,
        train=train,
        held_out=held_out_nodes[config.held_out],
        digest=hashlib.sha256(edges.numpy().tobytes()).hexdigest(),
        test=_tested(config, held_out_nodes),
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
    # An infinite distance to itself keeps a digit out of its neighbours.
    distances = torch.cdist(features, features).fill_diagonal_(torch.inf)
    nearest = distances.topk(NEAREST, largest=False).indices
    origins = torch.arange(len(features)).repeat_interleave(NEAREST)
    pairs = torch.stack([origins, nearest.flatten()], 1)

    # Two digits that are nearest to each other have one edge, not two.
    edges = torch.unique(pairs.sort(1).values, dim=0)
    return features, labels, edges


def normalized_adjacency(graph: Graph) -> tuple[Tensor, Tensor]:
    """Returns the edges and weights of D^-1/2 (A + I) D^-1/2 (Kipf and Welling 2017, equation 2).

    Returns:
        Edges from node to node, [2 E + N, 2], and their weights, [2 E + N].
    """
    nodes = torch.arange(len(graph.features))
    self_loops = torch.stack([nodes, nodes], 1)
    edges = torch.cat([graph.directed(), self_loops])
    origin, target = edges.unbind(1)
    degree = torch.bincount(target, minlength=len(nodes)).float()
    return edges, (degree[origin] * degree[target]).rsqrt()


def partition(graph: Graph, parts: int, order: str) -> Tensor:
    """Assigns the nodes to parts of equal size, in an order that decides which share a part.

    Args:
        graph: the nodes and edges.
        parts: number of parts.
        order: ``breadth`` first, ``degree``, or ``random``.

    Returns:
        The part of every node, [N].
    """
    nodes = len(graph.features)
    if order == "random":
        chain = torch.randperm(
            nodes, generator=torch.Generator().manual_seed(0)
        )
    elif order == "degree":
        chain = torch.bincount(graph.edges.flatten(), minlength=nodes).argsort(
            descending=True, stable=True
        )
    else:
        chain = torch.tensor(_breadth_first(graph))
    part_of_node = torch.empty(nodes, dtype=torch.int64)
    part_of_node[chain] = torch.arange(nodes) * parts // nodes
    return part_of_node


def _breadth_first(graph: Graph) -> list[int]:
    """Returns all nodes, one component after the other, each in breadth-first order."""
    network: nx.Graph[int] = nx.Graph()
    network.add_nodes_from(range(len(graph.features)))
    network.add_edges_from(graph.edges.tolist())
    chain = []
    for component in nx.connected_components(network):
        # The smallest number, because the iteration order of a set is not defined.
        start = min(component)
        chain.append(start)
        chain += [node for _, node in nx.bfs_edges(network, start)]
    return chain


def borders(graph: Graph, part_of_node: Tensor) -> dict[str, Tensor]:
    """Returns which nodes each part has to send to others.

    Args:
        graph: the nodes and edges.
        part_of_node: numbers of parts, [N].

    Returns:
        ``part``; ``readers``, how many other parts need a node, [N]; ``turn``, in what order such
        nodes send, so that the number of copies is about the same for all, [N].
    """
    origin, target = graph.directed().unbind(1)
    crosses = part_of_node[origin] != part_of_node[target]
    # A part that has several neighbours of a node receives the node once.
    node_and_reader = torch.stack([origin, part_of_node[target]], 1)
    copies = torch.unique(node_and_reader[crosses], dim=0)
    readers = torch.bincount(copies[:, 0], minlength=len(part_of_node))
    sending_order = readers.argsort(descending=True, stable=True).argsort()
    return {"part": part_of_node, "readers": readers, "turn": sending_order}


class WholeGraph(TensorRows):
    """A single graph, which is never copied."""

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

    def datasets(self, config: CitationGraphConfig) -> tuple[Any, Any, Any]:
        """Returns nodes x [1, N, F], edge [1, E, 2] with weight [1, E], label [1, N], and the mask
        of nodes that count, [1, N].

        For a graph in parts, it also returns the result of ``borders``.
        """
        graph = read(config)
        edge, weight = normalized_adjacency(graph)
        self._digest = graph.digest
        self._train_labels = graph.labels[graph.train]
        self.sizes = {"classes": int(graph.labels.max()) + 1}
        shared = {
            "x": graph.features,
            "edge": edge,
            "weight": weight,
            "label": graph.labels,
        }
        # Both settings are read in any case: a setting that nothing reads is a mistake.
        parts = config.parts
        order = config.partition
        if parts > 1:
            shared |= borders(graph, partition(graph, parts, order))

        def masked(nodes: Tensor) -> WholeGraph:
            mask = torch.zeros(len(graph.labels), dtype=torch.bool)
            mask[nodes] = True
            tensors = {**shared, "mask": mask}
            return WholeGraph(
                {name: tensor[None] for name, tensor in tensors.items()}
            )

        test = None if graph.test is None else masked(graph.test)
        return masked(graph.train), masked(graph.held_out), test

    def class_counts(self) -> list[int]:
        """Returns the number of training nodes of each class."""
        counts: list[int] = torch.bincount(
            self._train_labels, minlength=self.sizes["classes"]
        ).tolist()
        return counts

    def split(self, batch: Batch, size: int) -> Iterator[Batch]:
        """Yields the batch: a graph is not cut."""
        yield batch

    def fingerprint(self) -> str:
        """Returns the SHA-256 of the file, or of the edges of the synthetic graph."""
        return self._digest

    def show_data(self, learner: Learner, canvas: Any) -> None:
        """Draws a part of the graph, nodes by class and nodes by number of edges."""
        tensors = {
            name: table[0].cpu() for name, table in self.train.tensors.items()
        }
        held_out = self.held_out.tensors["mask"][0].cpu()
        edge = tensors["edge"]
        # The batch contains each edge in both directions, and an edge from each node to itself.
        edges = edge[edge[:, 0] < edge[:, 1]]
        graph = LabelledGraph(
            edges, tensors["label"], tensors["mask"], held_out
        )
        title = (
            "synthetic: graph of digits"
            if self.config.synthetic
            else Path(self.config.file).name
        )
        draw_graph(graph, title, canvas)
