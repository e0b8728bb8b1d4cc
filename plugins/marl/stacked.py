"""The parameters of all agents stacked, so that one batched matmul serves them all.

Shapes: B batch, N agents, M networks (N actors, or 2 N critics with an agent's two side by side).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from runner.api import OptimizerSettings, Slots, State, restore

from .layout import as_agent_states, as_stacked, as_vector_state, split
from .networks import Precision
from .roles import ALL, AgentsRole


class Stack:
    """Same-shaped tensors of M networks, stacked layer by layer in one flat vector.

    Weights are stored as [M, inputs, outputs]: the batched matmul and its gradient then
    need no copy. The parameters of the networks become views, so that names and state
    dictionaries are unchanged.
    """

    def __init__(self, networks: Sequence[Sequence[nn.Parameter]]) -> None:
        layers = [
            torch.stack([as_stacked(p.detach()) for p in parameters])
            for parameters in zip(*networks, strict=True)
        ]
        self.shapes = [layer.shape for layer in layers]
        # One vector: an optimizer or an average then needs one kernel instead of hundreds.
        self.flat = torch.cat([layer.flatten() for layer in layers])
        self.views = split(self.flat, self.shapes)
        for view, parameters in zip(
            self.views, zip(*networks, strict=True), strict=True
        ):
            for row, parameter in zip(view, parameters, strict=True):
                parameter.data = as_stacked(row)


class StackedRole(AgentsRole):
    """A role whose agents are clipped row by row and whose parameters are, to its optimizer, one
    vector.

    Its external state is that of ``AgentsRole``: a training can continue stacked or unstacked.
    """

    def __init__(
        self,
        networks: Sequence[Sequence[nn.Parameter]],
        agents: int,
        settings: OptimizerSettings,
    ) -> None:
        """Stacks the networks.

        Args:
            networks: the parameters of each network; those of an agent are neighbours.
            agents: number of agents, which have equally many networks.
            settings: the role's section of the recipe.
        """
        self.networks = networks
        self.agents = agents
        self.stack = Stack(networks)
        self.layers = [nn.Parameter(view) for view in self.stack.views]
        # The layers collect gradients; the vector, in the same memory, is what is optimized.
        self.vector = nn.Parameter(self.stack.flat)
        self.vector.grad = torch.zeros_like(self.stack.flat)
        self.shares = split(self.stack.flat, self.stack.shapes)
        for share, gradient in zip(
            self.shares, split(self.vector.grad, self.stack.shapes), strict=True
        ):
            share.grad = gradient
        self.settings = settings
        self.clipping = settings.clipping()

    def leaves(self) -> Iterator[nn.Parameter]:
        """Yields the stacked layers, [M, ...] each."""
        yield from self.layers

    def configure(self, slots: Slots) -> None:
        """Makes one optimizer of one vector."""
        self.optimizers = [self.settings.make(slots, [self.vector])]

    def zero_grad(self, agents: slice = ALL) -> None:
        """Deletes the gradients of the layers; ``gather`` overwrites those of the vector."""
        for layer in self.layers:
            layer.grad = None

    def gather(self) -> None:
        """Copies the layers' gradients into the vector's."""
        for share, layer in zip(self.shares, self.layers, strict=True):
            assert share.grad is not None
            # The optimizer steps the complete vector, and would use the previous gradient again.
            if layer.grad is None:
                share.grad.zero_()
            else:
                share.grad.copy_(layer.grad)

    def clip(self, slots: Slots, agents: slice = ALL) -> None:
        """Gathers the gradients and clips every agent's norm."""
        self.gather()
        if self.clipping is not None:
            self.clipping(slots, self.optimizers[0], self.shares)

    def expose_gradients(self) -> None:
        """Assigns every network's share of the gradient to its parameters."""
        for layer, share, same in zip(
            self.layers,
            self.shares,
            zip(*self.networks, strict=True),
            strict=True,
        ):
            gradient = None if layer.grad is None else share.grad
            for i, parameter in enumerate(same):
                parameter.grad = (
                    None if gradient is None else as_stacked(gradient[i])
                )

    def state_dict(self) -> State:
        """Returns the state of one optimizer for every agent.

        The tensors are views of those of the single optimizer.
        """
        return {
            "optimizers": as_agent_states(
                self.optimizers[0].state_dict(), self.stack.shapes, self.agents
            )
        }

    def load_state_dict(self, state: State) -> None:
        """Restores the optimizer's state.

        Raises:
            ValueError: the agents have taken different numbers of steps.
        """
        restore(
            self.optimizers[0],
            as_vector_state(state["optimizers"], self.stack.shapes),
        )


class ClipAgents:
    """Clips the gradients of every agent separately."""

    def __init__(self, agents: int) -> None:
        self.agents = agents

    @torch.no_grad()
    def __call__(self, layers: Sequence[Tensor], max_norm: float) -> None:
        """Scales every agent's gradient to a total norm of at most ``max_norm``, as
        ``clip_grad_norm_`` does.
        """
        rows = [
            layer.grad.view(self.agents, -1)
            for layer in layers
            if layer.grad is not None
        ]
        norms = torch.stack([row.square().sum(1) for row in rows]).sum(0).sqrt()
        scale = (max_norm / (norms + 1e-6)).clamp(max=1.0)[:, None]
        for row in rows:
            row.mul_(scale)


class StackedMlp:
    """Computes the forward of M networks together."""

    def __init__(self, layers: Sequence[Tensor]) -> None:
        *trunk, self.head_weight, self.head_bias = layers
        self.trunk = [trunk[i : i + 4] for i in range(0, len(trunk), 4)]

    def __call__(self, inputs: Tensor, precision: Precision) -> Tensor:
        """Applies all networks.

        Args:
            inputs: [M, B, inputs]; if all networks have the same input, expanded rather
                than copied.
            precision: The context in which the trunk runs; the head runs in the parameters' type.

        Returns:
            [M, B, outputs].
        """
        hidden = inputs
        with precision():
            for weight, bias, scale, shift in self.trunk:
                hidden = torch.bmm(hidden, weight) + bias[:, None]
                hidden = functional.layer_norm(hidden, hidden.shape[-1:])
                hidden = torch.addcmul(
                    shift[:, None], hidden, scale[:, None]
                ).relu()
        # Q values of some hundreds do not fit the spacing of 16-bit numbers.
        hidden = hidden.to(self.head_weight.dtype)
        # The matmul of a single column is slower than the same products and their sum.
        if self.head_weight.shape[-1] == 1:
            products = hidden * self.head_weight.transpose(1, 2)
            return products.sum(-1, keepdim=True) + self.head_bias[:, None]
        return torch.baddbmm(self.head_bias[:, None], hidden, self.head_weight)
