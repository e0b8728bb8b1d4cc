"""Sampling by what was learned: batches of uniform, hard and rare samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from runner.plugin.config import Config
from runner.plugin.contract import SAMPLE_LOSSES
from runner.system.errors import RunnerError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from runner.plugin.dataset import DatasetSource

Share = Annotated[float, Field(ge=0, le=1)]
_TOLERANCE = 1e-6
"""Allowed rounding error of the sum of all shares."""


class HybridSamplingConfig(Config):
    """Shares of a batch: uniform samples, those with the largest loss, and rare ones.

    Uniform samples are the next ones of a shuffled epoch. Hard samples are those whose last loss in
    this training is the largest. Rare samples are drawn with a probability in inverse proportion to
    the size of their class, or, without labels, are those that were seen least often. No sample is
    twice in a batch. Uniform samples take the places of others that do not exist (yet).
    """

    implied: ClassVar[frozenset[str]] = frozenset({"uniform"})

    kind: Literal["hybrid"] = "hybrid"
    """Hybrid sampling."""
    uniform: Share = 0.5
    """Share of uniform samples."""
    hard: Share = 0.3
    """Share of samples with the largest loss."""
    rare: Share = 0.2
    """Share of rare samples."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        total = self.uniform + self.hard + self.rare
        if abs(total - 1) > _TOLERANCE:
            raise ValueError(
                f"uniform, hard and rare should add up to 1, and {self.uniform:g} + "
                f"{self.hard:g} + {self.rare:g} is {total:g}"
            )
        return self

    def counts(self, size: int) -> tuple[int, int]:
        """Returns the numbers of hard and of rare samples in a batch; all others are uniform."""
        hard = int(size * self.hard + 0.5)
        return hard, min(int(size * self.rare + 0.5), size - hard)


def hybrid_sampler(source: DatasetSource, samples: int | None) -> HybridSampler | None:
    """Returns the sampler of a source with hybrid sampling; None for another sampling.

    Args:
        source: The source, whose data are selected.
        samples: Number of all training samples that were found; None for a stream without a length.

    Raises:
        UsageError: The samples are a stream, which has no numbers.
    """
    from runner.plugin.inspection import is_stream
    from runner.plugin.rows import Rows

    sampling = source.config.sampling
    if not isinstance(sampling, HybridSamplingConfig):
        return None
    data = source.train
    if samples is None or (is_stream(data) and not isinstance(data, Rows)):
        problem = f"'{source.config.kind}' is a stream, whose samples have no numbers"
        raise UsageError(f"data.sampling: {problem}: use random")
    return HybridSampler(
        sampling, len(data), source.checked_labels(), source.context.seed
    )


class HybridSampler:
    """Selects the samples of every batch, and keeps their losses.

    A drawn batch is open until ``close``; its losses must arrive before, so batches cannot be drawn
    ahead.

    Args:
        config: The shares.
        samples: Number of training samples.
        labels: Class of every sample [N], negative if it is unknown; None without labels.
        seed: Seed of the orders and of the rare samples.
    """

    def __init__(
        self,
        config: HybridSamplingConfig,
        samples: int,
        labels: Tensor | None,
        seed: int,
    ) -> None:
        self.config = config
        self.seed = seed
        self.labels = labels
        self._open: list[Tensor] = []
        """Numbers of the samples of drawn batches, the oldest first."""
        self.restart(samples)

    def restart(self, samples: int) -> None:
        """Forgets all losses, and begins the first epoch of a number of samples."""
        import torch

        # The loss of a sample that was never drawn is unknown, and below every other one.
        self.losses = torch.full((samples,), -torch.inf)
        self.visits = torch.zeros(samples, dtype=torch.int64)
        self.drawn = 0
        self.epoch = 0
        self.position = 0
        self._order: Tensor | None = None
        self._rarity = self._rarities()

    def select(self, index: Tensor) -> None:
        """Uses only the samples with these numbers from now on."""
        if self.labels is not None:
            self.labels = self.labels[index]
        self.restart(len(index))

    def batches(self, size: int, device: torch.device) -> Iterator[Tensor]:
        """Yields the numbers of the samples of every batch [size], on a device."""
        while True:
            yield self.draw(size).to(device)

    def draw(self, size: int) -> Tensor:
        """Returns the numbers of the samples of the next batch [size]: uniform, hard, rare."""
        import torch

        is_taken = torch.zeros(len(self.losses), dtype=torch.bool)
        hard, rare = self.config.counts(size)
        parts = [self._uniform(size - hard - rare, is_taken)]
        parts.append(_largest(self.losses, hard, is_taken))
        parts.append(_largest(self._rare_scores(), rare, is_taken))
        missing = size - sum(map(len, parts))
        if missing:
            parts.append(self._uniform(missing, is_taken))
        self.drawn += 1
        index = torch.cat(parts)
        self._open.append(index)
        return index

    def feedback(self, batch: Any, output: Mapping[str, Any]) -> None:
        """Keeps the losses of the oldest open batch.

        Raises:
            RunnerError: The update returned no loss for each of its samples.
        """
        index = self._open[0]
        losses = output.get(SAMPLE_LOSSES)
        if losses is None or losses.shape != index.shape:
            actual = "none" if losses is None else f"the shape {list(losses.shape)}"
            raise RunnerError(
                "data.sampling: hybrid sampling needs the loss of every sample: the learner's loss "
                f"should return Loss(..., samples=...) of shape [{len(index)}], got {actual}"
            )
        self.losses[index] = losses.detach().to("cpu", self.losses.dtype)
        self.visits[index] += 1

    def close(self) -> None:
        """Ends the oldest open batch, whether its update has happened or not."""
        if self._open:
            del self._open[0]

    def state_dict(self) -> dict[str, Any]:
        """Returns the losses, the visits, and the position in the epoch of uniform samples."""
        return {
            "losses": self.losses.clone(),
            "visits": self.visits.clone(),
            "drawn": self.drawn,
            "epoch": self.epoch,
            "position": self.position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        self.losses = state["losses"].clone()
        self.visits = state["visits"].clone()
        self.drawn = state["drawn"]
        self.epoch = state["epoch"]
        self.position = state["position"]
        self._order = None
        self._open = []

    def _uniform(self, count: int, is_taken: Tensor) -> Tensor:
        """Takes the next samples of the epoch's order, or the first of the next epoch if too few
        are left.
        """
        import torch

        samples = len(self.losses)
        while True:
            if self._order is None:
                generator = self._generator(f"epoch/{self.epoch}")
                self._order = torch.randperm(samples, generator=generator)
            # Few samples of the order are taken, so a short stretch of it is sufficient.
            end = self.position + count + int(is_taken.sum())
            stretch = self._order[self.position : end]
            free = (~is_taken[stretch]).nonzero()[:, 0][:count]
            if len(free) == count:
                break
            self.epoch += 1
            self.position = 0
            self._order = None
        if count:
            self.position += int(free[-1]) + 1
        index = stretch[free]
        is_taken[index] = True
        return index

    def _rarities(self) -> Tensor | None:
        """Returns a number for every sample that is larger for rare classes [N]; None without
        labels.
        """
        import torch

        if self.labels is None or not (self.labels >= 0).any():
            return None
        is_labelled = self.labels >= 0
        counts = torch.bincount(self.labels[is_labelled]).double()
        weights = torch.zeros(len(self.labels), dtype=torch.float64)
        # As often as the inverse of a class's size, and equally often for its samples.
        weights[is_labelled] = counts[self.labels[is_labelled]].square().reciprocal()
        return weights

    def _rare_scores(self) -> Tensor:
        """Returns random numbers, the largest for rare samples [N]."""
        import torch

        generator = self._generator(f"rare/{self.drawn}")
        uniform = torch.rand(len(self.losses), generator=generator, dtype=torch.float64)
        if self._rarity is None:
            return uniform - self.visits
        # The largest of these are a weighted sample without replacement (Efraimidis and Spirakis
        # 2006).
        scores = uniform.log() / self._rarity
        return scores.masked_fill(self._rarity == 0, -torch.inf)

    def _generator(self, name: str) -> torch.Generator:
        import torch

        from runner.plugin.context import derived_seed

        seed = derived_seed(self.seed, f"hybrid/{name}")
        return torch.Generator().manual_seed(seed)


def _largest(scores: Tensor, count: int, is_taken: Tensor) -> Tensor:
    """Takes the samples with the largest finite scores, at most ``count``."""
    import torch

    free = scores.masked_fill(is_taken, -torch.inf)
    best = free.topk(min(count, len(free)))
    index = best.indices[best.values > -torch.inf]
    is_taken[index] = True
    return index
