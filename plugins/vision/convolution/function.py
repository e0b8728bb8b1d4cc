"""A convolution whose forward and backward passes use chosen backends."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from runner.api import RunnerError, UsageError

from .backend import Backend
from .geometry import ConvGeometry
from .key import ConvKey, keys_of
from .native import convolution
from .registry import NATIVE
from .workspace import Workspace, new_workspace

Choose = Callable[[ConvKey], Backend]
"""Selects the backend of a convolution in one direction."""


def convolve(
    x: Tensor,
    w: Tensor,
    geometry: ConvGeometry,
    choose: Choose,
    bias: Tensor | None = None,
    workspace: Workspace = new_workspace,
) -> Tensor:
    """Computes a convolution with the chosen backends.

    Backends of the backward pass are chosen in the forward pass, and only if a gradient is
    needed. If all of them are ``native``, torch's function is called, with its bits and its
    second derivative.

    Args:
        x: The input [N, C, H, W].
        w: The weight, [K, C / groups, R, S], or [C, K / groups, R, S] for a transposed convolution.
        geometry: How the kernel moves.
        choose: Called once for each direction that is needed.
        bias: [K], added to the output.
        workspace: Gives buffers for intermediate results.

    Raises:
        UsageError: Tensors of these sizes or types cannot be convolved, or not by a chosen backend.
    """
    x, w, bias = _autocast(x, w, bias)
    if x.dtype != w.dtype:
        raise UsageError(
            f"convolution: the input is {x.dtype}, the weight {w.dtype}: convert one of them"
        )
    problem = _problem(geometry, x.shape, w.shape)
    if problem is not None:
        raise UsageError(f"convolution: {problem}")
    key, data_key, weight_key = keys_of(x, w, geometry)
    forward = _chosen(choose, key)
    data = weight = NATIVE
    if torch.is_grad_enabled():
        # A direction without a gradient gets the backend of another one, so that it is no
        # reason against torch's function.
        data = _chosen(choose, data_key) if x.requires_grad else forward
        weight = _chosen(choose, weight_key) if w.requires_grad else data
        data = data if x.requires_grad else weight
    if forward is data is weight is NATIVE:
        return convolution(x, w, *geometry, bias)
    apply: Callable[..., Tensor] = _Convolution.apply
    y = apply(x, w, geometry, (forward, data, weight), workspace)
    return y if bias is None else y + bias[:, None, None]


def _chosen(choose: Choose, key: ConvKey) -> Backend:
    backend = choose(key)
    refusal = _refusal(backend, key)
    if refusal is not None:
        raise UsageError(f"convolution: {refusal}")
    return backend


# Equal arguments have equal answers, which take longer than a small convolution.
@lru_cache(maxsize=4096)
def _problem(
    geometry: ConvGeometry, x_size: torch.Size, w_size: torch.Size
) -> str | None:
    return geometry.problem(x_size, w_size)


@lru_cache(maxsize=4096)
def _refusal(backend: Backend, key: ConvKey) -> str | None:
    return backend.refusal(key)


def _autocast(
    x: Tensor, w: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the tensors in the type in which torch would convolve them under
    ``torch.autocast``.
    """
    kind = x.device.type
    # Autocast ignores float64, and converts the arguments of torch's functions only.
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x, w, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype)


class _Convolution(torch.autograd.Function):
    """The function that torch differentiates by the chosen backends."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        geometry: ConvGeometry,
        backends: tuple[Backend, Backend, Backend],
        workspace: Workspace,
    ) -> Tensor:
        # Inputs alone are saved: a workspace is overwritten by the next convolution.
        ctx.save_for_backward(x if w.requires_grad else None, w)
        ctx.size = x.shape
        ctx.geometry = geometry
        ctx.backends = backends
        ctx.workspace = workspace
        return backends[0].forward(x, w, geometry, workspace)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _, data, weight = ctx.backends
        if torch.is_grad_enabled():
            names = " and ".join(sorted({data.name, weight.name}))
            raise RunnerError(
                f"a gradient of a gradient needs the backend 'native' in all directions, not "
                f"{names} (create_graph)"
            )
        x, w = ctx.saved_tensors
        geometry: ConvGeometry = ctx.geometry
        needs_data, needs_weight = ctx.needs_input_grad[:2]
        # A backend may share work between both gradients.
        if needs_data and needs_weight and data is weight:
            gradients = data.backward(gradient, x, w, geometry, ctx.workspace)
            return *gradients, None, None, None
        x_gradient = w_gradient = None
        if needs_data:
            x_gradient = data.backward_data(
                gradient, w, geometry, ctx.size, ctx.workspace
            )
        if needs_weight:
            w_gradient = weight.backward_weight(
                gradient, x, geometry, w.shape, ctx.workspace
            )
        return x_gradient, w_gradient, None, None, None
