"""Settings of the task of associative recall."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import ValidationInfo, field_validator

from runner.api import (
    DatasetConfig,
    Objective,
    SourceOutline,
    TensorOutline,
    Unit,
)

from ..settings import Count
from .config import LanguageModelConfig


class RecallConfig(DatasetConfig):
    """Generated sequences of pairs of a key and its value, and then of queries: keys of the
    sequence, each followed by its value (multi-query associative recall, Arora et al. 2023,
    arXiv 2312.04927).

    Every training sequence is new. Keys, values and the order of the queries are random, so that
    only the sequence itself determines an answer. The loss is that of all tokens, as for any text;
    ``accuracy`` and ``nats_per_answer`` are those of the answers alone. Held-out sequences are the
    same for all recipes with these settings.
    """

    kind: ClassVar[str] = "recall"
    implementation = ".recall:Recall"
    provides: ClassVar[str] = "tokens"
    units: ClassVar[frozenset[Unit]] = frozenset(
        {"updates", "samples", "tokens"}
    )
    divisible: ClassVar[bool] = False
    in_memory: ClassVar[bool] = True
    headline: ClassVar[tuple[str, ...]] = ("accuracy", "nats_per_answer")
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "accuracy": (0, 1),
        **LanguageModelConfig.bounds,
    }
    objective: ClassVar[Objective | None] = Objective(
        "accuracy", "maximize", margin=0.02, unit="share"
    )

    keys: Count = 32
    """Different keys."""
    values: Count = 32
    """Different values; they are other tokens than the keys."""
    pairs: Count = 8
    """Pairs of a sequence, with different keys."""
    fewest_pairs: Count | None = None
    """Fewest different pairs of a training sequence; some of its pairs then come several times. The
    number is drawn for each sequence, up to ``pairs``, which it always is by default. With few
    pairs the rule is learned sooner, and then used for many.
    """
    queries: Count = 24
    """Queries of a sequence; all keys are queried before one is queried again."""
    held_out: Count = 512
    """Sequences of an evaluation; the test has as many others."""

    @field_validator("pairs")
    @classmethod
    def _has_enough_keys(cls, pairs: int, info: ValidationInfo) -> int:
        keys = info.data.get("keys", pairs)
        if pairs > keys:
            raise ValueError(f"should be at most the number of keys, {keys}")
        return pairs

    @field_validator("fewest_pairs")
    @classmethod
    def _is_at_most_pairs(
        cls, fewest: int | None, info: ValidationInfo
    ) -> int | None:
        if fewest is None:
            return None
        pairs = info.data.get("pairs", fewest)
        if fewest > pairs:
            raise ValueError(f"should be at most the number of pairs, {pairs}")
        return fewest

    def draws_samples(self) -> bool:
        """Returns that every access gives another sequence."""
        return True

    def length(self) -> int:
        """Returns the number of tokens of a sequence."""
        return 2 * (self.pairs + self.queries)

    def vocabulary(self) -> int:
        """Returns the number of different tokens."""
        return self.keys + self.values

    def outline(self, batch_size: int) -> SourceOutline:
        """Returns the shapes of a batch."""
        return SourceOutline(
            {"tokens": TensorOutline((batch_size, self.length()), "int64")},
            sizes={"vocabulary": self.vocabulary()},
        )
