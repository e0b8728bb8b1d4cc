"""Classes of papers in a citation graph, without a network, and what the pre-training of PGT adds to its inputs."""

import time

import torch
from results import TEST, Result
from scipy import sparse
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.plugin.registry import Registry
from runner.plugins.graphs.citation import normalized_adjacency, read
from runner.plugins.graphs.contexts import chosen_strength, probed
from runner.recipe.loader import load
from runner.training.evaluation import evaluated
from runner.training.pipeline import assemble

GRAPHS = ("cora.npz", "citeseer.npz")
STRENGTHS = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3)
"""L2 regularisations to choose from on the validation nodes."""
HOPS = (2, 4, 8)
RESTARTS = (0.05, 0.1, 0.2)
"""Shares of the node's own features in every step of the smoothing."""
SPREAD = 0.9
"""Share of the neighbours in label propagation (Zhou et al. 2004)."""


def adjacency(graph):
    """Returns D^-1/2 (A + I) D^-1/2 as a sparse matrix."""
    edges, weights = normalized_adjacency(graph)
    count = len(graph.features)
    return sparse.csr_array((weights.numpy(), edges.T.numpy()), shape=(count, count))


def averaged(matrix, inputs):
    """Returns the product of a sparse matrix and the inputs of all nodes."""
    return torch.from_numpy(matrix @ inputs.numpy())


def fitted(inputs, graph, strength):
    """Returns the predicted class of every node by a logistic regression on the training nodes."""
    classes = int(graph.labels.max()) + 1
    weight = torch.zeros(inputs.shape[1], classes, requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def cost():
        optimizer.zero_grad()
        fit = F.cross_entropy(inputs[graph.train] @ weight + bias, graph.labels[graph.train])
        total = fit + strength / 2 * weight.square().sum()
        total.backward()
        return total

    optimizer.step(cost)
    return (inputs @ weight + bias).argmax(1).detach()


def accuracy(predicted, graph, nodes):
    """Returns the share of the nodes whose class is predicted."""
    return float((predicted[nodes] == graph.labels[nodes]).float().mean())


def best_of(candidates, graph, validated):
    """Returns the accuracy on the held-out nodes of the candidate that is best on the validation nodes."""
    scored = [
        (accuracy(predicted, graph, validated), accuracy(predicted, graph, graph.held_out)) for predicted in candidates
    ]
    return max(scored, key=lambda scores: scores[0])[1]


def two_hops(graph, validated):
    """Simple graph convolution (Wu et al. 2019): the features after two averages, and a logistic regression."""
    matrix = adjacency(graph)
    inputs = F.normalize(averaged(matrix, averaged(matrix, graph.features)))
    return best_of([fitted(inputs, graph, strength) for strength in STRENGTHS], graph, validated)


def smoothed(graph, validated):
    """Personalised averages of the features, with settings chosen by validation, and a logistic regression."""
    matrix = adjacency(graph)
    candidates = []
    for restart in RESTARTS:
        inputs = graph.features
        for hop in range(1, max(HOPS) + 1):
            inputs = (1 - restart) * averaged(matrix, inputs) + restart * graph.features
            if hop in HOPS:
                normalized = F.normalize(inputs)
                candidates += [fitted(normalized, graph, strength) for strength in STRENGTHS]
    return best_of(candidates, graph, validated)


def label_propagation(graph, _validated):
    """Classes alone, spread over edges; features are not used."""
    matrix = adjacency(graph)
    start = torch.zeros(len(graph.labels), int(graph.labels.max()) + 1)
    start[graph.train, graph.labels[graph.train]] = 1
    scores = start
    for _ in range(100):
        scores = SPREAD * averaged(matrix, scores) + (1 - SPREAD) * start
    return accuracy(scores.argmax(1), graph, graph.held_out)


BASELINES = {
    "smoothed features, logistic regression": smoothed,
    "two hops, logistic regression": two_hops,
    "label propagation": label_propagation,
}


def measure(seeds):
    """Returns the accuracy on the test nodes; only the untrained encoder depends on the seed."""
    for file in GRAPHS:
        data = load("gcn_cora", ["device=cpu", f"data.file={file}", *TEST], Registry()).data
        graph = read(data)
        validated = read(data.model_copy(update={"held_out": "validation"})).held_out
        recipes = "gcn_cora, emma_cora" if file == "cora.npz" else f"gcn_cora data.file={file}"
        for label, function in BASELINES.items():
            started = time.perf_counter()
            value = function(graph, validated)
            yield Result(recipes, label, "accuracy", {None: value}, time.perf_counter() - started)
    yield from probes(seeds)


def probes(seeds):
    """Returns the accuracy of the probe of ``pgt_cora`` on what the encoder reads, and on an untrained encoder."""
    untrained = {}
    for seed in seeds:
        pipeline = assemble(load("pgt_cora", ["device=cpu", f"seed={seed}", *TEST], Registry()))
        started = time.perf_counter()
        untrained[seed] = evaluated(pipeline)["accuracy"]
        seconds = time.perf_counter() - started
    yield Result("pgt_cora", "its encoder before the training", "accuracy", untrained, seconds)

    source = pipeline.source
    started = time.perf_counter()
    means = []
    for batch in source.held_out_batches():
        share = batch["weight"][..., None]
        means.append((batch["x"] * share).sum(1) / share.sum(1))
    inputs = torch.cat(means)
    graph = source._graph
    strength = chosen_strength(inputs, graph.labels, graph.train, source._validated)
    value = probed(inputs, graph.labels, graph.train, graph.held_out, strength)
    yield Result("pgt_cora", "weighted mean of its inputs", "accuracy", {None: value}, time.perf_counter() - started)
