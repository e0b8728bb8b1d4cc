"""Three ways to compute the selective scan of a state-space model.

For every head, with a scalar decay a_t and a hidden state h of [P, N]::

    h_t = a_t h_{t-1} + x_t b_t^T        y_t = h_t c_t

All take x [B, L, H, P] (inputs, times their step), log_decay [B, L, H] (the logarithms of a_t, at
most zero) and b, c [B, L, N], which all heads share; they return y [B, L, H, P]. The state is zero
before the first token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)


def recurrence(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Computes one token after the other, as in the equation."""
    decays = log_decay.exp()[..., None, None]
    updates = _outer(x, b)
    state = torch.zeros_like(updates[:, 0])
    states = []
    for decay, update in zip(decays.unbind(1), updates.unbind(1), strict=True):
        # One kernel without a temporary tensor.
        state = torch.addcmul(update, decay, state)
        states.append(state)
    return _read(torch.stack(states, 1), c)


def chunked(
    x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, chunk: int
) -> Tensor:
    """Computes chunks of tokens in parallel, and one step from chunk to chunk (Dao and Gu 2024,
    section 6: SSD).

    Within a chunk, y_i is the sum over j <= i of (c_i . b_j) exp(s_ij) x_j, with s_ij the sum of
    log_decay from j + 1 to i: a masked product of matrices, like attention. The tokens before a
    chunk have an effect through its initial state.
    """
    length = x.shape[1]
    # Tokens of zeros at the end add nothing to the state and do not decay it.
    padding = -length % chunk
    # From here on, x is [B, K, H, Q, P], log_decay [B, K, H, Q], and b and c are [B, K, Q, N].
    x = _chunks(x, chunk, padding).transpose(2, 3)
    log_decay = _chunks(log_decay, chunk, padding).transpose(2, 3)
    b = _chunks(b, chunk, padding)
    c = _chunks(c, chunk, padding)

    decays = _pairwise_decays(log_decay)
    y = ((c @ b.mT).unsqueeze(2) * decays) @ x
    decays_to_end = decays[..., -1, :].unsqueeze(-1)
    chunk_states = (x * decays_to_end).mT @ b.unsqueeze(2)  # [B, K, H, P, N]

    running_sums = log_decay.cumsum(-1)
    chunk_decays = running_sums[..., -1].exp()[..., None, None]
    initial_states = _initial_states(chunk_states, chunk_decays)
    decays_from_start = running_sums.exp().unsqueeze(-1)
    y = y + decays_from_start * (c.unsqueeze(2) @ initial_states.mT)
    return y.transpose(2, 3).flatten(1, 2)[:, :length]


def associative(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Computes all tokens in parallel in log2(L) steps, each of which doubles the range of a state
    (Hillis and Steele 1986).

    The combination of consecutive (a, h) and (a', h') is (a a', a' h + h'). The states of all
    tokens are in memory.
    """
    decay = log_decay.exp()[..., None, None]
    state = _outer(x, b)
    distance = 1
    while distance < x.shape[1]:
        combined = torch.addcmul(
            state[:, distance:], decay[:, distance:], state[:, :-distance]
        )
        state = torch.cat([state[:, :distance], combined], 1)
        combined = decay[:, distance:] * decay[:, :-distance]
        decay = torch.cat([decay[:, :distance], combined], 1)
        distance *= 2
    return _read(state, c)


def _chunks(values: Tensor, chunk: int, padding: int) -> Tensor:
    """Returns values [B, L, ...], padded with zeros, as [B, K, Q, ...]."""
    if padding:
        trailing = (0, 0) * (values.dim() - 2)
        values = F.pad(values, (*trailing, 0, padding))
    return values.reshape(len(values), -1, chunk, *values.shape[2:])


def _pairwise_decays(log_decay: Tensor) -> Tensor:
    """Returns the decay from every token of a chunk to every later one, [B, K, H, Q, Q]."""
    chunk = log_decay.shape[-1]
    ones = torch.ones(chunk, chunk, dtype=torch.bool, device=log_decay.device)
    upper = ones.triu()
    # Each column is summed separately, because differences of one running sum lose the digits of
    # weak decays next to strong ones.
    sums = log_decay.unsqueeze(-1).masked_fill(upper, 0).cumsum(-2)
    return sums.masked_fill(upper.triu(1), -torch.inf).exp()


def _initial_states(chunk_states: Tensor, chunk_decays: Tensor) -> Tensor:
    """Returns the state before every chunk.

    Args:
        chunk_states: What each chunk adds to the state at its end, [B, K, H, P, N].
        chunk_decays: Decay of the state over each chunk, [B, K, H, 1, 1].
    """
    state = torch.zeros_like(chunk_states[:, 0])
    initial_states = []
    pairs = zip(chunk_decays.unbind(1), chunk_states.unbind(1), strict=True)
    for decay, update in pairs:
        initial_states.append(state)
        state = torch.addcmul(update, decay, state)
    return torch.stack(initial_states, 1)


def _outer(x: Tensor, b: Tensor) -> Tensor:
    """Returns x_t b_t^T, [B, L, H, P, N]."""
    return x.unsqueeze(-1) * b[:, :, None, None, :]


def _read(states: Tensor, c: Tensor) -> Tensor:
    """Returns y_t = h_t c_t for states [B, L, H, P, N]."""
    return (states @ c[:, :, None, :, None]).squeeze(-1)
