"""Figure of a graph with classes: a part of it, and how many nodes are known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import networkx as nx
import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (11.0, 6.0)
LARGEST_PART = 180
"""Nodes that are drawn."""
BRANCHES = 4
"""Neighbours of a node that are drawn because of it."""
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#e69f00",
    "#56b4e9",
    "#cc79a7",
    "#5a5a5a",
    "#000000",
    "#b8860b",
    "#8a2be2",
)
LAYOUT_SEED = 0


class LabelledGraph(NamedTuple):
    """Nodes with classes, some for training and some held out."""

    edges: Tensor
    """[E, 2], each edge once."""
    label: Tensor
    """[N]; -1 if the class is unknown."""
    is_trained: Tensor
    """[N] bool."""
    is_held_out: Tensor
    """[N] bool."""


def draw_graph(graph: LabelledGraph, name: str, canvas: Any) -> None:
    """Draws connected nodes, nodes by class, and nodes by number of edges.

    Args:
        graph: The graph.
        name: Name of the data, for the title.
        canvas: An empty matplotlib figure.
    """
    canvas.set_size_inches(*SIZE_INCHES)
    nodes = len(graph.label)
    same_class = float(
        (graph.label[graph.edges[:, 0]] == graph.label[graph.edges[:, 1]])
        .float()
        .mean()
    )
    edges = len(graph.edges)
    canvas.suptitle(
        f"{name}: {nodes:,} nodes, {edges:,} edges, {same_class:.0%} of them within a class; "
        f"{int(graph.is_trained.sum()):,} labels for training, "
        f"{int(graph.is_held_out.sum()):,} held out",
        fontsize=10,
    )
    neighbourhood_panel, counts_panel = canvas.subfigures(
        1, 2, width_ratios=(1.7, 1)
    )
    draw_neighbourhood(graph, neighbourhood_panel.subplots())
    class_axes, degree_axes = counts_panel.subplots(2, 1)
    draw_classes(graph, class_axes)
    draw_degrees(graph, degree_axes)


def draw_neighbourhood(graph: LabelledGraph, axes: Axes) -> None:
    """Draws connected nodes in the colours of their classes."""
    network: nx.Graph[int] = nx.Graph()
    network.add_edges_from(graph.edges.tolist())
    subgraph = network.subgraph(neighbourhood(network))
    position = nx.spring_layout(
        subgraph, seed=LAYOUT_SEED, k=0.18, iterations=80
    )

    for start, end in subgraph.edges:
        xs, ys = zip(position[start], position[end], strict=True)
        axes.plot(xs, ys, color="#b0b0b0", lw=0.6, zorder=1)
    for node in subgraph.nodes:
        label = int(graph.label[node])
        colour = COLOURS[label % len(COLOURS)] if label >= 0 else "#d0d0d0"
        is_trained = bool(graph.is_trained[node])
        marker = "s" if is_trained else "o"
        edge = "black" if is_trained else "white"
        axes.plot(
            *position[node],
            marker,
            color=colour,
            ms=9 if is_trained else 6,
            mec=edge,
            mew=0.8,
            zorder=2,
        )
    axes.set_axis_off()
    axes.set_title(
        f"{len(subgraph):,} connected nodes, coloured by class; squares have a label for training"
    )


def neighbourhood(network: nx.Graph[int]) -> list[int]:
    """Returns connected nodes of the largest component, at most ``LARGEST_PART``."""
    component = max(nx.connected_components(network), key=len)
    start = min(
        component, key=lambda node: (abs(network.degree(node) - BRANCHES), node)
    )
    nodes = [start]
    visited = {start}
    for node in nodes:
        # Few neighbours of each node, because those of one hub could be all that is drawn.
        neighbours = [
            neighbour
            for neighbour in sorted(network[node])
            if neighbour not in visited
        ][:BRANCHES]
        nodes += neighbours
        visited.update(neighbours)
        if len(nodes) >= LARGEST_PART:
            break
    return nodes[:LARGEST_PART]


def draw_classes(graph: LabelledGraph, axes: Axes) -> None:
    """Draws how many nodes of each class there are, and how many of them are trained on."""
    classes = int(graph.label.max()) + 1
    all_counts = torch.bincount(
        graph.label[graph.label >= 0], minlength=classes
    ).tolist()
    train_counts = torch.bincount(
        graph.label[graph.is_trained], minlength=classes
    ).tolist()
    colours = [COLOURS[number % len(COLOURS)] for number in range(classes)]
    axes.bar(
        range(classes), all_counts, color=colours, alpha=0.45, label="all nodes"
    )
    axes.bar(
        range(classes),
        train_counts,
        color=colours,
        edgecolor="black",
        label="labels for training (dark)",
    )
    axes.set_xticks(range(classes))
    axes.set_xlabel("class")
    axes.set_title("Nodes by class: all (light), labels for training (dark)")


def draw_degrees(graph: LabelledGraph, axes: Axes) -> None:
    """Draws how many nodes have how many edges, on logarithmic axes."""
    degree = torch.bincount(graph.edges.flatten(), minlength=len(graph.label))
    counts = torch.bincount(degree)
    values = counts.nonzero().flatten()
    axes.loglog(values + 1, counts[values], "o", ms=3, color="#0072b2")
    axes.set_xlabel("edges of a node + 1")
    axes.set_ylabel("nodes")
    axes.set_title("Nodes by number of edges")
