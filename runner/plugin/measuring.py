"""Metrics of a learner over held-out batches."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from runner.plugin.context import Context, derived_seed
from runner.plugin.contract import Mean
from runner.plugin.generators import seeded
from runner.plugin.learner import Learner
from runner.plugin.plugin_errors import noted
from runner.plugin.source import Batch
from runner.system.errors import RunnerError
from runner.system.tensor_trees import described, map_tensors


class _Measured(NamedTuple):
    """A metric of one held-out batch.

    Attributes:
        number: Number of the batch.
        name: Name of the metric.
        mean: Its sum over the batch, and of how many things it is the sum.
    """

    number: int
    name: str
    mean: Mean


@torch.no_grad()
def measure(
    learner: Learner, batches: Iterable[Batch], context: Context
) -> dict[str, float]:
    """Returns the learner's metrics over held-out batches.

    Several processes measure the batches in turns; all have to call it. Where each has only a part
    of the parameters, all of them measure every batch together.
    """
    processes = context.processes
    if processes and learner.sharding is not None:
        processes = None
    measured: list[_Measured] = []
    seed = derived_seed(context.seed, "evaluation")
    with seeded(seed), learner.evaluating():
        for number, batch in enumerate(batches):
            # Several processes measure the batches in turns.
            if processes and number % processes.count != processes.rank:
                continue
            moved = map_tensors(lambda tensor: tensor.to(context.device), batch)
            note = partial(_held_out_place, number, batch)
            batch_seed = derived_seed(seed, str(number))
            with noted(note), seeded(batch_seed, context.device):
                metrics = learner.metrics(moved)
            _check_means(learner, metrics)
            for name, mean in metrics.items():
                plain = Mean(float(mean.sum), float(mean.count))
                measured.append(_Measured(number, name, plain))
    if processes:
        parts = processes.gather(measured)
        # In the order of a single process, so that the sums have the same bits.
        measured = sorted(itertools.chain(*parts), key=attrgetter("number"))
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    for metric in measured:
        sums[metric.name] += metric.mean.sum
        counts[metric.name] += metric.mean.count
    means = {}
    for name, count in counts.items():
        means[name] = sums[name] / count if count else math.nan
    return means


def _check_means(learner: Learner, metrics: Any) -> None:
    """Raises a RunnerError unless metrics are means by name."""
    is_mapping = isinstance(metrics, Mapping)
    if is_mapping and all(isinstance(mean, Mean) for mean in metrics.values()):
        return
    method = f"{type(learner).__name__}.metrics"
    expected = "Mean(sum, count) by name"
    raise RunnerError(f"{method} should return {expected}, got {metrics!r:.200}")


def _held_out_place(number: int, batch: Batch) -> str:
    return f"held-out batch {number + 1}: {described(batch)}"
