"""Nodes with those that a walk from them visits most, and the linear probe of the
trained embeddings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)
from torch.utils.data import Dataset

from runner.api import Batch, DatasetSource, Learner, State, map_tensors

from .citation import read

if TYPE_CHECKING:
    from .pgt_config import NodeContextsConfig

STRENGTHS = (1e-3, 1e-2, 0.1, 1.0)
"""Of the probe's L2 regularisation, to choose from."""
USUAL = 0.1
"""The regularisation without validation nodes."""
STEPS = 200


def personalised_pagerank(
    edges: Tensor, nodes: Tensor, total: int, restart: float, steps: int
) -> Tensor:
    """Returns the distribution of a walk that started at a node and returns to it at
    random, by power iteration.

    What every node gets is added in the order of the edges, so that a row does not depend on the
    others.

    Args:
        edges: From which node to which, [E, 2]; the walk leaves a node by each of its edges with
            the same probability.
        nodes: Starts of walks, [B].
        total: Number of nodes N.
        restart: Probability of a return at every step.
        steps: Number of steps; the error of the distribution falls as (1 - restart) ** steps.

    Returns:
        Probabilities [B, N]; of a walk that cannot leave its node, less than one in all.
    """
    source, target = edges.unbind(1)
    leaving = (1 - restart) / torch.bincount(source, minlength=total).clamp(
        min=1
    )
    share = leaving[source, None].float()
    # One column per walk: the edges of all walks are added in one call.
    start = torch.zeros(total, len(nodes))
    start[nodes, torch.arange(len(nodes))] = 1
    rank = start
    for _ in range(steps):
        moved = share * rank[source]
        rank = (restart * start).index_add_(0, target, moved)
    return rank.T


def best(rank: Tensor, nodes: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Returns every node followed by those that its walk visits most.

    Args:
        rank: Distributions of the walks, [B, N].
        nodes: Their starts, [B].
        size: Nodes of a context K.

    Returns:
        Numbers of nodes [B, K], and the share of the walk that is there, [B, K]: zero for padding.
    """
    # An infinite rank makes the start of a walk the first node of its context, even where the
    # walk visits a hub more often.
    ranked = rank.scatter(1, nodes[:, None], torch.inf)
    visited = ranked.topk(min(size, rank.shape[1]), dim=1).indices
    weight = rank.gather(1, visited)
    padding = (0, size - visited.shape[1])
    return F.pad(visited, padding), F.pad(weight, padding)


def reduced(features: Tensor, components: int) -> Tensor:
    """Returns the best approximation of features [N, F] in fewer dimensions: U S of an SVD.

    The result is [N, min(N, F, components)]. Signs are such that the largest loading of every
    direction is positive.
    """
    count = min(*features.shape, components)
    x = features.double()
    # The eigenvectors of the smaller of the two products are sufficient.
    is_tall = features.shape[0] > features.shape[1]
    values, vectors = torch.linalg.eigh(x.T @ x if is_tall else x @ x.T)
    vectors = vectors.flip(1)[:, :count]
    scores: Tensor
    if is_tall:
        scores = x @ vectors
    else:
        # Rounding makes eigenvalues of zero slightly negative.
        scores = vectors * values.flip(0)[:count].clamp(min=0).sqrt()

    # The sign of an eigenvector is arbitrary and differs between libraries.
    largest = scores.gather(0, scores.abs().argmax(0, keepdim=True))
    return torch.where(largest < 0, -scores, scores).float()


class Contexts(Dataset[dict[str, Tensor]]):
    """The context of a node, computed at each access."""

    def __init__(
        self, edges: Tensor, total: int, config: NodeContextsConfig
    ) -> None:
        self.edges = edges
        self.total = total
        # Read here: a worker reads a copy, and a setting that this process never reads is refused.
        self.restart = config.restart
        self.steps = config.steps
        self.size = config.context

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Returns the same context as in a batch."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Returns numbers of nodes [K] with their weights [K]."""
        nodes = torch.tensor(indices)
        rank = personalised_pagerank(
            self.edges,
            nodes,
            self.total,
            restart=self.restart,
            steps=self.steps,
        )
        contexts, weights = best(rank, nodes, self.size)
        return [
            {"context": context, "weight": weight}
            for context, weight in zip(contexts, weights, strict=True)
        ]


class NodeContexts(DatasetSource):
    """A source with all nodes of a graph for training; the evaluation measures the
    accuracy of a linear probe.
    """

    config: NodeContextsConfig

    def datasets(self, config: NodeContextsConfig) -> tuple[Any, Any, Any]:
        """Returns the same contexts for all parts: only labels are held out."""
        graph = read(config)
        self._graph = graph
        self._digest = graph.digest
        # Read here for the same reason as in ``Contexts``.
        self._neighbour = config.neighbour
        self._tested = graph.held_out
        self._validated: Tensor | None = None
        if config.held_out == "test":
            validation = config.model_copy(update={"held_out": "validation"})
            self._validated = read(validation).held_out

        features = F.normalize(reduced(graph.features, config.components))
        # A row of length one has tiny numbers; networks expect numbers of about one.
        self._features = features * math.sqrt(features.shape[1])
        self.train = contexts = Contexts(
            graph.directed(), len(graph.features), config
        )
        return contexts, contexts, None if graph.test is None else contexts

    @contextmanager
    def testing(self) -> Iterator[None]:
        """Probes the test nodes inside the ``with``; the validation nodes choose the
        regularisation.
        """
        assert self._graph.test is not None
        with super().testing():
            self._tested = self._graph.test
            self._validated = self._graph.held_out
            try:
                yield
            finally:
                self._tested = self._graph.held_out
                self._validated = None

    def __getstate__(self) -> State:
        """Returns the state with the contexts, because ``collate`` looks up those of neighbours in
        a worker, too.
        """
        return super().__getstate__() | {"train": self.train}

    def collate(self, samples: Sequence[dict[str, Tensor]]) -> Batch:
        """Features x [B, K, F], mask of real nodes [B, K] and weight [B, K]; the same of a
        neighbour; node [B].

        The neighbour is drawn here and not with the sample, so that a sample can be kept.
        """
        context, weight = _stacked(samples)
        column = neighbours(weight, self._neighbour)
        numbers: list[int] = context.gather(1, column).flatten().tolist()
        neighbour = self._filled(*_stacked(self.train.__getitems__(numbers)))
        return {
            **self._filled(context, weight),
            "neighbour": neighbour,
            "node": context[:, 0],
        }

    def _filled(self, context: Tensor, weight: Tensor) -> dict[str, Tensor]:
        mask = weight > 0
        return {
            "x": self._features[context] * mask[..., None],
            "mask": mask,
            "weight": weight,
        }

    def evaluate(self, learner: Learner) -> dict[str, float]:
        """Returns the learner's metrics, and the accuracy of a linear probe of the
        embeddings of all nodes.
        """
        graph = self._graph
        if self.rehearsing:
            accuracy = self._accuracy_of_few(learner)
            return self.with_own_metrics(
                learner, super().evaluate(learner), {"accuracy": accuracy}
            )
        embedding = self._embedded(learner, len(graph.features))
        strength = chosen_strength(
            embedding, graph.labels, graph.train, self._validated
        )
        accuracy = probed(
            embedding, graph.labels, graph.train, self._tested, strength
        )
        return self.with_own_metrics(
            learner, super().evaluate(learner), {"accuracy": accuracy}
        )

    def _accuracy_of_few(self, learner: Learner) -> float:
        """Returns the accuracy of a probe of the nodes in one batch."""
        embedding = self._embedded(learner, self.context.batch_size)
        nodes = torch.arange(len(embedding))
        labelled = nodes[self._graph.labels[nodes] >= 0]
        return probed(embedding, self._graph.labels, labelled, labelled, 1.0)

    def _embedded(self, learner: Learner, nodes: int) -> Tensor:
        """The embeddings of the first nodes, [N, width], on the host."""
        parts = []
        batches = itertools.islice(
            self.held_out_batches(), math.ceil(nodes / self.context.batch_size)
        )
        # A batch contains sampled neighbours. The probe does not read them, and an evaluation
        # must not change which neighbours the training samples.
        with learner.evaluating(), torch.random.fork_rng(devices=[]):
            for batch in batches:
                moved = map_tensors(
                    lambda tensor: tensor.to(self.device), batch
                )
                parts.append(learner.predict(learner.inputs(moved)).cpu())
        return torch.cat(parts)

    def fingerprint(self) -> str:
        """Returns the SHA-256 of the file, or of the edges of the synthetic graph."""
        return self._digest


def neighbours(weight: Tensor, which: str) -> Tensor:
    """Returns the position of a neighbour in a context, [B, 1]; that of the node itself
    if it has none.

    Args:
        weight: share of the walk, [B, K], first of the node itself.
        which: ``best``, or ``walk`` to draw it by where the walk is.
    """
    visits = weight.index_fill(1, torch.tensor([0]), 0.0)
    if which == "best":
        return visits.argmax(1, keepdim=True)
    # ``multinomial`` needs a positive weight: an isolated node is its own neighbour.
    is_isolated = visits.sum(1, keepdim=True) == 0
    fallback = F.pad(is_isolated.float(), (0, weight.shape[1] - 1))
    return torch.multinomial(visits + fallback, 1)


def _stacked(samples: Sequence[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Returns numbers of nodes and weights, [B, K]."""
    contexts = torch.stack([sample["context"] for sample in samples])
    weights = torch.stack([sample["weight"] for sample in samples])
    return contexts, weights


def chosen_strength(
    embedding: Tensor, labels: Tensor, train: Tensor, validated: Tensor | None
) -> float:
    """Returns the regularisation with the highest accuracy on the validation nodes; of
    equals, the stronger one.

    Args:
        embedding: of all nodes, [N, D].
        labels: classes, [N].
        train: numbers of the nodes to learn from.
        validated: numbers of the validation nodes; None where evaluation itself looks at them.

    Returns:
        One of ``STRENGTHS``.
    """
    if validated is None or not len(validated):
        return USUAL

    def accuracy_and_strength(strength: float) -> tuple[float, float]:
        return probed(embedding, labels, train, validated, strength), strength

    return max(STRENGTHS, key=accuracy_and_strength)


def probed(
    embedding: Tensor,
    labels: Tensor,
    train: Tensor,
    tested: Tensor,
    strength: float,
) -> float:
    """Accuracy of a logistic regression on the standardised embeddings.

    Args:
        embedding: Of all nodes, [N, D].
        labels: Classes, [N].
        train: Numbers of the training nodes.
        tested: Numbers of the nodes to predict.
        strength: Of the L2 regularisation.

    Returns:
        The share of the tested nodes whose class is predicted correctly.
    """
    with torch.enable_grad():
        x = embedding.detach().double()
        x = (x - x.mean(0)) / x.std(0).clamp(min=1e-9)
        classes = int(labels.max()) + 1
        weight = torch.zeros(
            x.shape[1], classes, dtype=torch.double, requires_grad=True
        )
        bias = torch.zeros(classes, dtype=torch.double, requires_grad=True)
        # The problem is convex and small: a quasi-Newton method needs no learning rate.
        optimizer = torch.optim.LBFGS(
            [weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe"
        )

        def cost() -> Tensor:
            optimizer.zero_grad()
            fit = F.cross_entropy(x[train] @ weight + bias, labels[train])
            total = fit + strength / 2 * weight.square().sum()
            total.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            return total

        optimizer.step(cost)  # type: ignore[no-untyped-call]  # likewise
        predicted = (x[tested] @ weight + bias).argmax(1)
    return (predicted == labels[tested]).double().mean().item()
