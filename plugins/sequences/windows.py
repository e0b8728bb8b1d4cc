"""Windows of one long sequence of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from runner.api import Batch, DatasetSource, Learner, Rows

LARGEST_EVALUATED = 2**14
"""Tokens of a held-out batch. A batch of an update may be larger, if its gradient is computed in
parts.
"""


class Windows:
    """Overlapping windows of one sequence, each of ``context`` tokens and the one after them.

    Args:
        tokens: The tokens, [N], of any integer type.
        context: Tokens of a window without the last one.
        stride: Tokens between the starts of two windows.
        mask: Bits of a token. It makes unsigned numbers of signed ones, because torch has few
            functions for unsigned types.
    """

    def __init__(
        self, tokens: Tensor, context: int, stride: int, mask: int = -1
    ) -> None:
        self.tokens = tokens
        self.context = context
        self.stride = stride
        self.mask = mask
        self.offsets = torch.arange(context + 1, device=tokens.device)
        self.nbytes = tokens.nbytes

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1 - self.context) // self.stride + 1)

    def take(self, index: Tensor) -> Batch:
        """Returns the windows with these numbers, [B, context + 1]."""
        positions = index[:, None] * self.stride + self.offsets
        return {"tokens": self._as_int64(self.tokens[positions])}

    def remainder(self) -> Tensor:
        """Returns the tokens after the last window, with the one that the first follows."""
        return self._as_int64(self.tokens[len(self) * self.stride :])

    def parts(self, share: float) -> tuple[Windows, Windows]:
        """Returns windows of the first part of the sequence, and of its last part.

        Args:
            share: Share of the tokens in the last part; each part has one at least.
        """
        count = len(self.tokens)
        cut = min(max(2, round(count * (1 - share))), count - 1)
        first, last = (
            Windows(tokens, self.context, self.stride, self.mask)
            # The first token of the last part is predicted, too, from the one before it.
            for tokens in (self.tokens[:cut], self.tokens[cut - 1 :])
        )
        return first, last

    def to(self, device: torch.device) -> Windows:
        """Returns the same windows on a device."""
        return Windows(
            self.tokens.to(device), self.context, self.stride, self.mask
        )

    def _as_int64(self, tokens: Tensor) -> Tensor:
        """Returns stored tokens as int64."""
        return tokens.long() & self.mask


class WindowSource(DatasetSource):
    """Windows of one sequence, whose end is held out in adjacent windows."""

    held_out: Rows

    def tokens(self, batch: Batch) -> int:
        """Returns the number of tokens that are predicted."""
        rows, columns = batch["tokens"].shape
        return int(rows * (columns - 1))

    def set_aside(self, held_out: Rows, share: float) -> tuple[Rows, Rows]:
        """Returns windows of the first and of the last part of the held-out sequence.

        Windows at random would have their neighbours in the other part.
        """
        if not isinstance(held_out, Windows):
            return super().set_aside(held_out, share)
        return held_out.parts(share)

    def held_out_batch_size(self) -> int:
        """Returns the windows of a held-out batch, whose logits have to fit into memory."""
        context_length = self.shapes["tokens"][0] - 1
        largest = max(1, LARGEST_EVALUATED // context_length)
        return min(self.context.batch_size, largest)

    def rehearse(self, learner: Learner, batch: Batch) -> dict[str, float]:
        """Evaluates a single held-out batch, and predicts for as many windows of a batch."""
        windows = next(self.split(batch, self.held_out_batch_size()))
        return super().rehearse(learner, windows)

    def held_out_batches(self) -> Iterator[Batch]:
        """Yields every held-out token once; the last window may be shorter.

        Selected windows have no remainder.
        """
        yield from super().held_out_batches()
        if not isinstance(self.held_out, Windows):
            return
        remainder = self.held_out.remainder()
        if len(remainder) > 1:
            yield {"tokens": remainder[None]}


def split(
    tokens: Tensor, context: int, stride: int, held_out: float, mask: int = -1
) -> tuple[Windows, Windows] | None:
    """Splits a sequence into windows for training and adjacent windows for evaluation.

    Args:
        tokens: The sequence, [N].
        context: As for ``Windows``.
        stride: Stride of the windows for training.
        held_out: Share of the sequence, at its end, for evaluation.
        mask: As for ``Windows``.

    Returns:
        The windows for training and those for evaluation; None if the sequence is too short for
        one window of each. The held-out sequence starts with the token before it, from which its
        first token is predicted.
    """
    cut = int(len(tokens) * (1 - held_out))
    if cut <= context or cut == len(tokens):
        return None
    # The first held-out token is predicted as well, from the last one of the training part.
    train = Windows(tokens[:cut], context, stride, mask)
    evaluated = Windows(tokens[cut - 1 :], context, context, mask)
    return train, evaluated


def by_token(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of a language model, named after tokens instead of characters."""
    return {
        name.replace("_per_character", "_per_token"): value
        for name, value in metrics.items()
    }
