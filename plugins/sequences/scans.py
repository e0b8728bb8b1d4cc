"""Three ways to compute the recurrence of a selective state space model.

For every head, with a scalar decay a_t and a state h of [P, N]::

    h_t = a_t h_{t-1} + x_t b_t^T        y_t = h_t c_t

All take x [B, L, H, P] (inputs, times their step), log_decay [B, L, H] (the logarithms of a_t, at most zero) and b, c
[B, L, N], which all heads share; they return y [B, L, H, P]. The state is zero before the first symbol.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)


def recurrence(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Computes one symbol after the other, as in the equation."""
    decay, entering = log_decay.exp()[..., None, None], x.unsqueeze(-1) * b[:, :, None, None, :]
    state, states = torch.zeros_like(entering[:, 0]), []
    for kept, new in zip(decay.unbind(1), entering.unbind(1), strict=True):
        state = torch.addcmul(new, kept, state)
        states.append(state)
    return _read(torch.stack(states, 1), c)


def chunked(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """Computes chunks of symbols in parallel, and one step from chunk to chunk (Dao and Gu 2024,
    section 6: SSD).

    Within a chunk, y_i is the sum over j <= i of (c_i . b_j) exp(s_ij) x_j, with s_ij the sum of
    log_decay from j + 1 to i: a masked product of matrices, like attention. The symbols before a
    chunk have an effect through its initial state. The sums are computed for every j, because
    differences of one running sum lose the digits of weak decays next to strong ones.
    """
    size = x.shape[1]
    if rest := -size % chunk:  # symbols that add nothing and forget nothing, at the end
        x, b, c = (F.pad(each, (0, 0) * (each.dim() - 2) + (0, rest)) for each in (x, b, c))
        log_decay = F.pad(log_decay, (0, 0, 0, rest))
    x, log_decay, b, c = (each.reshape(len(each), -1, chunk, *each.shape[2:]) for each in (x, log_decay, b, c))
    x, log_decay = x.transpose(2, 3), log_decay.transpose(2, 3)  # [B, K, H, Q, P], [B, K, H, Q]
    upper = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu()
    sums = log_decay.unsqueeze(-1).masked_fill(upper, 0).cumsum(-2)  # [B, K, H, Q, Q]
    between = sums.masked_fill(upper.triu(1), -torch.inf).exp()
    y = ((c @ b.mT).unsqueeze(2) * between) @ x
    left = (x * between[..., -1, :].unsqueeze(-1)).mT @ b.unsqueeze(2)  # by each chunk, [B, K, H, P, N]
    total = log_decay.cumsum(-1)
    state, before = torch.zeros_like(left[:, 0]), []
    for kept, new in zip(total[..., -1].exp()[..., None, None].unbind(1), left.unbind(1), strict=True):
        before.append(state)
        state = torch.addcmul(new, kept, state)
    y = y + total.exp().unsqueeze(-1) * (c.unsqueeze(2) @ torch.stack(before, 1).mT)
    return y.transpose(2, 3).flatten(1, 2)[:, :size]


def associative(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Computes all symbols in parallel in log2(L) steps, each of which doubles the range of a state
    (Hillis and Steele 1986).

    The combination of consecutive (a, h) and (a', h') is (a a', a' h + h'). The states of all
    symbols are in memory.
    """
    decay, state = log_decay.exp()[..., None, None], x.unsqueeze(-1) * b[:, :, None, None, :]
    reach = 1
    while reach < x.shape[1]:
        reached = torch.addcmul(state[:, reach:], decay[:, reach:], state[:, :-reach])
        state = torch.cat([state[:, :reach], reached], 1)
        decay = torch.cat([decay[:, :reach], decay[:, reach:] * decay[:, :-reach]], 1)
        reach *= 2
    return _read(state, c)


def _read(states: Tensor, c: Tensor) -> Tensor:
    """y_t = h_t c_t, of states [B, L, H, P, N]."""
    return (states @ c[:, :, None, :, None]).squeeze(-1)
