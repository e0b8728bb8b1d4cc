"""The parameters of all agents stacked, so that one batched matmul serves them all.

Shapes: B batch, N agents, M networks (N actors, or 2 N critics with an agent's two side by side).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional

from runner.api import Slots

from .roles import ALL, MakeOptimizer, Role

Precision = Callable[[], AbstractContextManager[None]]


class Stack:
    """Same-shaped tensors of M networks, stacked layer by layer in one flat vector.

    The networks' own parameters become views of it, so that names and state dictionaries stay as they were.
    """

    def __init__(self, networks: Sequence[Sequence[nn.Parameter]]) -> None:
        layers = [torch.stack([p.detach() for p in same]) for same in zip(*networks, strict=True)]
        self.flat = torch.cat([layer.flatten() for layer in layers])
        self.views = self.split(self.flat, layers)
        for view, same in zip(self.views, zip(*networks, strict=True), strict=True):
            for own, parameter in zip(view, same, strict=True):
                parameter.data = own

    @staticmethod
    def split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """Views of a flat vector in the shapes of ``like``."""
        pieces = torch.split(flat, [layer.numel() for layer in like])
        return [piece.view_as(layer) for piece, layer in zip(pieces, like, strict=True)]


class StackedRole(Role):
    """A role whose agents are clipped row by row and stepped by one optimizer."""

    def __init__(self, networks: Sequence[Sequence[nn.Parameter]], agents: int, max_grad_norm: float | None) -> None:
        self.networks = networks
        self.stack = Stack(networks)
        self.layers = [nn.Parameter(view) for view in self.stack.views]
        self.agents = agents
        self.max_grad_norm = max_grad_norm

    def leaves(self) -> Iterator[nn.Parameter]:
        """The stacked layers, [M, ...] each."""
        yield from self.layers

    def configure(self, make: MakeOptimizer) -> None:
        """Makes one optimizer of all stacked layers."""
        self.optimizers = [make([*self.layers])]

    def step(self, slots: Slots, agents: slice = ALL) -> None:
        """Clips every agent's gradient norm and steps all agents at once."""
        slots.optimizer_step(self.optimizers[0], self.clip)

    @torch.no_grad()
    def clip(self) -> None:
        """Scales every agent's gradient to a norm of at most ``max_grad_norm``, as ``clip_grad_norm_`` does."""
        if self.max_grad_norm is None:
            return
        rows = [layer.grad.view(self.agents, -1) for layer in self.layers if layer.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows]).norm(dim=0)
        scale = (self.max_grad_norm / (norms + 1e-6)).clamp(max=1.0)[:, None]
        for row in rows:
            row.mul_(scale)

    def expose_gradients(self) -> None:
        """Shows every network's share of the gradient at its own parameters."""
        for layer, same in zip(self.layers, zip(*self.networks, strict=True), strict=True):
            for i, parameter in enumerate(same):
                parameter.grad = None if layer.grad is None else layer.grad[i]


class StackedMlp:
    """The forward of M networks at once."""

    def __init__(self, layers: Sequence[Tensor], agents: int) -> None:
        *trunk, self.head_weight, self.head_bias = layers
        self.trunk = [trunk[i : i + 4] for i in range(0, len(trunk), 4)]
        self.agents = agents

    def __call__(self, own: Tensor | None, shared: Tensor | None, precision: Precision) -> Tensor:
        """Applies all networks.

        Args:
            own: the part of the inputs that differs between agents, [N, B, d1], or None.
            shared: the leading part that is the same for all, [B, d2], or None.
            precision: the context in which the trunk runs; the head runs in the parameters' own type.

        Returns:
            [M, B, outputs].
        """
        (weight, bias, scale, shift), *rest = self.trunk
        with precision():
            hidden = self._normalise(self._first(weight, bias, own, shared), scale, shift)
            for weight, bias, scale, shift in rest:
                hidden = torch.baddbmm(bias[:, None], hidden, weight.transpose(1, 2))
                hidden = self._normalise(hidden, scale, shift)
        return torch.baddbmm(
            self.head_bias[:, None], hidden.to(self.head_weight.dtype), self.head_weight.transpose(1, 2)
        )

    def _first(self, weight: Tensor, bias: Tensor, own: Tensor | None, shared: Tensor | None) -> Tensor:
        networks, width, inputs = weight.shape
        if shared is None:
            assert own is not None
            return torch.baddbmm(bias[:, None], own, weight.transpose(1, 2))
        split = shared.shape[-1]
        every = torch.addmm(bias.flatten(), shared, weight[..., :split].reshape(-1, split).T)
        every = every.view(len(shared), networks, width).transpose(0, 1)
        if own is None:
            return every
        part = weight[..., split:].reshape(self.agents, -1, inputs - split)
        each = torch.bmm(own, part.transpose(1, 2)).view(self.agents, len(shared), -1, width)
        return every + each.transpose(1, 2).flatten(0, 1)

    @staticmethod
    def _normalise(hidden: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        hidden = functional.layer_norm(hidden, hidden.shape[-1:])
        return torch.addcmul(shift[:, None], hidden, scale[:, None]).relu()
