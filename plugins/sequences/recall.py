"""Sequences whose end has to be recalled from their start."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import Batch, Learner, TensorRows

from .windows import WindowSource, by_token

if TYPE_CHECKING:
    from .recall_config import RecallConfig

EPOCH = 2**16
"""Sequences of an epoch; all of them are new in the next one."""
HELD_OUT_SEED = 0
TEST_SEED = 1
"""Seeds of the sequences that are not trained on, whatever the recipe's seed is."""


class NewSequences:
    """Sequences that torch's generator draws, whatever their numbers are. The generator is seeded
    by the number of the batch.
    """

    nbytes = 0

    def __init__(self, config: RecallConfig) -> None:
        self.config = config

    def __len__(self) -> int:
        return EPOCH

    def take(self, index: Tensor) -> Batch:
        """Returns as many new sequences as there are numbers."""
        # All devices have the same sequences, because the host draws them.
        fewest = self.config.fewest_pairs
        tokens = sequences(self.config, len(index), fewest=fewest)
        return {"tokens": tokens.to(index.device)}

    def to(self, device: torch.device) -> NewSequences:
        """Returns itself: a batch is on the device of its numbers."""
        return self


def sequences(
    config: RecallConfig,
    count: int,
    generator: torch.Generator | None = None,
    fewest: int | None = None,
) -> Tensor:
    """Returns sequences [count, T] of keys, each followed by its value: first all pairs, then the
    queries with their answers.

    Keys are the tokens from 0, values those after them. Values are drawn with replacement, so that
    the last answer does not follow from the others. All pairs are queried, in random order, before
    one is queried again.

    Args:
        config: Settings.
        count: Number of sequences.
        generator: Source of random numbers; torch's own by default.
        fewest: Fewest different pairs of a sequence; None for as many as it has pairs.
    """
    order = torch.rand(count, config.keys, generator=generator).argsort(1)
    keys = order[:, : config.pairs]
    values = torch.randint(
        config.values, (count, config.pairs), generator=generator
    )
    pairs = torch.stack([keys, config.keys + values], 2)
    if fewest is not None:
        pairs = _with_repetitions(pairs, fewest, generator)

    rounds = math.ceil(config.queries / config.pairs)
    order = torch.rand(count, rounds, config.pairs, generator=generator)
    queried = order.argsort(2).flatten(1)[:, : config.queries, None]
    queries = pairs.gather(1, queried.expand(-1, -1, 2))
    return torch.cat([pairs, queries], 1).flatten(1)


def _with_repetitions(
    pairs: Tensor, fewest: int, generator: torch.Generator | None
) -> Tensor:
    """Returns sequences of pairs [count, pairs, 2] in which only the first ones are different.

    All others are random ones of these. Their number, at least ``fewest``, is uniformly
    distributed.
    """
    count, most, _ = pairs.shape
    different = torch.randint(fewest, most + 1, (count, 1), generator=generator)
    uniform = torch.rand(count, most, generator=generator)
    place = torch.arange(most).expand(count, most)
    place = torch.where(place < different, place, (uniform * different).long())
    return pairs.gather(1, place[..., None].expand(-1, -1, 2))


class Recall(WindowSource):
    """New sequences for training, and fixed ones for evaluations and for the test."""

    def datasets(self, config: RecallConfig) -> tuple[Any, Any, Any]:
        """Returns the sequences of the three parts."""
        self.sizes = {"vocabulary": config.vocabulary()}
        self.first_answer = 2 * config.pairs + 1

        def fixed(seed: int) -> TensorRows:
            generator = torch.Generator().manual_seed(seed)
            tokens = sequences(config, config.held_out, generator)
            return TensorRows({"tokens": tokens})

        return NewSequences(config), fixed(HELD_OUT_SEED), fixed(TEST_SEED)

    def evaluate(self, learner: Learner) -> dict[str, float]:
        """Returns the loss by the token, and of the answers alone their loss and the share that
        has the highest logit.
        """
        return self.with_own_metrics(
            learner,
            by_token(super().evaluate(learner)),
            self.answered(learner, self.held_out_batches()),
        )

    @torch.no_grad()
    def answered(
        self, learner: Learner, batches: Iterable[Batch]
    ) -> dict[str, float]:
        """Returns the accuracy of the answers, and their cross-entropy."""
        correct = 0.0
        nats = 0.0
        count = 0
        with learner.evaluating():
            for batch in batches:
                tokens = batch["tokens"].to(self.device)
                logits = learner.predict(learner.inputs({"tokens": tokens}))
                # The logits at a query are those of the token after it.
                logits = logits[:, self.first_answer - 1 :: 2].flatten(0, 1)
                answers = tokens[:, self.first_answer :: 2].flatten()
                correct += float((logits.argmax(1) == answers).sum())
                nats += float(
                    F.cross_entropy(logits.float(), answers, reduction="sum")
                )
                count += len(answers)
        return {"accuracy": correct / count, "nats_per_answer": nats / count}

    def fingerprint(self) -> None:
        """Returns None: all sequences follow from the settings."""
