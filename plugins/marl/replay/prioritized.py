"""Proportional prioritized replay: Schaul et al. 2016, "Prioritized Experience Replay"
(arXiv:1511.05952).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from runner.api import Batch, Context, State

from .block_sums import BlockSums
from .buffer import Replay

UNIT = 2.0**-24
TOTAL_BITS = 62


class PrioritizedReplay(Replay):
    """Draws transition i with probability P(i) = p_i^alpha / sum p^alpha, p_i = |TD error| +
    epsilon.

    That is equation 1 and the proportional variant of section 3.3. A new transition gets the
    largest p^alpha that was ever seen, 1 at first (algorithm 1, line 6).

    p^alpha is kept as an integer number of 2^-24, at least one of them, at most what lets a full
    buffer stay below 2^62 (262,144 at a capacity of one million). Sums are therefore exact, and
    an error that is not a number counts as the smallest.
    """

    extra_bytes = torch.int64.itemsize

    def __init__(
        self,
        capacity: int,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device,
        generator: torch.Generator,
        alpha: float,
        beta: tuple[float, float],
        epsilon: float,
        context: Context | None = None,
    ) -> None:
        """Reserves memory; see ``Replay``.

        Args:
            capacity: transitions kept.
            shapes: shape of every field of one transition.
            device: where they are kept.
            generator: what ``sample`` draws from, on the same device; its state belongs to the
                caller.
            alpha: power of the priorities, 0 (uniform) to 1.
            beta: strength of the importance weights at the start and at the end of the training.
            epsilon: added to every error.
            context: has the processes whose batches are parts of one, each from a separate buffer;
                None for a single process.

        Raises:
            UsageError: the buffer will not fit in the memory that is free now.
        """
        super().__init__(capacity, shapes, device, generator)
        self.alpha = alpha
        self.beta = beta
        self.epsilon = epsilon
        self._context = context
        # The sum of a full buffer must fit an integer of 64 bits.
        self._most = 2 ** (TOTAL_BITS - capacity.bit_length())
        self._priorities = BlockSums(capacity, device)
        self._max_priority = torch.full(
            (), int(1 / UNIT), dtype=torch.int64, device=device
        )

    def store(self, batch: Batch) -> Tensor:
        """Stores transitions with the largest priority seen so far; see ``Replay.store``."""
        index = super().store(batch)
        self._priorities.set(index, self._max_priority.expand(len(index)))
        return index

    def draw(self, batch_size: int, progress: float) -> Batch:
        """Returns a random number for each share of the total, and beta; see ``Replay.draw``."""
        self._require_transitions()
        share = torch.rand(
            batch_size,
            dtype=torch.float64,
            generator=self.generator,
            device=self.device,
        )
        first, last = self.beta
        beta = first + (last - first) * min(max(progress, 0.0), 1.0)
        # Filled, because a copy from the host would wait for a GPU.
        return {
            "share": share,
            "beta": torch.full((), beta, device=self.device),
        }

    def fetch(self, drawn: Batch) -> Batch:
        """Draws transitions in proportion to their priorities; see ``Replay.sample``.

        One is drawn from each of B equal shares of the total (appendix B.2.1): the expected
        number of draws of every transition stays B P(i), and the batch has less variance. It
        comes ordered by place in the buffer.

        ``weight`` is (N P(i))^-beta divided by the largest of the batch (section 3.4, with the
        batch's maximum for the buffer's). N and the total cancel: (p_i^alpha / least p^alpha of
        the batch)^-beta. beta goes from its first to its second value during the training.

        Several processes draw parts of a batch of B from separate buffers. Then B P(i) is the
        expected number of draws of i, B_r p_i^alpha / total_r for a process r that draws B_r, and
        the largest weight is that of the entire batch: the weights correct for all of it, as if it
        were drawn from one buffer with these probabilities.
        """
        share = drawn["share"]
        batch_size = len(share)
        # One fraction in each of B equal intervals.
        strata = torch.arange(batch_size, device=self.device)
        index = self._priorities.find((share + strata) / batch_size)
        priority = self._priorities.masses.index_select(0, index).float()
        least = priority.amin()
        if self._context is not None:
            priority *= batch_size / self._priorities.total().float()
            least = self._context.min_over_processes(priority.amin())
        weight = priority.div_(least).pow_(-drawn["beta"])
        return {**self._take(index), "index": index, "weight": weight}

    def update_priorities(self, index: Tensor, td_error: Tensor) -> None:
        """Sets the priorities of the transitions at ``index``.

        A transition that is in the batch more than once gets the largest of its priorities. One
        that has been overwritten since the batch was drawn passes its priority to its successor,
        which matters only if updates lag behind the collecting.

        Args:
            index: as ``sample`` returned it, [B].
            td_error: temporal-difference errors of either sign, the mean over agents, [B].
        """
        error = td_error.to(self.device, torch.float32).abs()
        units = error.add_(self.epsilon).pow_(self.alpha).div_(UNIT)
        units = units.clamp_(max=self._most)
        # NaN converts to zero or less.
        priority = units.long().clamp_(min=1)
        self._priorities.set(index.to(self.device), priority)
        torch.maximum(
            self._max_priority, priority.amax(), out=self._max_priority
        )

    def state_dict(self) -> State:
        """Returns transitions and priorities; the tensors share the buffer's memory."""
        priorities = {
            "priorities": self._priorities.masses[: len(self)],
            "max_priority": self._max_priority,
        }
        return super().state_dict() | priorities

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned; see ``Replay.load_state_dict``."""
        super().load_state_dict(state)
        self._priorities.load(state["priorities"])
        self._max_priority.copy_(state["max_priority"])
